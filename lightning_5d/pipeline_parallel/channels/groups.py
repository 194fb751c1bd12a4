"""Messages through the sends and receives of process groups: between hosts, and between accelerators."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.pipeline_parallel.channels.channels import Arriving, Channels
from lightning_5d.pipeline_parallel.channels.message import Layout, Shape

# Keeps these messages apart from a user's own on the same group, which default to tag 0.
_TAG = 0x5D1 << 16
_CLOSING_S = 1.0


class Line(NamedTuple):
    """What carries messages from one rank to another.

    Attributes:
        group: Both are in it.
        peer: The other one's place in it.
    """

    group: dist.ProcessGroup
    peer: int


class Outbox(ABC):
    """Keeps what is on its way out."""

    @abstractmethod
    def add(self, work: dist.Work, memory: Tensor, to: int) -> None:
        """Keeps the memory that a send reads from until it has been read."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until nothing is on its way any more."""

    @abstractmethod
    def close(self) -> None:
        """Forgets what is on its way."""


class GroupChannels(Channels):
    """A message is one send: of its only tensor as it is, or of several copied behind one another.

    Args:
        device: Where tensors are.
        out: The lines to other ranks.
        incoming: The lines from them.
        outbox: Keeps what is on its way out.
        timeout: The longest wait for a message; ``None`` leaves that to the groups, whose waits do not block this thread.
    """

    def __init__(
        self,
        device: torch.device,
        out: Mapping[int, Line],
        incoming: Mapping[int, Line],
        outbox: Outbox,
        timeout: timedelta | None,
    ) -> None:
        self._device, self._out, self._in = device, out, incoming
        self._outbox, self._timeout = outbox, timeout

    @override
    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        layout = Layout.of([(tensor.shape, tensor.dtype) for tensor in tensors])
        if not layout.nbytes:
            return
        if len(tensors) == 1:
            memory = _bytes(tensors[0].detach().resolve_conj().resolve_neg().contiguous())
        else:
            memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
            layout.pack([tensor.detach() for tensor in tensors], memory)
        self._send(memory, to)

    @override
    def receive(self, shapes: Sequence[Shape], source: int) -> Arriving:
        if len(shapes) == 1:
            (shape, dtype) = shapes[0]
            tensors = [torch.empty(tuple(shape), dtype=dtype, device=self._device)]
            memory = _bytes(tensors[0])
        else:
            layout = Layout.of(shapes)
            memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
            tensors = layout.unpack(memory)
        return _Expected(tensors, self._receive(memory, source) if memory.numel() else None, source, self._timeout)

    @override
    def send_object(self, value: Any, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.send([torch.tensor([len(data)], device=self._device)], to)
        self.send([data.to(self._device)], to)

    @override
    def receive_object(self, source: int) -> Any:
        (size,) = self.receive([((1,), torch.int64)], source).wait()
        (data,) = self.receive([((int(size),), torch.uint8)], source).wait()
        return pickle.loads(data.cpu().numpy())  # type: ignore[arg-type]

    @override
    def finish(self) -> None:
        self._outbox.finish()

    @override
    def close(self) -> None:
        self._outbox.close()

    def _send(self, memory: Tensor, to: int) -> None:
        group, peer = _line(self._out, to)
        try:
            work: dist.Work = dist.isend(memory, group=group, group_dst=peer, tag=_TAG)  # type: ignore[assignment]
        except RuntimeError as error:  # it was gone before
            raise _not_taken(to, error) from error
        self._outbox.add(work, memory, to)

    def _receive(self, memory: Tensor, source: int) -> dist.Work:
        group, peer = _line(self._in, source)
        try:
            work: dist.Work = dist.irecv(memory, group=group, group_src=peer, tag=_TAG)  # type: ignore[assignment]
        except RuntimeError as error:  # it was gone before
            raise _not_sent(source, error) from error
        return work


class _Expected(Arriving):
    def __init__(self, tensors: list[Tensor], work: dist.Work | None, source: int, timeout: timedelta | None) -> None:
        self._tensors, self._work, self._source, self._timeout = tensors, work, source, timeout

    @override
    def wait(self) -> list[Tensor]:
        work, self._work = self._work, None
        tensors, self._tensors = self._tensors, []
        if work is not None:
            try:
                work.wait() if self._timeout is None else work.wait(self._timeout)
            except RuntimeError as error:
                raise _not_sent(self._source, error) from error
        return tensors


def _not_sent(source: int, error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"No message has come from rank {source} of the pipeline, which is gone or did not send one in time. Its own output may say"
        f" why. ({error})"
    )


def _not_taken(to: int, error: RuntimeError) -> RuntimeError:
    return RuntimeError(f"Rank {to} of the pipeline has not taken a message, and may be gone. ({error})")


class ThreadOutbox(Outbox):
    """For groups whose sends only count as done once somebody has waited for them, as gloo's do: a thread waits.

    Args:
        timeout: The longest wait for one.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._queue: SimpleQueue[tuple[dist.Work, Tensor, int] | None] = SimpleQueue()
        self._changed = Condition()
        self._open = 0
        self._failed: RuntimeError | None = None
        self._thread: Thread | None = None

    @override
    def add(self, work: dist.Work, memory: Tensor, to: int) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._wait, name="pipeline messages", daemon=True)
            self._thread.start()
        with self._changed:
            self._open += 1
        self._queue.put((work, memory, to))

    @override
    def finish(self) -> None:
        with self._changed:
            # Every single one is bounded, so this is.
            self._changed.wait_for(lambda: not self._open)
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    @override
    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSING_S)
            self._thread = None

    def _wait(self) -> None:
        while (each := self._queue.get()) is not None:
            work, _, to = each
            failed: RuntimeError | None = None
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                failed = _not_taken(to, error)
            del each, work, _  # or the memory would be kept until there is another one
            with self._changed:
                self._open -= 1
                self._failed = self._failed or failed
                self._changed.notify_all()


class PolledOutbox(Outbox):
    """For groups whose sends say by themselves when they are done, as those of accelerators do."""

    def __init__(self) -> None:
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    @override
    def add(self, work: dist.Work, memory: Tensor, to: int) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((work, memory))

    @override
    def finish(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()

    @override
    def close(self) -> None:
        self._sent.clear()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _line(lines: Mapping[int, Line], place: int) -> Line:
    if place not in lines:
        known = ", ".join(map(str, sorted(lines))) or "none"
        raise ValueError(f"There is no line to rank {place} of the pipeline; there are lines to: {known}.")
    return lines[place]
