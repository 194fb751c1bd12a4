"""Whether attention on a rank's part of the heads still has heads of the model's size.

A reshape by the whole model's count of heads does not fail on a part of the features: it makes as many heads, each of a part of the
size, and the model computes something else. What the size should be the region itself knows: it is run once more, whole and
without values, on inputs of the same shapes.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_5d.pipeline_parallel.stage.outline import TensorOutline
from lightning_5d.recomputation import twin
from lightning_5d.tensor_parallel.arguments import argument, door_of
from lightning_5d.tensor_parallel.feature_uses import Trace, different
from lightning_5d.tensor_parallel.layout import Region, TensorLayout

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Heads:
    """The heads of one call of attention.

    Attributes:
        count: How many.
        size: Features of each; ``None`` where only the scores were seen.
        length: Positions that ask.
    """

    count: int
    size: int | None
    length: int


def heads_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Heads | None:
    """The heads that an operation works on; ``None`` if it is no attention, as far as can be seen."""
    if func is F.scaled_dot_product_attention:
        query = args[0] if args else kwargs["query"]
        return Heads(_count(query), query.shape[-1], query.shape[-2])
    if func in _SOFTMAX:
        scores = args[0] if args else kwargs["input"]
        # (B, N, T, S), or (B * N, T, T): scores of a router are (tokens, experts) or (B, T, experts).
        if scores.ndim >= 4 or (scores.ndim == 3 and scores.shape[-1] == scores.shape[-2]):
            return Heads(_count(scores), None, scores.shape[-2])
    return None


def _count(heads: Tensor) -> int:
    """How many matrices there are in a batch (B, N, …), or in (B * N, …)."""
    return math.prod(heads.shape[1:-2]) if heads.ndim > 3 else heads.shape[0]


class WholeRegion:
    """A region as it was before it was cut, without values.

    Args:
        module: The region's module; the layers must not have been installed yet.
        region: What the layout says about it.
        layout: The layout.
    """

    def __init__(self, module: nn.Module, region: Region, layout: TensorLayout) -> None:
        try:
            self._hollow: nn.Module | None = _hollow(module)
        except _NotAloneError:
            self._hollow = None
        self._region = region
        self._prefix = prefix = f"{region.name}." if region.name else ""
        self._partial = {name.removeprefix(prefix) for name in layout.partial if name.startswith(prefix)}
        inside = (*layout.embeddings, *layout.heads, *(other.name for other in layout.regions if other is not region))
        made_whole = {*layout.gathered, *layout.split}
        self._plain = made_whole.isdisjoint([*region.columns, *region.rows]) and not any(
            n.startswith(prefix) for n in inside
        )
        self._along = layout.sequence is not None
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            shape, rows = list(parameter.shape), layout.weights.get(prefix + name)
            if rows is not None:
                shape[rows.dim] = rows.whole
            self._shapes[name] = tuple(shape)
        self.key = type(module), tuple(self._shapes.values())
        self._mode: FakeTensorMode | None = None
        self._traced: Trace | None = None
        known = {attribute for _, attribute in region.attributes}
        self._widths = {shape[0] for name, shape in self._shapes.items() if prefix + name in layout.weights}
        self._numbers = {key: value for key, value in _numbers(module) if key not in known}

    def suspects(self, heads: Sequence[Heads] = ()) -> str:
        """Attributes that may hold a count of the whole model, for a message."""
        counts = {found.count for found in heads}
        chosen = {key: value for key, value in self._numbers.items() if value in counts and not _of_one(key)} or {
            key: value for key, value in self._numbers.items() if value in self._widths or _is_count(key)
        }
        return ", ".join(f"{key}={value}" for key, value in sorted(chosen.items()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: nn.Module, args: Any, kwargs: Any) -> list[Heads] | Exception:
        """The heads of each call of attention in the whole region; an error if it does not run, or not without values.

        Args:
            module: The region's module, for dtypes and the device.
            args: Positional arguments, as `outlined`.
            kwargs: Keyword arguments, as `outlined`.
        """
        if self._hollow is None:
            return _NotAloneError()
        recorder = Recorder()
        trace = self._trace(self._hollow) if self._plain else None
        error = self._run(self._hollow, module, self._shapes, args, kwargs, trace, recorder)
        self._traced = trace if error is None else None
        return recorder.found if error is None else error

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def uses(self, module: nn.Module, args: Any, kwargs: Any, *, ran: bool = False) -> str | None:
        """What the region's code does that is something else on a part of the features, as the end of a sentence.

        ``None`` if nothing is seen, or if it does not run without values.

        Args:
            module: The region's module, with this rank's parts of its weights.
            args: Positional arguments, as `outlined`.
            kwargs: Keyword arguments, as `outlined`.
            ran: `run` has been the call before, with the same arguments: the whole region is not run again.
        """
        if not self._plain or self._hollow is None:
            return None
        local = {name: tuple(weight.shape) for name, weight in module.named_parameters(remove_duplicate=False)}
        part = _hollow(self._hollow)
        for name, inner in module.named_modules():  # counts as they are now
            now = {key: value for key, value in vars(inner).items() if not key.startswith("_") and key != "forward"}
            vars(part.get_submodule(name)).update(now)
        whole_trace, self._traced = self._traced, None
        if whole_trace is None or not ran:
            whole_trace = self._trace(self._hollow)
            if self._run(self._hollow, module, self._shapes, args, kwargs, whole_trace) is not None:
                return None
        part_trace = self._trace(part)
        if self._run(part, module, local, args, kwargs, part_trace) is not None:
            return None
        return whole_trace.finding or different(whole_trace.operations, part_trace.operations)

    def _trace(self, hollow: nn.Module) -> Trace:
        layers = {
            hollow.get_submodule(name[len(self._prefix) :]): names is self._region.columns
            for names in (self._region.columns, self._region.rows)
            for name in names
            if name.startswith(self._prefix)  # a row layer may be beside the module, as in BERT's attention
        }
        return Trace(layers, self._partial, doors=self._region.door == "module" and not self._along)

    def _run(
        self,
        hollow: nn.Module,
        module: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        args: Any,
        kwargs: Any,
        trace: Trace | None,
        recorder: Recorder | None = None,
    ) -> Exception | None:
        now = dict(module.named_parameters(remove_duplicate=False))
        handles: list[Any] = []
        try:
            with _quietly(), self._without_values(), torch.no_grad():
                for name, shape in shapes.items():
                    owner, _, attribute = name.rpartition(".")
                    like = now[name]
                    weight = torch.empty(shape, dtype=like.dtype, device=like.device)
                    # What makes it a parameter, checked with torch 2.13; the class itself would run several operations more.
                    weight._is_param = True
                    hollow.get_submodule(owner)._parameters[attribute] = weight  # type: ignore[assignment]
                hollow.train(module.training)
                args, kwargs = tree_map(lambda leaf: _empty(leaf, now), (args, kwargs))
                if trace is not None:
                    handles = trace.follow(hollow)
                    place = door_of(args, kwargs)
                    trace.entered(None if place is None else argument(args, kwargs, place))
                with trace or nullcontext(), recorder or nullcontext():
                    output = hollow(*args, **kwargs)
                if trace is not None:
                    trace.returned(output)
        except Exception as error:  # whatever the user's code cannot do without values
            return error
        finally:
            for handle in handles:
                handle.remove()
        return None

    def _without_values(self) -> FakeTensorMode:
        # Private; checked with torch 2.13. Nobody else knows the shapes of any operation on any device. It is kept: to make one looks
        # through the whole call stack.
        if self._mode is None:
            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        return self._mode


@contextmanager
def _quietly() -> Iterator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # it would print a trace for an error that is caught
    try:
        yield
    finally:
        log.disabled = before


def outlined(args: Any, kwargs: Any) -> Any:
    """Arguments without values; caches of keys and values as they are now."""
    return tree_map(
        lambda leaf: TensorOutline(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else twin(leaf),
        (args, kwargs),
    )


def lengthened(outline: Any, length: int) -> Any:
    """Arguments, as `outlined`, of which the first tensor, or ``hidden_states``, has another length.

    With sequence parallelism a region gets its part of the sequence, and makes it whole behind its door.
    """
    args, kwargs = outline

    def longer(leaf: Any) -> Any:
        return TensorOutline((leaf.shape[0], length, *leaf.shape[2:]), leaf.dtype)

    for place, leaf in enumerate(args):
        if isinstance(leaf, TensorOutline):
            return (*args[:place], longer(leaf), *args[place + 1 :]), kwargs
    name = next((name for name, leaf in kwargs.items() if isinstance(leaf, TensorOutline)), "")
    name = "hidden_states" if isinstance(kwargs.get("hidden_states"), TensorOutline) else name
    return args, {**kwargs, name: longer(kwargs[name])} if name else kwargs


def compare(here: Sequence[Heads], whole: Sequence[Heads]) -> tuple[Heads, Heads] | None:
    """The first call of attention whose heads are of another size, or as many, as in the whole region."""
    if len(here) != len(whole):
        return None
    for found, expected in zip(here, whole, strict=True):
        if found.size != expected.size or (found.size is None and found.count == expected.count):
            return found, expected
    return None


class Recorder(TorchFunctionMode):
    """Writes down the heads of all calls of attention under it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Heads] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        heads = heads_of(func, args, kwargs or {})
        if heads is not None:
            self.found.append(heads)
        return func(*args, **kwargs or {})


class _NotAloneError(Exception):
    """A module cannot be run without itself."""


def whole_regions(module: nn.Module, layout: TensorLayout) -> Iterator[tuple[str, WholeRegion]]:
    """The regions that this rank has, by name, before they are cut."""
    for region in layout.regions:
        try:
            yield region.name, WholeRegion(module.get_submodule(region.name), region, layout)
        except AttributeError:  # in a block of another stage
            continue


def _numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Whole numbers that the user's code keeps in a module, or in its configuration."""
    for inner in module.modules():
        if isinstance(inner, nn.Linear) or type(inner).__module__.startswith("torch."):
            continue
        for holder in (inner, getattr(inner, "config", None)):
            for key, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                    yield key, value


def _of_one(key: str) -> bool:
    return any(word in key for word in ("size", "dim", "width"))


def _is_count(key: str) -> bool:
    return ("head" in key or key.startswith(("n_", "num_"))) and not _of_one(key)


def _hollow(module: nn.Module) -> nn.Module:
    """A module of the same class, with the same attributes and no hooks, whose weights can be replaced."""
    new = copy.copy(module)
    own = vars(module).get("forward")
    if own is not None:
        if getattr(own, "__self__", None) is not module:
            raise _NotAloneError  # it may hold on to the module itself, and would run that
        new.__dict__["forward"] = MethodType(own.__func__, new)
    for key in ("_parameters", "_buffers", "_modules"):
        new.__dict__[key] = dict(vars(module)[key])
    for key in _HOOKS:
        new.__dict__[key] = OrderedDict()
    for key, parameter in new._parameters.items():
        if parameter is not None:
            new._parameters[key] = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
    for key, child in new._modules.items():
        if child is not None:
            new._modules[key] = _hollow(child)
    return new


def _empty(leaf: Any, like: Mapping[str, Tensor]) -> Any:
    if not isinstance(leaf, TensorOutline):
        return leaf
    device = next((tensor.device for tensor in like.values()), torch.device("cpu"))
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
