"""What one call of `self.log` says besides its value, so that another rank can make the same entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric

# Written against lightning 2.6.6, whose records of logged values are not public.


_COMPARED = ("on_step", "on_epoch", "reduce", "is_tensor", "add_dataloader_idx", "dataloader_idx", "grouped")


@dataclass(frozen=True)
class Declaration:
    """One key as a rank has logged it.

    Attributes:
        key: Where the loop's collection of results keeps it: hook, name and dataloader.
        reduce: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        is_tensor: False for a torchmetrics object, which adds up over ranks by itself.
        group: The ranks of `sync_dist_group`, or ``None`` for the data ranks.
    """

    key: str
    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce: str
    enable_graph: bool
    add_dataloader_idx: bool
    dataloader_idx: int | None
    metric_attribute: str | None
    is_tensor: bool
    group: tuple[int, ...] | None

    @property
    def grouped(self) -> bool:
        """Whether it has a `sync_dist_group`."""
        return self.group is not None

    @classmethod
    def of(cls, key: str, metric: _ResultMetric) -> Declaration:
        """The declaration of an entry that this rank has made."""
        meta = metric.meta
        same = {name.name: getattr(meta, name.name) for name in fields(cls) if hasattr(meta, name.name)}
        group = meta.sync.group
        ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
        return cls(key=key, reduce=meta.reduce_fx.__name__, is_tensor=metric.is_tensor, group=ranks, **same)

    def matches(self, other: Declaration | None) -> bool:
        """Whether two ranks log the key alike, as far as its value goes: each may have its own bar, logger and group."""
        return other is not None and all(getattr(self, name) == getattr(other, name) for name in _COMPARED)

    def entry(self, device: torch.device) -> _ResultMetric:
        """The entry, on a rank that has not logged it."""
        meta = _Metadata(
            **{
                name.name: getattr(self, name.name)
                for name in fields(_Metadata)
                if hasattr(self, name.name) and name.name != "reduce_fx"
            },
            reduce_fx=getattr(torch, self.reduce),
        )
        meta.sync = _Sync(fn=own_value, _should=True)
        return _ResultMetric(meta, self.is_tensor).to(device)

    def metric_of(self, module: nn.Module, rank: int) -> Metric:
        """The torchmetrics object of this key on a rank that has not logged it.

        Raises:
            MisconfigurationException: If the module of this rank has none: the others would wait for its state.
        """
        try:
            found: Metric = attrgetter(str(self.metric_attribute))(module)
        except AttributeError:
            raise MisconfigurationException(
                f"Some ranks log the metric {self.name!r} (attribute {self.metric_attribute!r}), and rank {rank} has no such"
                " attribute. Make the metric on every rank, in __init__ or setup: its state is added up over all of them."
            ) from None
        return found


def own_value(value: Any, *_: Any, **__: Any) -> Any:
    """Stands for Lightning's reduction while a value waits for the exchange: it is this rank's own."""
    return value


def is_exchanged(metric: _ResultMetric) -> bool:
    """Whether ranks agree on this entry's value."""
    return not metric.is_tensor or metric.meta.sync.fn is own_value


def differing(declarations: Mapping[str, Mapping[str, Declaration]]) -> str | None:
    """What is wrong if a key is logged in different ways: the first such key, and who logs it.

    Args:
        declarations: By key, then by who has logged it.
    """
    for key, by_place in declarations.items():
        (first, one), *others = by_place.items()
        for second, other in others:
            for name in _COMPARED:
                mine, theirs = getattr(one, name), getattr(other, name)
                if mine != theirs:
                    return (
                        f"The key {key!r} is logged with different arguments: {name}={mine!r} by {first}, {name}={theirs!r} by"
                        f" {second}. Use the same arguments wherever it is logged."
                    )
    return None


@dataclass(frozen=True)
class Contribution:
    """What one rank adds to a key.

    Attributes:
        declaration: The key.
        value: 0-dim; the value of a step, or the sum of value times batch size of an epoch's mean.
        weight: 0-dim or a number; divides a mean.
    """

    declaration: Declaration
    value: Tensor | float
    weight: Tensor | float = 1.0
