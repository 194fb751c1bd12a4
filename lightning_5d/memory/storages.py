"""Every live storage of this process, seen as torch's operators make them."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from typing_extensions import override

from lightning_5d.memory.categories import stronger
from lightning_5d.shown.tensor import ShownTensor

BEFORE = -1
"""The number that stands for what came before the first phase."""

_running: weakref.WeakSet[StorageLog] = weakref.WeakSet()


def _stop_after_fork() -> None:
    # A data-loading worker started meanwhile would go on writing down its own storages for as long as it lives.
    for log in list(_running):
        log.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_after_fork)


@dataclass(eq=False)
class Piece:
    """One storage: a piece of memory that any number of tensors view.

    Attributes:
        address: Where it lies.
        nbytes: Its present size.
        phase: The number of the phase in which it appeared; `BEFORE` if it was there before recording.
        graph: Whether gradients were enabled when it appeared, so that the autograd graph may hold it.
        category: Who holds it, once somebody has claimed it.
        collective: Whether a collective has read or written it.
        died: The number of the phase in which it was freed.
        counted: Bytes that a `Timeline` has counted so far.
        lent: Whether it lies in memory that an exchange keeps, as a `Timeline` has found.
    """

    address: int
    nbytes: int
    phase: int
    graph: bool
    category: str | None = None
    collective: bool = False
    died: int | None = None
    counted: int = 0
    lent: bool = False


@dataclass(frozen=True)
class Change:
    """A piece grew (also: from nothing) or shrank (also: to nothing).

    Attributes:
        time_s: When, by `time.perf_counter`.
        phase: The number of the phase it happened in.
        piece: Which.
        delta: By how many bytes.
        born: Whether this is its first appearance.
    """

    time_s: float
    phase: int
    piece: Piece
    delta: int
    born: bool = False


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down when storages of one device type appear, change size and end, while it is on.

    Sizes are exact, and a storage counts once whatever its views. What a kernel allocates and frees inside itself is not
    seen. torch has `torch.distributed._tools.mem_tracker.MemTracker`, which works alike, but stops at a module's second
    step and fixes what a storage is for at its birth; who holds it is only known later.

    Args:
        device_type: The kind of memory to count.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.phase = BEFORE
        self.changes: list[Change] = []
        self._pieces: dict[int, tuple[Piece, weakref.ref[torch.UntypedStorage]]] = {}
        self._on = self._entered = False
        self._looking = True
        self._resize: Callable[..., Any] | None = None

    def start(self) -> None:
        """Takes in what is alive, and begins."""
        gc.collect()  # tensors in cycles that nobody can reach: they are of no step
        for candidate in gc.get_objects():
            if issubclass(type(candidate), Tensor):
                self.see(candidate)
        self._on = self._entered = True
        _running.add(self)
        self._watch_resizing()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Ends; returns False if another mode was entered since and not left: then call again later."""
        if self._on:
            self._on = False
            _running.discard(self)
            if self._resize is not None:
                torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._pieces.clear()
        if self._entered and _get_current_dispatch_mode() is self:
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._entered

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, operators go unseen: for what the recorder itself does. Ends and changes of size are still seen."""
        before, self._looking = self._looking, False
        try:
            yield
        finally:
            self._looking = before

    def take(self) -> list[Change]:
        """The changes since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def see(self, tensor: Tensor) -> list[Piece]:
        """The pieces behind a tensor; new ones are written down."""
        return [piece for local in _plain(tensor) if (piece := self._piece(local)) is not None]

    def claim(self, tensor: Tensor, category: str) -> None:
        """Says what the memory behind a tensor is for; a weaker claim than an earlier one changes nothing."""
        for piece in self.see(tensor):
            piece.category = stronger(piece.category, category)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self._on and self._looking):
            return func(*args, **(kwargs or {}))
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # a DTensor, for one: it comes back with the tensors inside it
        result = func(*args, **(kwargs or {}))
        collective = func.namespace in ("c10d", "_c10d_functional")
        for tensor in _tensors((args, kwargs, result)):
            piece = self._piece(tensor)
            if collective and piece is not None:
                piece.collective = True
        return result

    def _piece(self, tensor: Tensor) -> Piece | None:
        if is_lazy(tensor) or _is_wrapper(type(tensor)):  # it has no memory of its own, and complains when it is asked
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or functorch's
            return None
        if storage.device.type != self.device_type:  # a FakeTensor's is "meta"
            return None
        known = self._pieces.get(storage._cdata)
        if known is not None:
            self._resized(known[0], storage.nbytes())
            return known[0]
        nbytes = storage.nbytes()
        piece = Piece(storage.data_ptr(), nbytes, self.phase, torch.is_grad_enabled())
        end = partial(self._end, storage._cdata, piece)
        self._pieces[storage._cdata] = (piece, weakref.ref(storage, end))
        self.changes.append(Change(time.perf_counter(), self.phase, piece, nbytes, born=True))
        return piece

    def _end(self, key: int, piece: Piece, _: object) -> None:
        # Right when the memory is freed: torch keeps a storage's Python object as long as the storage.
        self._pieces.pop(key, None)
        piece.died = self.phase
        self._resized(piece, 0)

    def _resized(self, piece: Piece, nbytes: int) -> None:
        if nbytes != piece.nbytes:
            self.changes.append(Change(time.perf_counter(), self.phase, piece, nbytes - piece.nbytes))
            piece.nbytes = nbytes

    def _watch_resizing(self) -> None:
        # FSDP2 frees and fills full parameters so. It is no operator, hence invisible above (checked with torch 2.13).
        original = self._resize = torch.UntypedStorage.resize_

        @wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            known = self._pieces.get(storage._cdata)
            if known is not None and self._on:
                known[0].address = storage.data_ptr()
                self._resized(known[0], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of a class have no memory but that of others inside."""
    return hasattr(kind, "__tensor_flatten__") or issubclass(kind, ShownTensor)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory inside one that may be a wrapper (such as a DTensor)."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from _plain(inner)
    elif isinstance(tensor, ShownTensor):
        yield from _plain(tensor.local)
    else:
        yield tensor
