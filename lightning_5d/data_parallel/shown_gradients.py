"""Gradients of shards, shown on the full parameters that stand in the module meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_5d.data_parallel.param import as_of_shard, as_shown
from lightning_5d.data_parallel.param_group import RecordingParamGroup
from lightning_5d.data_parallel.scalars import ScalarParams


class ShownGradients:
    """Lets full parameters that are in the module again after a backward carry its gradients, which are the shards'.

    Between backward and step a user may look for them there: to clip with torch's functions, to change them, to log.

    Args:
        groups: The engine's parameter groups.
        scalars: Its parameters without dimensions, if any.
    """

    def __init__(self, groups: Sequence[RecordingParamGroup], scalars: ScalarParams | None) -> None:
        self._groups, self._scalars = groups, scalars
        self._shown: list[tuple[nn.Parameter, nn.Parameter, Tensor, FSDPParam | None]] = []

    def show(self) -> None:
        """Begins, for parameters that are full now."""
        pairs: list[tuple[nn.Parameter, nn.Parameter, FSDPParam | None]] = [
            (param._unsharded_param, param.sharded_param, param)
            for group in self._groups
            if group.is_unsharded
            for param in group.fsdp_params
        ]
        pairs += [(full, sharded, None) for full, sharded in self._scalars.pairs()] if self._scalars is not None else []
        for full, sharded, param in pairs:
            if sharded.grad is not None and full.grad is None:
                shown = sharded.grad if param is None else as_shown(param, sharded.grad)
                # Checked with torch 2.13: its dtype may be another one than that of the parameter.
                full.grad_dtype = None
                full.grad = shown
                self._shown.append((full, sharded, shown, param))

    def take(self, *, hide: bool) -> None:
        """Hands gradients that were replaced, rather than changed, while shown to the shards.

        Args:
            hide: End the show; backward would add to what it finds in full parameters.
        """
        for full, sharded, shown, param in self._shown:
            if full.grad is not shown:
                sharded.grad = full.grad if param is None else as_of_shard(param, full.grad)
            if hide:
                full.grad = None
                full.grad_dtype = full.dtype
        if hide:
            self._shown.clear()
