"""A module's forward that keeps only its inputs, and runs again in backward exactly as it ran the first time.

`torch.utils.checkpoint` restores torch's generators and autocast. What else a module may read or write while it runs, and what
a second run must neither see changed nor change again, is in `Surroundings`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_5d.replaced_forward import ReplacedForward
from lightning_5d.saved_activations import Agree, Measured

Context = Callable[[], AbstractContextManager[Any]]
Rerun = Callable[[], AbstractContextManager[tuple[Callable[[], Any], list[Tensor]]]]


class Keeping(Protocol):
    """Decides what a checkpointed module keeps besides its inputs."""

    def policy(self, rerun: Rerun, agree: Agree) -> Any:
        """The policy for one call; `KEEP_INPUTS` for none, `KEEP_ALL` to leave the module as it is.

        Args:
            rerun: A context that gives a function which runs the module without a trace, and the inputs it runs on.
            agree: Makes what was measured the same on ranks that have to decide alike.
        """

    def traced(self) -> Any:
        """The policy where `torch.compile` traces the module, and nothing can be run or measured."""


KEEP_INPUTS = None
KEEP_ALL = object()


class CheckpointedForward(ReplacedForward):
    """Runs a module so that its activations are computed again in backward.

    Hooks of the module run outside of it, once; FSDP2 so gathers a block's parameters once in backward, before the block
    runs again. Without gradients it only calls the original.

    Args:
        module: The module.
        keeping: What is kept besides inputs.
        around: Gives, before a first run, what later ones have to run in.
        agree: See `Keeping.policy`.
    """

    def __init__(self, module: nn.Module, keeping: Keeping, around: Callable[[], Context], agree: Agree) -> None:
        super().__init__(module)
        self.keeping, self.around, self.agree = keeping, around, agree
        self.written = Written(module)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module, or a pickle of it, is nobody's step: it must not take strategy and Trainer with it.
        return {"module": self.module, "keeping": self.keeping, "previous": self.previous}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, around=_nothing, agree=_alone, written=Written(state["module"]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module, to be run again when a backward needs it."""
        return self.recomputed(self.original, *args, **kwargs)

    def recomputed(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs what computes with the module in its forward's place, to be run again when a backward needs it."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._trace(run, *args, **kwargs)
        call = Call(self, run, args, kwargs)
        if not any(tensor.requires_grad for tensor in chain(call.tensors, self.module.parameters())):
            return run(*args, **kwargs)
        policy = self.keeping.policy(call.rerun, self.agree)
        if policy is KEEP_ALL:
            return run(*args, **kwargs)
        # Tensors go in one by one: torch then notices if somebody writes to one before backward.
        return checkpoint(call, *call.tensors, use_reentrant=False, context_fn=partial(call.contexts, policy))

    def _trace(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        policy = self.keeping.traced()
        if policy is KEEP_INPUTS:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        context_fn = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(run, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


class Call:
    """One call of a checkpointed module: its arguments as they were before it ran."""

    def __init__(
        self, owner: CheckpointedForward, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner, self._run = owner, run
        leaves, self._spec = tree_flatten((args, kwargs))
        self._rest = [None if isinstance(leaf, Tensor) else twin(leaf) for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # The first run gets the caller's own lists and caches, into which it may write.
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)

    def __call__(self, *tensors: Tensor) -> Any:
        """The first run, or a later one with tensors that torch has kept."""
        if self._given is not None:
            args, kwargs = self._given
            self._given, self.tensors = None, []  # or inputs would be held beside torch's own record of them
            return self._run(*args, **kwargs)
        kept = iter(tensors)
        leaves = [
            next(kept) if is_tensor else twin(leaf) for leaf, is_tensor in zip(self._rest, self._is_tensor, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._run(*args, **kwargs)

    def contexts(self, policy: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What the first run and later runs happen in."""
        surroundings = Surroundings(self.owner.around, self.owner.written)
        if policy is KEEP_INPUTS:
            return Entered(surroundings.first), Entered(surroundings.again)
        caching, cached = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return Entered(surroundings.first, lambda: caching), Entered(surroundings.again, lambda: cached)

    @contextmanager
    def rerun(self) -> Iterator[tuple[Callable[[], Any], list[Tensor]]]:
        """Gives a function that runs the module before its first run, without a trace, and the inputs it uses."""
        # Copies, and not leaves: the module may write to its inputs.
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad).clone() for tensor in self.tensors]
        given, self._given = self._given, None
        accelerators = sorted({t.device.index or 0 for t in inputs if t.device.type not in ("cpu", "meta")})
        kind = next((t.device.type for t in inputs if t.device.type not in ("cpu", "meta")), "cuda")
        surroundings = Surroundings(self.owner.around, self.owner.written)
        surroundings.note()
        try:
            with torch.random.fork_rng(devices=accelerators, device_type=kind), surroundings.again(axes=False):
                yield partial(self, *inputs), inputs
        finally:
            self._given = given


class Surroundings:
    """What a module reads and writes besides its arguments and parameters, as it was when it ran first.

    Python's and NumPy's random numbers, the default dtype, the contexts of the axes, and buffers that the module writes
    (running statistics, the vectors of a spectral norm): a second run sees their old values and leaves no new ones.
    """

    def __init__(self, around: Callable[[], Context], written: Written) -> None:
        self._around, self._written = around, written

    def note(self) -> None:
        """Writes down how things are now."""
        self._axes = self._around()
        self._generators: tuple[Any, Any] | None = (random.getstate(), np.random.get_state())
        self._dtype = torch.get_default_dtype()
        self._buffers = self._written.before()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first run."""
        self.note()
        with _casts_not_kept():
            yield
        self._buffers = self._written.after(self._buffers)
        if self._generators is not None and not _have_drawn(*self._generators):
            self._generators = None  # nothing to hold and to set for one that draws no such numbers

    @contextmanager
    def again(self, axes: bool = True) -> Iterator[None]:
        """Around any later run."""
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            if axes:
                stack.enter_context(self._axes())
            stack.enter_context(swapped(self._buffers))
            stack.enter_context(_casts_not_kept())
            if self._generators is not None:
                stack.enter_context(_generators_at(*self._generators))
            torch.set_default_dtype(self._dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)


def _nothing() -> Context:
    return nullcontext


def _alone(measured: Measured) -> Measured:
    return measured


@contextmanager
def _generators_at(python: Any, numpy_: Any) -> Iterator[None]:
    """Python's and NumPy's random numbers go on from these states, and afterwards from where they were."""
    before = random.getstate(), np.random.get_state()
    random.setstate(python)
    np.random.set_state(numpy_)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _have_drawn(python: Any, numpy_: Any) -> bool:
    """Whether anybody has drawn a number since these states."""
    now = np.random.get_state()
    return bool(
        random.getstate() != python
        or any(
            not np.array_equal(one, other) if isinstance(one, np.ndarray) else one != other
            for one, other in zip(now, numpy_, strict=True)
        )
    )


@contextmanager
def _casts_not_kept() -> Iterator[None]:
    # Autocast casts a weight once and keeps it; a first run would then find casts of earlier ones that a later run lacks,
    # and selective checkpointing counts operations.
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@dataclass(frozen=True)
class Buffer:
    """A buffer before a forward: where it is, the tensor, its version, and a copy if the forward may write to it."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    copied: Tensor | None

    @property
    def key(self) -> tuple[int, str, bool]:
        """What it is known by; a module may write in training and not in evaluation."""
        return id(self.owner), self.name, self.owner.training

    def written(self) -> bool:
        """Whether it has been written to, or replaced, since."""
        if self.owner._buffers.get(self.name) is not self.tensor or self.tensor._version != self.version:
            return True
        if isinstance(self.owner, _NormBase):
            return self.owner.training  # batch normalization leaves no trace in the version; checked with torch 2.13
        return self.copied is not None and not torch.equal(self.copied, self.tensor)


class Written:
    """The buffers inside a module that its forward writes, as far as is known."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._constant: set[tuple[int, str, bool]] = set()

    def before(self) -> list[Buffer]:
        """Every buffer, with a copy of those that a forward may write."""
        # One that a forward has left alone is not copied again: it may be a large mask.
        return [
            Buffer(
                owner,
                name,
                tensor,
                tensor._version,
                None if (id(owner), name, owner.training) in self._constant else tensor.clone(),
            )
            for owner in self.module.modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None and not tensor.is_inference()
        ]

    def after(self, before: Sequence[Buffer]) -> list[Buffer]:
        """Those that have been written since."""
        written = [buffer for buffer in before if buffer.written()]
        self._constant |= {buffer.key for buffer in before}
        self._constant -= {buffer.key for buffer in written}
        return written


@contextmanager
def swapped(buffers: Sequence[Buffer]) -> Iterator[None]:
    """Puts the old values in place of buffers, as tensors of their own, and takes them out again."""
    now = [buffer.owner._buffers.get(buffer.name) for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.owner._buffers[buffer.name] = (buffer.tensor if buffer.copied is None else buffer.copied).clone()
        yield
    finally:
        for buffer, current in zip(buffers, now, strict=True):
            buffer.owner._buffers[buffer.name] = current


class Entered:
    """Several contexts as one that can be entered any number of times: a graph may be gone through more than once."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[Any]]) -> None:
        self._makers = makers
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._stacks.append(stack.pop_all())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stacks.pop().__exit__(*raised)


def twin(leaf: Any) -> Any:
    """A copy of a key/value cache that holds the same tensors and can be written to; anything else is itself.

    A cache in the manner of Hugging Face grows in each layer: the second run must find it as the first one did.
    """
    if not (hasattr(leaf, "update") and hasattr(leaf, "get_seq_length")):
        return leaf
    package = type(leaf).__module__.split(".")[0]

    def copied(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(copied(item) for item in value)
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        own = type(value).__module__.split(".")[0] == package and hasattr(value, "__dict__")
        if not own or isinstance(value, Tensor | nn.Module | type):
            return value
        new = copy.copy(value)
        new.__dict__.update({key: copied(item) for key, item in value.__dict__.items()})
        return new

    return copied(leaf)
