"""Doors: where whole sequences become this rank's tokens, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_5d.absent import Absent
from lightning_5d.context_parallel.adaptation import Adaptation
from lightning_5d.context_parallel.arguments import (
    Entering,
    Signature,
    changed,
    continues,
    cut_dimension,
    enter_shown,
    mapped,
    plain_entering,
    shared,
    shown_entering,
)
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.documents import StepDocuments
from lightning_5d.context_parallel.hugging_face_loss import wrap_losses
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.leaving import Leaving
from lightning_5d.context_parallel.lengths import BatchLengths, Keys, Path, batch_lengths, check_length, named_tensors
from lightning_5d.context_parallel.shown import SequenceShard, is_shown
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.replaced_forward import AroundForward
from lightning_5d.tensor_parallel.axis import TensorAxis

# [Note: doors]
# In a step, code of the LightningModule sees whole sequences, and code of the modules it calls this rank's tokens. The outermost call
# of a module with weights is the door, whichever module that is: `self.model(ids)`, `self.layers[3](x)` and `self.model.lm_head(h)` alike.
# So every module with weights gets the hooks, and those inside of an open door do nothing. What comes first cuts the arguments,
# before FSDP's and anybody else's hooks; what comes last shows the outputs. In between, around the forward itself, lies the
# context in which attention is redirected: it ends with whatever exception comes through, as that of a pipeline's boundary.
# A call that gets no tensor with a sequence is no door: it computes on whole tensors, the same on all ranks. So does any call outside of
# a step, and one that goes on with cached keys and values.
# Gradients: at the user's level they are whole, and the same on all ranks or shown like the outputs. Inside they are c times those of the
# rank's own tokens, as data parallelism takes the mean over the ranks. `SequenceShard` does both where tensors are cut and shown,
# `shared` where a whole one enters.


class Doors:
    """The doors of a LightningModule, installed until `close`.

    Args:
        module: The user's module, with all other axes at work on it.
        axis: The ranks of ``cp``.
        cut: How a sequence of so many tokens is cut.
        around: A context for code inside of doors, in which attention is redirected.
        keys: Sequence dimensions by name; see `Keys`.
        pad: Whether lengths that the ranks do not divide are padded.
        documents: The entry of the batch that says which document each token belongs to; see `StepDocuments`.
        is_split: Whether a pipeline splits batches into microbatches.

    Attributes:
        inside: The door that is open; ``None`` at the user's level.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: TensorAxis,
        cut: Callable[[int], SequenceCut],
        around: Callable[[Inside], AbstractContextManager[Any]],
        *,
        keys: Mapping[str, int | None] | None = None,
        pad: bool = True,
        documents: str | None = None,
        is_split: bool = False,
    ) -> None:
        self.inside: Inside | None = None
        self._axis, self._cut, self._around, self._pad = axis, cut, around, pad
        self._keys = Keys(keys)
        self._lengths: BatchLengths | None = None
        self._entry, self._is_split = documents, is_split
        self._documents: StepDocuments | None = None
        self._sequences: dict[int, StepSequence] = {}
        self._within = 0
        self._entered = False
        self._told = False
        self._pending: dict[int, _Call] = {}
        self._left: dict[int, _Call] = {}
        self._doors: list[_Door] = []
        self._handles: list[Any] = []
        for name, inner in _callable_modules(module):
            door = _Door(name, inner, self)
            if door.takes_part:
                self._doors.append(door)
                self._handles.append(
                    inner.register_forward_pre_hook(_Hook(door, "enter"), prepend=True, with_kwargs=True)
                )
                self._handles.append(inner.register_forward_hook(_Hook(door, "leave")))
        self._losses = wrap_losses(module, lambda: self.inside)

    @contextmanager
    def step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """A context around one call of a step of the user: calls of models in it are doors.

        Args:
            args: The step's arguments.
            kwargs: Those by name.

        Raises:
            MisconfigurationException: If the batch has no sequence, or one that cannot be cut.
        """
        lengths = batch_lengths(args, kwargs, self._keys)
        for name, length in lengths.by_name.items():
            check_length(self._cut(length), name, pad=self._pad)
        before, self._lengths, self._entered = self._lengths, lengths, False
        within, self._within = self._within, 0
        known = self._documents
        if self._entry is not None:
            self._documents = StepDocuments.of(self._entry, args, kwargs, lengths, self._is_split)
        try:
            yield
            if not self._entered and not self._told:
                self._told = True
                found = ", ".join(f"{name} with {length} tokens" for name, length in lengths.by_name.items())
                rank_zero_warn(
                    f"ContextParallel: no module was called with a sequence of this batch ({found}), so every rank computed all of it. Name the"
                    " sequence dimension of what the model is called with, as in ContextParallel(keys={'x': 1})."
                )
        finally:
            self._lengths, self._within, self._documents = before, within, known
            self._pending.clear()
            self._left.clear()

    @contextmanager
    def entered(self, inside: Inside | None) -> Iterator[None]:
        """A context in which a door is open, perhaps once more: for what runs again in backward.

        Args:
            inside: What `inside` was then.
        """
        before, within = self.inside, self._within
        self.inside, self._within = inside, self._within + 1
        try:
            if inside is None:
                yield
            else:
                with self._around(inside):
                    yield
        finally:
            self.inside, self._within = before, within

    @property
    def outside(self) -> bool:
        """Whether code of the user's level is running: no door is open, nor on its way in or out."""
        return self.inside is None and not self._pending and not self._left

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """What a part of a step that is about to run has to run in whenever it runs again, see `Parallelized.recompute_context`."""
        inside, lengths = self.inside, self._lengths
        if inside is not None or lengths is None or self._within:
            return lambda: self.entered(inside)
        return lambda: self._user_level(lengths)

    @contextmanager
    def _user_level(self, lengths: BatchLengths) -> Iterator[None]:
        """A context in which calls of models are doors, as in the step with sequences of these lengths."""
        before = self._lengths, self.inside, self._within
        self._lengths, self.inside, self._within = lengths, None, 0
        try:
            yield
        finally:
            self._lengths, self.inside, self._within = before

    def unused_keys(self) -> list[str]:
        """Names in `keys` that nothing was called so far."""
        return self._keys.unused()

    def sequence(self, length: int) -> StepSequence:
        """The sequence of so many tokens; one object for each length."""
        if length not in self._sequences:
            self._sequences[length] = StepSequence(self._cut(length), self._axis)
        return self._sequences[length]

    def close(self) -> None:
        """Takes everything off the module again."""
        for handle in self._handles:
            handle.remove()
        for door in self._doors:
            door.close()
        for loss in self._losses:
            loss.close()
        self._handles, self._doors, self._losses = [], [], []

    def _enter(self, door: _Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward."""
        self._pending.pop(id(door.module), None)
        self._left.pop(id(door.module), None)
        if self.inside is not None:
            return None if door.adaptation is None else door.adaptation(self.inside, args, kwargs)
        lengths = self._lengths
        if lengths is None or self._within or not door.has_weights:
            return None
        named = door.signature.named(args, kwargs)
        how = self._entering(door, named)
        if how is None:
            new = {name: mapped(value, _made_whole) for name, value in named.items()}
            self._tell_of_whole(door, new, lengths)
            return door.signature.replaced(args, kwargs, changed(named, new))
        sequence = self.sequence(how.length)
        limits = None if self._documents is None else self._documents.limits(door.name, how.rows, how.length)
        inside = Inside(door.name, sequence, rows=how.rows, limits=limits)
        new = self._cut_arguments(door, named, lengths, sequence, how)
        self._pending[id(door.module)] = _Call(inside, how)
        self._entered = True
        args, kwargs = door.signature.replaced(args, kwargs, changed(named, new))
        adapted = None if door.adaptation is None else door.adaptation(inside, args, kwargs)
        return (args, kwargs) if adapted is None else adapted

    def _tell_of_whole(self, door: _Door, named: Mapping[str, Any], lengths: BatchLengths) -> None:
        """Says once that a module computes all of something that looks like sequences of another length."""
        given = [(path, x) for path, x in named_tensors(named) if x.ndim == 3 and (door.name, *path) not in self._keys]
        if door.told or not given or continues(named):
            return
        door.told = True
        path, tensor = given[0]
        found = " and ".join(str(length) for length in sorted(set(lengths.by_name.values())))
        rank_zero_warn(
            f"ContextParallel: every rank computes all of {door.name}, which was called with {'.'.join(path)} of shape {tuple(tensor.shape)}; the"
            f" sequences of the batch have {found} tokens. If these are sequences as well:"
            f' ContextParallel(keys={{"{door.name}.{".".join(path)}": 1}}).'
        )

    def _entering(self, door: _Door, named: dict[str, Any]) -> Entering | None:
        """How a call is cut; ``None`` if it is no door."""
        if self._lengths is None:
            return None
        if continues(named):
            self._entered = True  # it is meant to be whole
            return None
        shown = shown_entering(door.name, named)
        how = shown or plain_entering(door.name, named, self._lengths, self._keys, self._enough)
        if how is None or not self._enough(how.length):
            return None
        check_length(self._cut(how.length), f"An argument of {door.name}", pad=self._pad)
        return how

    def _enough(self, length: int) -> bool:
        return length >= self._cut(length).multiple

    def _cut_arguments(
        self, door: _Door, named: dict[str, Any], lengths: BatchLengths, sequence: StepSequence, how: Entering
    ) -> dict[str, Any]:
        def enter(path: Path, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if is_shown(value):
                return enter_shown(value, sequence)
            dim = cut_dimension(door.name, path, value, how, lengths, self._keys)
            return shared(value, self._axis) if dim is None else SequenceShard.enter(value, dim, sequence)

        return {name: mapped(value, enter, (name,)) for name, value in named.items()}


def _made_whole(path: Path, value: Any) -> Any:
    return value.whole() if is_shown(value) else value


class _Call:
    """One call of a door between its first hook and its last."""

    def __init__(self, inside: Inside, how: Entering) -> None:
        self.inside, self.how = inside, how


class _Door(AroundForward):
    """A module's place as a door: the context around its forward, and what is known about it."""

    def __init__(self, name: str, module: nn.Module, doors: Doors) -> None:
        super().__init__(module)
        self.name = name
        self.doors: Doors | None = doors
        self.signature = Signature.of(module)
        self.has_weights = _has_weights(module)
        self.adaptation = Adaptation.of(name, module, self.signature)
        self.leaving = Leaving(name, module, doors._keys)
        self.told = False
        if self.has_weights:
            module.__dict__["forward"] = self

    @property
    def takes_part(self) -> bool:
        """Whether anything happens at the module."""
        return self.has_weights or self.adaptation is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module, inside if it is a door."""
        doors = self.doors
        if doors is None or doors._lengths is None or doors._within:
            return self.run(*args, **kwargs)
        call = doors._pending.pop(id(self.module), None)
        with doors.entered(None if call is None else call.inside):
            output = self.run(*args, **kwargs)
        if call is not None:
            doors._left[id(self.module)] = call
        return output

    def leave(self, output: Any) -> Any:
        """After all other hooks."""
        call = None if self.doors is None else self.doors._left.pop(id(self.module), None)
        return None if call is None else self.leaving(output, call.inside, call.how)

    def close(self) -> None:
        """Gives the module its own forward back, unless somebody else has put one around this one."""
        self.doors = None
        if self.module.__dict__.get("forward") is not self:
            return
        del self.module.__dict__["forward"]
        if self.previous is not None:
            self.module.__dict__["forward"] = self.previous

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of a module computes on whole tensors: it belongs to nobody's step.
        new = super().__deepcopy__(memo)
        new.doors = None
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "previous": self.previous, "doors": None}


class _Hook:
    """A door's hook on its module; a copy of the module, or a pickle of it, has one that does nothing."""

    def __init__(self, door: _Door, which: str) -> None:
        self._door: _Door | None = door
        self._which = which

    def __call__(self, module: nn.Module, args: Any, third: Any) -> Any:
        """Before a forward with keyword arguments, or after one with the output."""
        door = self._door
        if door is None or door.doors is None or door.module is not module:
            return None
        return door.doors._enter(door, args, third) if self._which == "enter" else door.leave(third)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _nothing()

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> _Hook:
    hook = _Hook.__new__(_Hook)
    hook._door, hook._which = None, ""
    return hook


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(isinstance(inner, Absent) for inner in module.modules())


def _callable_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a LightningModule that may be called, but for metrics, stand-ins, and what is inside of compiled ones."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    closed: list[str] = []
    for name, module in root.named_modules():
        if module is root or isinstance(module, Absent) or any(name.startswith(outer) for outer in closed):
            continue
        if isinstance(module, metric):
            closed.append(f"{name}.")
            continue
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            closed.append(f"{name}.")
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield name, module
