"""A close look at the first step of each kind: whether the user's code fits a module of which each rank has a part.

Reshapes by a count of heads, uses of a weight beside its module, positions that are mixed where a rank has some of them: little of it fails
by itself, and most would train something else. Everything here costs a first step some time and later ones nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lightning_5d.absent import Absent
from lightning_5d.names import plain_name
from lightning_5d.pipeline_parallel.stage.run import StageBoundary
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.gradient_agreement import compare as compare_gradients
from lightning_5d.tensor_parallel.head_sizes import (
    Heads,
    WholeRegion,
    compare,
    heads_of,
    lengthened,
    outlined,
    whole_regions,
)
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.placement import placed_elsewhere
from lightning_5d.tensor_parallel.running import Running, calling_line, came_between_ranks
from lightning_5d.tensor_parallel.sequence_mixing import mixes_positions
from lightning_5d.tensor_parallel.weight_uses import WeightUses

_LOSS = "the loss"  # no parameter's name has a space
_BY_HEADS = " Reshape by the size of a head and not by the count of heads, x.view(B, T, -1, head_size)"
_BY_PARTS = " Keep sizes, weights and buffers of the whole width out of it"
_OTHERS = (MisconfigurationException, torch.OutOfMemoryError, dist.DistError)


class FirstStep:
    """The guards of one module.

    Args:
        module: The module, before its weights are placed and its layers installed: its regions then still know the whole model's counts.
        layout: What is going to be installed.
        axis: The ranks.
        compute: The dtype that modules compute in, if not their own.
    """

    def __init__(
        self, module: nn.Module, layout: TensorLayout, axis: TensorAxis, compute: torch.dtype | None = None
    ) -> None:
        self._module, self._layout, self._axis = module, layout, axis
        self._elsewhere = placed_elsewhere(module)
        self._coarse = compute in (torch.float16, torch.bfloat16)
        self._uses = WeightUses(module, layout, axis.size)
        self._whole = dict(whole_regions(module, layout))
        self._watched: set[str] = set()
        self._compared = False
        self._loss: Tensor | None = None

    def note_loss(self, loss: Tensor) -> None:
        """Keeps the first loss, which all ranks of the axis have to have alike, until `check_gradients`."""
        if not self._compared:
            self._loss = loss.detach()

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        """A context around a step's call; does nothing after the first one of its kind that ended well.

        Args:
            kind: What kind of step it is: ``"train"``, ``"validate"``, …, and of which stage.

        Raises:
            MisconfigurationException: From inside, if the module's code does not fit its being cut: says what, where, and what to do.
        """
        if kind in self._watched:
            yield
            return
        watch = _Watch(self._module, self._layout, self._axis.size, self._uses, self._whole)
        try:
            with watch.looking():
                yield
        except StageBoundary:  # a stage of a pipeline has come to its end
            self._watched.add(kind)
            raise
        except Exception as error:
            watch.explain(error)
            raise
        self._watched.add(kind)

    def check_gradients(self) -> None:
        """Compares, after the first backward, gradients that all ranks must have alike; all ranks of the axis call it.

        Raises:
            MisconfigurationException: On all ranks, if they differ: code that is given a part uses a weight as if it were given all.
        """
        if self._compared:
            return
        layout = self._layout
        apart = {plain_name(name) for name in (*layout.weights, *layout.partial, *self._elsewhere)}
        gradients: dict[str, Tensor | None] = {
            name: parameter.grad
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and plain_name(name) not in apart
        }
        device = next((gradient.device for gradient in gradients.values() if gradient is not None), torch.device("cpu"))
        if self._loss is not None:
            gradients[_LOSS], self._loss = self._loss, None
        found = compare_gradients(gradients, self._axis, device, 1e-2 if self._coarse else 1e-4)
        self._compared = found.seen
        if _LOSS in found.differing:
            raise MisconfigurationException(
                f"The first loss is not the same on the {self._axis.size} ranks of the tensor axis, which compute it together: it differs by"
                f" {found.differing[_LOSS]:.1e} of its size. Either they have not got the same batch, as with a sampler of one's own that deals"
                " by global rank (FiveD.distributed_sampler_kwargs has the right numbers), or draw other random numbers, or the loss is made of"
                " what each rank has a part of: activations from inside of a module whose layers are cut, or with sequence_parallel from"
                " between the blocks."
            )
        if found.differing:
            worst = max(found.differing, key=lambda name: found.differing[name])
            raise MisconfigurationException(
                f"After the first backward the gradient of {worst} is not the same on the {self._axis.size} ranks of the tensor axis,"
                f" which all hold the whole weight: their sums differ by {found.differing[worst]:.1e} of its size"
                f"{_more(found.differing, worst)}. So it is used on something of which each rank has a part, and the plan does not say so:"
                " inside of a module whose layers are cut, or with sequence_parallel on a part of the sequence. Name its module in the plan"
                f" of TensorParallel (nearest module: {worst.rpartition('.')[0] or type(self._module).__name__}), or take the layers around"
                " it out of the plan."
            )


class _Watch(TorchFunctionMode):
    """Looks at one step."""

    def __init__(
        self, module: nn.Module, layout: TensorLayout, size: int, uses: WeightUses, whole: dict[str, WholeRegion]
    ) -> None:
        super().__init__()
        self._module, self._layout, self._size, self._uses, self._whole = module, layout, size, uses, whole
        self._running = Running()
        self._doors = frozenset(region.name for region in layout.regions if region.door == "module")
        sequence = layout.sequence
        self._cut = frozenset() if sequence is None else frozenset([*sequence.blocks, sequence.whole])
        self._length: int | None = None  # of the sequence, between the cut and the whole
        self._batch = 0
        self._between = self._warned = False
        self._heads: dict[str, list[Heads]] = {}
        self._inputs: dict[str, Any] = {}
        self._checked: set[Any] = set()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A context around the step."""
        with ExitStack() as stack:
            stack.enter_context(self._running.following(self._module, self._apart))
            for name in {*self._whole, *self._cut}:
                try:
                    module = self._module.get_submodule(name)
                except AttributeError:  # of another stage
                    continue
                if isinstance(module, Absent):
                    continue
                # Behind all other hooks: with what they have made of the inputs.
                hooks = [
                    module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, name)),
                ]
                for hook in hooks:
                    stack.callback(hook.remove)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and looks at it."""
        kwargs = kwargs or {}
        heads = heads_of(func, args, kwargs) if self._heads else None
        if heads is not None:
            for found in self._heads.values():
                found.append(heads)
        output = func(*args, **kwargs)
        self._uses.look(func, args, kwargs, output, self._running)
        if self._length is not None:
            self._look_at_sequence(func, args, kwargs)
        return output

    def explain(self, error: Exception) -> None:
        """Raises a better error, if what failed is the code of a region, or of a block that has a part of the sequence."""
        if isinstance(error, _OTHERS) or came_between_ranks(error):
            return
        for name in reversed(self._running.names):
            if name in self._whole:
                whole = self._run_whole(name, self._heads.get(name))
                if type(whole) is type(error):
                    return  # it has nothing to do with the cut
                raise MisconfigurationException(
                    self._of_region(name, error, whole if isinstance(whole, list) else [])
                ) from error
            if name in self._cut:
                if self._length is None:
                    return  # the cut itself has said what is wrong
                raise MisconfigurationException(
                    f"{self._named(name)} failed in its first run with sequence_parallel=True, where it gets {self._length} positions of the"
                    f" sequence (dimension 1) on each of {self._size} ranks: {_written(error)}. If it needs all of them outside"
                    " of attention and feed-forward layers, use TensorParallel without sequence_parallel."
                ) from error

        if self._between and self._length is not None:
            raise MisconfigurationException(
                f"{self._running.place} failed in its first run with sequence_parallel=True, between blocks, where activations have"
                f" {self._length} positions of the sequence (dimension 1) on each of {self._size} ranks: {_written(error)}. If it"
                " brings anything from before the first block to what comes behind, use TensorParallel without sequence_parallel."
            ) from error

    def _of_region(self, name: str, error: Exception, heads: list[Heads]) -> str:
        suspects = self._whole[name].suspects(heads)
        counts = f" The whole has {heads[0].count} heads." if heads else ""
        return (
            f"{self._named(name)} failed in its first run on its part of the features ({self._size} ranks of the tensor axis):"
            f" {_written(error)}.{counts}"
            f"{f' Numbers of the whole model in it: {suspects}.' if suspects else ''}"
            f"{_BY_HEADS if heads or suspects else _BY_PARTS}, or take its layers out of the plan of TensorParallel."
        )

    def _look_at_sequence(self, func: Any, args: Any, kwargs: Any) -> None:
        running, length = self._running, self._length
        if length is None or not self._doors.isdisjoint(running.names):
            return
        inside = not self._cut.isdisjoint(running.names)
        if not inside and not self._between:
            return
        if mixes_positions(func, args, kwargs, length, self._batch):
            line = calling_line()
            if line is not None:
                raise MisconfigurationException(
                    f"{running.place} mixes positions ({func.__name__}, {line}), of which each of {self._size} ranks has {length} with"
                    " sequence_parallel=True: the sequence is cut before the first block and whole again after"
                    f" {self._layout.sequence.whole if self._layout.sequence else ''}, and between them it is whole only inside attention and"
                    " feed-forward layers. Use TensorParallel without sequence_parallel."
                )
        name = getattr(func, "__name__", "")
        if not inside and not self._warned and name.removesuffix("_") in ("dropout", "alpha_dropout", "bernoulli"):
            x = args[0] if args else kwargs.get("input")
            rate, training = kwargs.get("p", 0.5), kwargs.get("training", True)
            if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[1] == length and rate and training:
                self._warned = True
                rank_zero_warn(
                    f"{running.place} draws random numbers ({name}) between blocks, where each of {self._size} ranks has a part of the"
                    " sequence: all parts get the same numbers."
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self._cut:
            self._between = False
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim >= 3]
            self._length = tensors[0].shape[1] if tensors else None
            self._batch = tensors[0].shape[0] if tensors else 0
        if name in self._whole and self._whole[name].key not in self._checked:
            self._heads[name] = []
            self._inputs[name] = outlined(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name in self._cut:
            sequence = self._layout.sequence
            self._between = sequence is not None and name != sequence.whole
            if not self._between:
                self._length = None
        here = self._heads.pop(name, None)
        if here:
            whole = self._run_whole(name, here)
            different = compare(here, whole) if isinstance(whole, list) else None
            if different is not None:
                raise MisconfigurationException(self._of_heads(name, *different))
        self._look_at_features(name, here)
        self._inputs.pop(name, None)

    def _look_at_features(self, name: str, heads: list[Heads] | None) -> None:
        if name not in self._inputs:
            return
        self._checked.add(self._whole[name].key)
        inputs = self._inputs_of_whole(name, heads)
        with self._unwatched():
            found = self._whole[name].uses(self._module.get_submodule(name), *inputs, ran=bool(heads))
        if found is not None:
            raise MisconfigurationException(
                f"{self._named(name)} {found}. It has a part of the features, or the heads, on each of {self._size} ranks of the tensor axis,"
                " and would compute something else without failing: between its layers, code may only work on single features, or on whole"
                " heads; it may not send its input past them, and only sums of its layers' outputs may leave it. Move that out of"
                f" {type(self._module.get_submodule(name)).__name__}, or take its layers out of the plan of TensorParallel."
            )

    def _of_heads(self, name: str, here: Heads, whole: Heads) -> str:
        suspects = self._whole[name].suspects([whole])
        got = (
            f"makes {here.count} heads of size {here.size} out of its part of the features"
            if here.size is not None
            else f"makes {here.count} heads out of its part of the features"
        )
        wanted = f" of size {whole.size}" if whole.size is not None else ""
        return (
            f"{self._named(name)} {got}; the whole module has {whole.count} heads{wanted}, which each of {self._size} ranks of the tensor"
            " axis should have a part of. So it reshapes by the whole model's count of heads"
            f"{f' ({suspects})' if suspects else ''}, and would compute something else without failing. Reshape by the size of a head,"
            " x.view(B, T, -1, head_size), or take its layers out of the plan of TensorParallel."
        )

    def _run_whole(self, name: str, here: list[Heads] | None) -> list[Heads] | Exception | None:
        if name not in self._inputs:
            return None
        inputs = self._inputs_of_whole(name, here)
        with self._unwatched():
            found: list[Heads] | Exception = self._whole[name].run(self._module.get_submodule(name), *inputs)
            return found

    def _inputs_of_whole(self, name: str, here: list[Heads] | None) -> Any:
        inputs = self._inputs[name]
        if self._length is not None and name in self._doors:
            inputs = lengthened(inputs, here[0].length if here else self._length * self._size)
        return inputs

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        # Private; checked with torch 2.13. Modes are a stack, and somebody may have put one on top.
        watched = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if watched:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if watched:
                self.__enter__()  # type: ignore[no-untyped-call]

    def _apart(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def unwatched(*args: Any, **kwargs: Any) -> Any:
            with self._unwatched():
                return compiled(*args, **kwargs)

        return unwatched

    def _named(self, name: str) -> str:
        kind = type(self._module.get_submodule(name)).__name__
        return f"{name} ({kind})" if name else kind


def _written(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(". ")


def _more(found: dict[str, float], worst: str) -> str:
    others = [name for name in found if name != worst]
    if not others:
        return ""
    return f" (the same is true of {', '.join(others[:5])}{', …' if len(others) > 5 else ''})"
