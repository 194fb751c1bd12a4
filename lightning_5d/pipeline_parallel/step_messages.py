"""What a step has produced on one stage, told to the other stages of its pipeline in one small message."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.pipeline_parallel.containers import children, rebuilt

# Of one size, so that ranks read it before they know what is in it. 2 KiB; its first slots say what the rest is.
_MESSAGE = 256
_STATUS, _SIZE, _HEADER = 0, 5, 8
_KNOWN, _NEW, _FAILED = 0, 1, 2
_ROOM_BYTES = 8 * (_MESSAGE - _HEADER)
_ALIGNMENT = 16
_MOST_STRUCTURES = 256
# Whole numbers up to this one are exact in the float64 that they travel in.
_EXACT = 1 << 53

Structure = Hashable
"""What values are apart from their numbers: types, keys, dtypes and shapes. Equal from step to step in the usual case."""


@dataclass
class Values:
    """Any values, taken apart into what changes from step to step.

    [Note: what a message says]
    Numbers and 0-dim tensors are scalars, and all a message holds is scalars in the usual case; other tensors travel as bytes behind
    them. The structure that they are put together by is agreed on once: the message gives its number, or says that it is new, and it
    comes along as an object. What does not fit into the message follows in a second one.

    Attributes:
        scalars: Numbers and 0-dim tensors.
        tensors: All other tensors.
        objects: Strings and whatever else has to be pickled.
        shells: Containers of classes other than list, tuple and dict, without their children.
    """

    scalars: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    shells: list[Any] = field(default_factory=list)

    def put(self, value: Any) -> Structure:
        """Takes a value apart; returns its structure."""
        kind = type(value)
        if value is None:
            return "none"
        if isinstance(value, Tensor):
            return self._put_tensor(value.detach())
        if kind is float or kind is bool or (kind is int and abs(value) < _EXACT):
            self.scalars.append(value)
            return str(kind.__name__)
        inside = children(value)
        if inside is None:
            self.objects.append(value)
            return "object"
        if kind is list or kind is tuple:
            return (kind.__name__, *[self.put(child) for _, child in inside])
        keys = tuple(key for key, _ in inside)
        if kind is not dict:
            self.shells.append(rebuilt(value, dict.fromkeys(keys)))
        return ("dict" if kind is dict else kind, keys, *[self.put(child) for _, child in inside])

    def _put_tensor(self, value: Tensor) -> Structure:
        if not value.dim() and _fits_float64(value):
            self.scalars.append(value)
            return "scalar", value.dtype
        self.tensors.append(value)
        return "tensor", value.dtype, tuple(value.shape), value.device.type != "cpu"

    def read_scalars(self) -> list[float]:
        """The scalars as numbers; the device is waited for once per dtype."""
        on_device = [
            index for index, value in enumerate(self.scalars) if isinstance(value, Tensor) and not value.is_cpu
        ]
        scalars = list(self.scalars)
        if on_device:
            for index, value in zip(on_device, to_host([scalars[index] for index in on_device]), strict=True):
                scalars[index] = value
        return [float(value) for value in scalars]


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """0-dim tensors of a device on the host, with one wait for each dtype."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(index)
    found = list(values)
    for same in by_dtype.values():
        for index, value in zip(same, torch.stack([values[index] for index in same]).cpu().unbind(), strict=True):
            found[index] = value
    return found


class Reader:
    """Puts values together again, in the order in which they were taken apart.

    Args:
        scalars, tensors, objects, shells: As in `Values`, the scalars as numbers.
        device: Where 0-dim tensors go, if nothing else is said.
    """

    def __init__(
        self, scalars: list[float], tensors: list[Tensor], objects: list[Any], shells: list[Any], device: torch.device
    ) -> None:
        self._numbers, self._place = scalars, 0
        self._tensors, self._objects, self._shells = iter(tensors), iter(objects), iter(shells)
        self._device = device
        self._by_kind: dict[tuple[torch.dtype, torch.device], tuple[Tensor, ...]] = {}

    def number(self) -> float:
        """The next scalar as a number."""
        self._place += 1
        return self._numbers[self._place - 1]

    def scalar(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """The next scalar as a 0-dim tensor."""
        device = self._device if device is None else device
        # All scalars of a dtype at once: making a tensor of each costs several times as much.
        known = self._by_kind.get((dtype, device))
        if known is None:
            wide = torch.float32 if device.type == "mps" else torch.float64
            numbers = torch.tensor(self._numbers, dtype=wide).to(device)
            known = self._by_kind[dtype, device] = numbers.to(dtype).unbind()
        self._place += 1
        return known[self._place - 1]

    def take(self, structure: Any) -> Any:
        """The next value, which has this structure."""
        if isinstance(structure, str):
            return self._simple(structure)
        head = structure[0]
        if head == "scalar":
            return self.scalar(structure[1])
        if head == "tensor":
            return next(self._tensors)
        if head in ("list", "tuple"):
            items = [self.take(child) for child in structure[1:]]
            return items if head == "list" else tuple(items)
        keys = structure[1]
        if head == "dict":
            return {key: self.take(child) for key, child in zip(keys, structure[2:], strict=True)}
        shell = next(self._shells)
        return rebuilt(shell, {key: self.take(child) for key, child in zip(keys, structure[2:], strict=True)})

    def _simple(self, kind: str) -> Any:
        if kind == "none":
            return None
        if kind == "object":
            return next(self._objects)
        number = self.number()
        return number if kind == "float" else int(number) if kind == "int" else bool(number)


@dataclass(frozen=True)
class _Agreed:
    """A structure that the stages know.

    Attributes:
        tensors: Dtype, shape, and whether it lives on an accelerator, of each tensor that is no scalar.
    """

    structure: Any
    shells: list[Any]
    tensors: list[tuple[torch.dtype, tuple[int, ...], bool]]


class StepMessages:
    """Messages about steps between the stages of one pipeline.

    Args:
        group: The stages, on a backend for the host; a group of its own, as nothing else may come between its messages.
        device_group: The stages, for tensors that live on `device`; used only where that is not the host.
        device: Where tensors are put.
        waiting: Whether `send` waits until all others have begun to receive.
    """

    def __init__(
        self, group: dist.ProcessGroup, device_group: dist.ProcessGroup, device: torch.device, waiting: bool = True
    ) -> None:
        self.rank = dist.get_rank(group)
        self._waiting = waiting
        self._out: deque[tuple[Any, Tensor]] = deque()
        self._group, self._device_group, self._device = group, device_group, device
        self._numbers: dict[Structure, int] = {}
        self._agreed: dict[int, list[_Agreed]] = {}

    def send(self, structure: Structure, values: Values) -> tuple[Any, Reader]:
        """Tells all other stages, which call `receive`.

        Returns:
            What they get: the structure, and the values to put together by it.

        Raises:
            MisconfigurationException: If something cannot be pickled; on the others, too.
        """
        number = self._numbers.get(structure)
        try:
            agreed, text = self._texts(structure, values, number is None)
        except Exception as error:
            what = f"What a step returned or logged cannot be sent to the other stages: {type(error).__name__}: {error}"
            self.fail(what)
            raise MisconfigurationException(what) from error
        scalars = values.read_scalars()
        places, size = _places(agreed, len(scalars), sum(map(len, text)))
        message = torch.zeros(_MESSAGE, dtype=torch.float64)
        status = _KNOWN if number is not None else _NEW
        header = [status, self._numbers[structure], len(scalars), len(text[0]), len(text[1]), size]
        numbers = torch.tensor([*header, *[0] * (_HEADER - len(header)), *scalars], dtype=torch.float64)
        body = message.view(torch.uint8)[8 * _HEADER :]
        if size > _ROOM_BYTES:
            body = torch.empty(size, dtype=torch.uint8)
            message[:_HEADER] = numbers[:_HEADER]
            body[: 8 * len(scalars)] = numbers[_HEADER:].view(torch.uint8)
        else:
            message[: len(numbers)] = numbers
        if text[0] or text[1]:
            both = torch.frombuffer(bytearray(text[0] + text[1]), dtype=torch.uint8)
            body[8 * len(scalars) : 8 * len(scalars) + len(both)] = both
        for place, tensor in zip(places, values.tensors, strict=True):
            if place is not None:
                place.of(body).copy_(tensor)
        self._broadcast(message)
        if size > _ROOM_BYTES:
            self._broadcast(body)
        for place, tensor in zip(places, values.tensors, strict=True):
            if place is None:
                dist.broadcast(tensor.contiguous(), group=self._device_group, group_src=self.rank)
        return structure, Reader(scalars, values.tensors, values.objects, agreed.shells, self._device)

    def knows(self, structure: Structure) -> bool:
        """Whether all stages know this structure."""
        return structure in self._numbers

    def fail(self, message: str) -> None:
        """Has all other stages, which call `receive`, raise an error with this message."""
        text = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        header = torch.zeros(_MESSAGE, dtype=torch.float64)
        header[_STATUS], header[_SIZE] = _FAILED, len(text)
        self._broadcast(header)
        self._broadcast(text)
        while self._out:  # this rank is about to end
            self._out.popleft()[0].wait()

    def receive(self, source: int) -> tuple[Any, Reader]:
        """What the stage `source` of the group tells.

        Raises:
            MisconfigurationException: If it failed.
        """
        message = torch.empty(_MESSAGE, dtype=torch.float64)
        self._broadcast(message, source)
        status, number, count, structure_bytes, object_bytes, size, *_ = map(int, message[:_HEADER].tolist())
        body = message.view(torch.uint8)[8 * _HEADER :]
        if size > _ROOM_BYTES or status == _FAILED:
            body = torch.empty(size, dtype=torch.uint8)
            self._broadcast(body, source)
        if status == _FAILED:
            raise MisconfigurationException(body.numpy().tobytes().decode())
        scalars = body[: 8 * count].view(torch.float64).tolist()
        text = body[8 * count : 8 * count + structure_bytes + object_bytes].numpy().tobytes()
        known = self._agreed.setdefault(source, [])
        if status == _NEW:
            if number == 0:
                known.clear()
            known.append(pickle.loads(text[:structure_bytes]))
        agreed = known[number]
        objects = pickle.loads(text[structure_bytes:]) if object_bytes else []
        places, _ = _places(agreed, count, structure_bytes + object_bytes)
        tensors = []
        for place, (dtype, shape, _) in zip(places, agreed.tensors, strict=True):
            if place is None:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                dist.broadcast(tensor, group=self._device_group, group_src=source)
            else:
                tensor = place.of(body)
            tensors.append(tensor)
        return agreed.structure, Reader(scalars, tensors, objects, agreed.shells, self._device)

    def _texts(self, structure: Structure, values: Values, new: bool) -> tuple[_Agreed, tuple[bytes, bytes]]:
        objects = pickle.dumps(values.objects) if values.objects else b""
        known = self._agreed.setdefault(self.rank, [])
        if not new:
            return known[self._numbers[structure]], (b"", objects)
        described = [(tensor.dtype, tuple(tensor.shape), not tensor.is_cpu) for tensor in values.tensors]
        agreed = _Agreed(structure, values.shells, described)
        text = pickle.dumps(agreed)
        if len(known) >= _MOST_STRUCTURES:  # lengths that vary without end
            known.clear()
            self._numbers.clear()
        self._numbers[structure] = len(known)
        known.append(agreed)
        return agreed, (text, objects)

    def _broadcast(self, tensor: Tensor, source: int | None = None) -> None:
        if not self._waiting:
            self._pass(tensor, source)
            return
        dist.broadcast(tensor, group=self._group, group_src=self.rank if source is None else source)

    def _pass(self, tensor: Tensor, source: int | None) -> None:
        # One by one: in a broadcast some ranks get it from others, who may not have come so far yet.
        if source is not None:
            dist.recv(tensor, group=self._group, group_src=source)
            return
        while self._out and self._out[0][0].is_completed():
            self._out.popleft()
        for rank in range(dist.get_world_size(self._group)):
            if rank != self.rank:
                self._out.append((dist.isend(tensor, group=self._group, group_dst=rank), tensor))


def _fits_float64(value: Tensor) -> bool:
    if value.dtype is torch.int64:
        # Looking at a device's number would wait for the device.
        return value.is_cpu and abs(int(value)) < _EXACT
    return not value.is_complex()


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes are."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, body: Tensor) -> Tensor:
        end = self.start + prod(self.shape) * self.dtype.itemsize
        return body[self.start : end].view(self.dtype).view(self.shape)


def _places(agreed: _Agreed, scalars: int, text_bytes: int) -> tuple[list[_Place | None], int]:
    """Places of the tensors behind scalars and texts, ``None`` for those that do not travel through the host; bytes in all."""
    end = 8 * scalars + text_bytes
    places: list[_Place | None] = []
    for dtype, shape, on_device in agreed.tensors:
        if on_device:
            places.append(None)
            continue
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(_Place(start, dtype, shape))
        end = start + prod(shape) * dtype.itemsize
    return places, end
