"""A loop's logged values, of which those that ranks agree on are visible once they have."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric, _Sync
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.logs.records import Contribution, Declaration, is_exchanged, own_value


class _Entry(_ResultMetric):
    """Lightning's entry, which it moves to the device of each value, at a quarter of a millisecond, also if it is there."""

    @override
    def to(self, *args: Any, **kwargs: Any) -> _ResultMetric:  # type: ignore[override]
        if self.is_tensor and not kwargs and len(args) == 1 and isinstance(args[0], torch.device):
            states = (self.value, getattr(self, "cumulated_batch_size", self.value))
            if all(state.device == args[0] for state in states):
                return self
        return super().to(*args, **kwargs)


class LoggedValues(_ResultCollection):
    """Lightning's collection, except that `sync_dist=True` does not communicate when it is called.

    Lightning reduces each value by itself, in the order of the calls, and waits if a rank does not call. Here values stay
    this rank's own until `LogExchange` has agreed on them: those of a step at the end of the step, those of an epoch
    at its end.
    """

    # Written against lightning 2.6.6.

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.fresh: set[str] = set()
        self.batches = 0
        self._made_for_others: set[str] = set()
        self._declared: dict[str, tuple[_ResultMetric, Declaration]] = {}

    @override
    def log(
        self,
        fx: str,
        name: str,
        value: Any,
        *,
        sync_dist: bool = False,
        sync_dist_fn: Any = _Sync.no_op,
        rank_zero_only: bool = False,
        **options: Any,
    ) -> None:
        if sync_dist and not rank_zero_only:
            sync_dist_fn = own_value
        index = self.dataloader_idx if options.get("add_dataloader_idx", True) else None
        key = f"{fx}.{name}" if index is None else f"{fx}.{name}.{index}"
        if key in self._made_for_others:
            self._made_for_others.discard(key)
            del self[key]
        super().log(
            fx,
            name,
            value,
            sync_dist=sync_dist,
            sync_dist_fn=sync_dist_fn,
            rank_zero_only=rank_zero_only,
            **options,
        )
        metric = self[key]
        if metric.is_tensor and metric.meta.on_step and is_exchanged(metric):
            self.fresh.add(key)

    @override
    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        if type(metric) is _ResultMetric:
            metric.__class__ = _Entry
        super().__setitem__(key, metric)

    @staticmethod
    @override
    def _get_cache(result_metric: _ResultMetric, on_step: bool) -> Tensor | None:
        epoch = not on_step and result_metric.meta.on_epoch
        if epoch and result_metric._computed is None and is_exchanged(result_metric):
            return None  # Lightning would compute it here, that is communicate, on whichever rank asks
        return _ResultCollection._get_cache(result_metric, on_step)

    def declaration(self, key: str) -> Declaration:
        """What this rank has said about `key`."""
        metric = self[key]
        known = self._declared.get(key)
        if known is None or known[0] is not metric:
            known = self._declared[key] = (metric, Declaration.of(key, metric))
        return known[1]

    def step_contributions(self) -> dict[str, Contribution]:
        """Values logged since the last exchange; the next call returns only later ones."""
        found = {}
        for key in self.fresh:
            value = self[key]._forward_cache
            if value is not None:
                found[key] = Contribution(self.declaration(key), value.detach())
        self.fresh.clear()
        return found

    def epoch_contributions(self) -> dict[str, Contribution]:
        """Values of the epoch (of the current dataloader) that ranks have not agreed on yet."""
        found = {}
        for key, metric in self.valid_items():
            if not metric.meta.on_epoch or metric._computed is not None or not is_exchanged(metric):
                continue
            if not metric.is_tensor:
                found[key] = Contribution(self.declaration(key), 0.0)
            elif metric.update_called:
                weight = metric.cumulated_batch_size if metric.meta.is_mean_reduction else 1.0
                found[key] = Contribution(self.declaration(key), metric.value.detach(), weight)
        return found

    def hide(self, keys: set[str]) -> None:
        """Takes back values of a step that the other ranks do not know of yet."""
        for key in keys:
            self[key]._forward_cache = None

    def accept(self, declaration: Declaration, value: Tensor, on_step: bool) -> None:
        """Takes the value that ranks have agreed on, whether this rank has logged the key or not."""
        metric = self._entry(declaration, value.device)
        kind = metric.value.dtype if isinstance(metric.value, Tensor) else torch.get_default_dtype()
        value = value.to(kind)
        if not on_step:
            metric._computed = value  # type: ignore[assignment]
        else:
            metric._forward_cache = value
            if not metric.meta.on_epoch:
                metric.value = value

    def compute(self, declaration: Declaration, module: nn.Module, rank: int, device: torch.device) -> None:
        """Has a torchmetrics object add up its state over ranks; every rank calls it for the same key."""
        metric = self._entry(declaration, device)
        if not metric.update_called or metric.has_reset or not hasattr(metric, "value"):
            metric.value = declaration.metric_of(module, rank)
            metric._update_count = 1
            metric._computed = None
        metric.has_reset = False
        metric.compute()

    def _entry(self, declaration: Declaration, device: torch.device) -> _ResultMetric:
        key = declaration.key
        if key not in self:
            self[key] = declaration.entry(device)
            self._made_for_others.add(key)
        metric: _ResultMetric = self[key]
        if declaration.is_tensor:
            metric.has_reset = False
        return metric
