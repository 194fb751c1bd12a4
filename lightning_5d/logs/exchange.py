"""How ranks agree on logged values: by name, in one small collective, whatever each of them has logged."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.data_parallel.shared_memory import SharedMemory
from lightning_5d.data_parallel.transport import Arrival, sum_in_rank_order
from lightning_5d.logs.records import Contribution, Declaration, differing
from lightning_5d.logs.values import LoggedValues
from lightning_5d.mesh import ParallelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Point(IntEnum):
    """Where in a run all ranks come together for their logs."""

    STEP = 0
    BATCH_END = 1
    EPOCH_END = 2
    LOOP_END = 3


_NAMES = {
    Point.STEP: "a training step",
    Point.BATCH_END: "the end of a batch",
    Point.EPOCH_END: "the end of an epoch",
    Point.LOOP_END: "the end of an evaluation",
}
_STOP, _NEWS, _PLACE, _PLACE_SQUARED, _AT = 0, 1, 2, 3, 4
_HEADER = _AT + len(Point)
# Of one size whatever is in it, so that ranks which are not at the same point still understand each other. 2 KiB.
_MESSAGE = 256
_KEYS = (_MESSAGE - _HEADER) // 3
# Sums of squares of places stay exact in float64 up to 8192 ranks.
_PLACES = 1 << 20
_DISCOVERY_BATCHES = 2
# Through shared memory every rank reads every other one's message.
_NEAR_RANKS = 32


@dataclass
class _Round:
    """One message under way.

    Attributes:
        keys: What the message had room for, the same on all ranks.
        mine: What this rank wants to exchange, whether there was room or not.
    """

    point: Point
    values: LoggedValues
    keys: list[Declaration]
    mine: dict[str, Contribution]
    place: str
    stop: bool
    message: Tensor
    work: dist.Work | Arrival | None


@dataclass
class LogExchange:
    """The agreement of one strategy's ranks on what their modules log.

    [Note: what a step costs]
    Ranks keep an agreed list of the keys of each point. A message has a slot for each of them, and a flag that says "I have a
    key which is not in the list". If nobody raises it, one sum over ranks is all there is; if anybody does, the new keys
    are gathered, the list grows, and the message is sent again. The message of a training step goes out before backward and is
    read after it. The one of a batch's end (for what hooks log) is waited for only if the list says that hooks log, or in
    the first two batches of a loop; else it is read at the next point, so it holds nobody up.

    Attributes:
        trainer: Whose loops log.
        mesh: The ranks by axis.
        device: Where a collective's tensor may live.
        timeout: Longest wait for a message.
    """

    trainer: pl.Trainer
    mesh: ParallelMesh
    device: torch.device
    timeout: timedelta
    without_waiting: bool = False
    _unread: _Round | None = None
    _uneven: set[int] = field(default_factory=set)
    _after_news: set[int] = field(default_factory=set)
    _lists: dict[tuple[int, Point], dict[str, Declaration]] = field(default_factory=dict)
    _step: _Round | None = None
    _late: _Round | None = None
    _stop_next: bool = False

    def __post_init__(self) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # On the host, as flags are read there, which must not wait for a device; a group of its own, as ranks that have
        # parted would else take these messages for other ones.
        self.host_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self.timeout)
        # On one host that is several times faster than gloo: a step is short, and has two messages.
        near = self._world <= _NEAR_RANKS
        self._shared = SharedMemory.connect(self.host_group, self.timeout.total_seconds()) if near else None
        # Replicas must count once, and a device's values need not come to the host.
        self._alone = self.mesh.replica_group is None and self.device.type == "cpu"

    # Points, each of which all ranks pass together

    def step_begins(self) -> None:
        """After a training step: its values go out."""
        self._settle_step()
        self._settle()
        values = self._values()
        if values is not None:
            self._step = self._send(Point.STEP, values, values.step_contributions())

    def step_ends(self) -> None:
        """After backward: the step's values are everyone's."""
        if self._step is not None:
            sent, self._step = self._step, None
            if self._same_on_stages(sent):
                self._unread = sent
                self._deliver_in_stage(sent)
            else:
                self._receive(sent)

    def batch_end(self) -> None:
        """After the hooks of a batch: what they have logged, and whether anyone wants to stop."""
        self.step_ends()
        self._settle()
        values = self._values()
        if values is None:
            return
        fitting = values.training
        if fitting and self._stop_next:
            self.trainer.should_stop, self._stop_next = True, False
        stop = fitting and self.trainer.should_stop
        sent = self._send(Point.BATCH_END, values, values.step_contributions(), stop)
        values.batches += 1
        if self._list(sent.point, values) or values.batches <= _DISCOVERY_BATCHES:
            if self._receive(sent) and fitting:
                self.trainer.should_stop = True
            return
        self._late = sent
        values.hide({key for key in sent.mine if key in values})
        if stop:
            # All at once, as a callback does that has agreed by itself; or all at the end of the next batch.
            self._read(sent)
            self.trainer.should_stop = int(sent.message[_STOP]) == self._world

    def epoch_end(self) -> None:
        """At the end of an epoch or a dataloader, before and after the hooks that may log more."""
        self.step_ends()
        self._settle_step()
        self._settle()
        values = self._values()
        if values is None:
            return
        values.batches = 0
        values.fresh.clear()
        fitting = values.training
        stop = fitting and (self.trainer.should_stop or self._stop_next)
        if self._receive(self._send(Point.EPOCH_END, values, values.epoch_contributions(), stop)) and fitting:
            self.trainer.should_stop, self._stop_next = True, False

    def loop_end(self) -> None:
        """After an evaluation inside of training, whose hooks may have decided to stop."""
        self._settle_step()
        self._settle()
        values = self._values()
        if values is not None:
            sent = self._send(Point.LOOP_END, values, {}, self.trainer.should_stop or self._stop_next)
            if self._receive(sent):
                self.trainer.should_stop, self._stop_next = True, False

    # Messages

    def _values(self) -> LoggedValues | None:
        values = self.trainer._results
        return values if isinstance(values, LoggedValues) else None

    def _list(self, point: Point, values: LoggedValues) -> dict[str, Declaration]:
        return self._lists.setdefault((id(values), point), {})

    def _send(self, point: Point, values: LoggedValues, mine: dict[str, Contribution], stop: bool = False) -> _Round:
        agreed = self._list(point, values)
        message = torch.zeros(_MESSAGE, dtype=torch.float64)
        place, code = self._place(point, values)
        message[_STOP] = stop
        message[_NEWS] = any(not part.declaration.matches(agreed.get(key)) for key, part in mine.items())
        message[_PLACE], message[_PLACE_SQUARED] = code, code * code
        message[_AT + point] = 1
        keys = list(agreed.values())
        slots = message[_HEADER:]
        for index, key in enumerate(keys[:_KEYS]):
            if (part := mine.get(key.key)) is not None:
                slots[3 * index] = 1
                if self._alone and _is_sum(key):
                    slots[3 * index + 1], slots[3 * index + 2] = float(part.value), float(part.weight)
        work: dist.Work | Arrival
        if self._shared is not None:
            work = self._shared.share(self._shared.allocate(_MESSAGE, message.dtype).copy_(message), tag=0)
        else:
            work = dist.all_reduce(message, group=self.host_group, async_op=True)
        return _Round(point, values, keys, mine, place, stop, message, work)

    def _read(self, sent: _Round) -> None:
        """Waits for a message and checks that all ranks have sent theirs from the same place."""
        if isinstance(sent.work, Arrival):
            sum_in_rank_order(sent.work.wait(), out=sent.message)
            sent.work.release()
        elif sent.work is not None:
            sent.work.wait()
        sent.work = None
        place, squared = int(sent.message[_PLACE]), int(sent.message[_PLACE_SQUARED])
        if self._world * squared == place * place:
            return
        counts = [int(count) for count in sent.message[_AT:_HEADER].tolist()]
        counts[sent.point] -= 1
        others = ", ".join(f"{count} at {_NAMES[point]}" for point, count in zip(Point, counts, strict=True) if count)
        raise MisconfigurationException(
            f"The ranks have parted: rank {self._rank} of {self._world} is at {sent.place}, of the others {others}, in"
            " this batch or another. Loops must be the same on every rank: the same number of batches, the same validation, no `break`"
            " or -1 on some ranks only. To stop all ranks, set `trainer.should_stop = True` on any of them."
        )

    def _settle(self) -> None:
        """Reads what the last batch's end had to say, if nobody has waited for it."""
        if self._late is None:
            return
        late, self._late = self._late, None
        self._read(late)
        self._stop_next |= int(late.message[_STOP]) not in (0, self._world)
        if late.message[_NEWS]:
            # The values are gone by now, but from the next time on there is room for them.
            self._extend(late)

    # [Note: values that all stages have]
    # Every stage of a pipeline logs what the last one does in a step, so a stage needs the values of its own data ranks only.
    # Waiting for the other stages at the end of each step would undo what a schedule without bubbles has won. So their message is read
    # one step later: whether ranks have parted, whether there are new keys, and whether all stages have logged the same after
    # all. If a hook logs on some stages only, this ends for the rest of the run. All ranks know the same at the same time.
    def _same_on_stages(self, sent: _Round) -> bool:
        """Whether this step's values can do without the other stages."""
        if id(sent.values) in self._after_news:  # who logs the new keys is seen in a step that waits
            self._after_news.discard(id(sent.values))
            return False
        return (
            self.without_waiting
            and id(sent.values) not in self._uneven
            and sent.values.batches >= _DISCOVERY_BATCHES
            and all(key.is_tensor and key.group is None for key in sent.keys)
        )

    def _deliver_in_stage(self, sent: _Round) -> None:
        known = {key.key for key in sent.keys}
        sent.values.hide({key for key in sent.mine if key not in known})
        group = self.mesh.data_group
        together = dist.get_world_size(group) > 1
        for reduce in ("sum", "max", "min"):
            keys = [key for key in sent.keys if key.reduce == reduce or (reduce, key.reduce) == ("sum", "mean")]
            if not keys:
                continue
            rows = self._rows(keys, sent.mine)
            sign = 1.0
            if reduce != "sum":
                sign = 1.0 if reduce == "max" else -1.0
                rows[:, 1] = torch.where(rows[:, 0] > 0, rows[:, 1] * sign, -math.inf)
            if together:
                dist.all_reduce(rows, op=dist.ReduceOp.SUM if reduce == "sum" else dist.ReduceOp.MAX, group=group)
            for key, (present, value, weight) in zip(keys, rows, strict=True):
                if present > 0:
                    value = value / weight if key.reduce == "mean" else value * sign
                    sent.values.accept(key, value, True)

    def _settle_step(self) -> None:
        """Reads what other stages have said in the last step."""
        if self._unread is None:
            return
        sent, self._unread = self._unread, None
        self._read(sent)
        self._look_for_uneven(sent, self._present(sent))
        if sent.message[_NEWS]:
            self._extend(sent)
            self._after_news.add(id(sent.values))

    def _look_for_uneven(self, sent: _Round, present: list[int]) -> None:
        if sent.point is Point.STEP and any(count not in (0, self._world) for count in present):
            self._uneven.add(id(sent.values))

    def _receive(self, sent: _Round) -> bool:
        """Waits for a message and hands out what ranks have agreed on; returns whether any rank wants to stop."""
        self._read(sent)
        stop = bool(sent.message[_STOP])
        if sent.message[_NEWS]:
            self._extend(sent)
            sent = self._send(sent.point, sent.values, sent.mine)
            self._read(sent)
        self._deliver(sent)
        return stop

    def _extend(self, sent: _Round) -> None:
        agreed = self._list(sent.point, sent.values)
        mine = {key: part.declaration for key, part in sent.mine.items()}
        new = {key: declaration for key, declaration in mine.items() if not declaration.matches(agreed.get(key))}
        gathered: list[Any] = [None] * self._world
        dist.all_gather_object(gathered, new, group=self.host_group)
        by_key: dict[str, dict[str, Declaration]] = {}
        for rank, theirs in enumerate(gathered):
            for key, declaration in theirs.items():
                before = {"an earlier step": agreed[key]} if key in agreed else {}
                by_key.setdefault(key, before)[f"rank {rank}"] = declaration
        wrong = differing(by_key)
        if wrong is not None:
            raise MisconfigurationException(wrong)
        for key in sorted(by_key):
            agreed.setdefault(key, next(iter(by_key[key].values())))

    def _place(self, point: Point, values: LoggedValues) -> tuple[str, int]:
        trainer = self.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        stage = trainer.state.stage
        kind = "" if stage is None else f"{stage.value}, "
        trained = f"batch {progress.current.ready} of epoch {trainer.current_epoch}"
        where = trained if values.training else f"batch {values.batches + 1} after {trained}"
        place = f"{_NAMES[point]} ({kind}{where})"
        return place, zlib.crc32(place.encode()) % _PLACES

    # Values

    def _deliver(self, sent: _Round) -> None:
        present = self._present(sent)
        self._look_for_uneven(sent, present)
        logged = [(key, count) for key, count in zip(sent.keys, present, strict=True) if count]
        tensors = [key for key, _ in logged if key.is_tensor]
        on_step = sent.point in (Point.STEP, Point.BATCH_END)
        totals = self._totals(sent, tensors)
        for key in tensors:
            if key.key in totals:  # not a key of groups that this rank is in none of
                sent.values.accept(key, totals[key.key], on_step)
        metrics = [key for key, _ in logged if not key.is_tensor]
        for key in metrics:
            sent.values.compute(key, self.trainer.lightning_module, self._rank, self.device)
        if metrics and self.mesh.replica_group is not None:
            for name, value in self._of_replicas(metrics, sent).items():
                sent.values.accept(self._list(sent.point, sent.values)[name], value, on_step)

    def _present(self, sent: _Round) -> list[int]:
        """How many ranks have logged each of the keys."""
        counts = [int(count) for count in sent.message[_HEADER:][: 3 * min(len(sent.keys), _KEYS) : 3].tolist()]
        if len(sent.keys) > _KEYS:
            more = torch.tensor([key.key in sent.mine for key in sent.keys[_KEYS:]], dtype=torch.int64)
            dist.all_reduce(more, group=self.host_group)
            counts += more.tolist()
        return counts

    def _totals(self, sent: _Round, keys: list[Declaration]) -> dict[str, Tensor]:
        sums = [key for key in keys if _is_sum(key)]
        found: dict[str, Tensor] = {}
        if self._alone and len(sent.keys) <= _KEYS:
            slots = sent.message[_HEADER:]
            place = {key.key: 3 * index for index, key in enumerate(sent.keys)}
            for key in sums:
                value, weight = slots[place[key.key] + 1], slots[place[key.key] + 2]
                found[key.key] = value / weight if key.reduce == "mean" else value.clone()
        elif sums:
            found |= self._sums(sums, sent.mine)
        extremes = [key for key in keys if key.group is None and not _is_sum(key)]
        if extremes:
            found |= self._extremes(extremes, sent.mine)
        grouped = [key for key in keys if key.group is not None]
        if grouped:
            found |= self._grouped(grouped, sent.mine)
        return found

    def _sums(self, keys: list[Declaration], mine: Mapping[str, Contribution]) -> dict[str, Tensor]:
        """Sums over the data ranks, each of which counts once however many replicas of it have logged."""
        rows = self._rows(keys, mine)
        if self.mesh.replica_group is not None:
            dist.all_reduce(rows, group=self.mesh.replica_group)
            rows = torch.where(rows[:, :1] > 0, rows / rows[:, :1].clamp(min=1), 0.0)
        dist.all_reduce(rows, group=self.mesh.data_group)
        return {
            key.key: row[1] / row[2] if key.reduce == "mean" else row[1] for key, row in zip(keys, rows, strict=True)
        }

    def _of_replicas(self, keys: list[Declaration], sent: _Round) -> dict[str, Tensor]:
        """Values of torchmetrics objects, which each line of data ranks has added up for itself, of the lines that have logged."""
        rows = self._rows(keys, {key.key: Contribution(key, 0.0) for key in keys if key.key in sent.mine})
        dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=self.mesh.data_group)
        for index, key in enumerate(keys):
            if rows[index, 0] > 0:
                rows[index, 1] = sent.values[key.key]._computed
        dist.all_reduce(rows, group=self.mesh.replica_group)
        return {key.key: row[1] / row[0] for key, row in zip(keys, rows, strict=True)}

    def _extremes(self, keys: list[Declaration], mine: Mapping[str, Contribution]) -> dict[str, Tensor]:
        signs = torch.tensor([1.0 if key.reduce == "max" else -1.0 for key in keys], device=self.device)
        present, values, _ = self._rows(keys, mine).unbind(1)
        values = torch.where(present > 0, values * signs, -math.inf)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return {key.key: value for key, value in zip(keys, values * signs, strict=True)}

    def _grouped(self, keys: list[Declaration], mine: Mapping[str, Contribution]) -> dict[str, Tensor]:
        """Keys with a `sync_dist_group`: over the ranks of the group that this rank is in."""
        rows = self._rows(keys, mine)
        everyone = [torch.empty_like(rows) for _ in range(self._world)]
        dist.all_gather(everyone, rows)
        groups: list[Any] = [None] * self._world
        named = {key.key: mine[key.key].declaration.group for key in keys if key.key in mine}
        dist.all_gather_object(groups, named, group=self.host_group)
        found = {}
        for index, key in enumerate(keys):
            ranks = named.get(key.key) or next(
                (g for g in (theirs.get(key.key) for theirs in groups) if g and self._rank in g), None
            )
            logged = [rank for rank in ranks or () if everyone[rank][index, 0] > 0]
            if not logged:
                continue
            stack = torch.stack([everyone[rank][index] for rank in logged])
            value, weight = stack[:, 1], stack[:, 2]
            found[key.key] = {
                "mean": value.sum() / weight.sum(),
                "sum": value.sum(),
                "max": value.max(),
                "min": value.min(),
            }[key.reduce]
        return found

    def _rows(self, keys: list[Declaration], mine: Mapping[str, Contribution]) -> Tensor:
        """Presence, value and weight of each key on this rank; (keys, 3), zeros where it has not logged."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        rows = torch.zeros(len(keys), 3, dtype=dtype, device=self.device)
        for index, key in enumerate(keys):
            part = mine.get(key.key)
            if part is not None:
                rows[index, 0], rows[index, 1], rows[index, 2] = 1.0, part.value, part.weight
        return rows


def _is_sum(key: Declaration) -> bool:
    return key.is_tensor and key.group is None and key.reduce in ("mean", "sum")
