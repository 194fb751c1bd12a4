"""The engine of stages 1 to 3 under a schedule of microbatches: many forwards and backwards of parts, in any order.

[Note: parameters under a schedule]
FSDP2 gathers and frees by hooks around forwards and backwards, whose order a schedule does not keep. So its hooks are taken
off for the whole schedule, parameters are whole from its beginning to its end, and backward runs on plain full parameters,
with no Python of ours in it. Gradients add up in ``grad`` of the full parameters; in mixed precision they move to a sum in the
dtype of the reduction after each microbatch. A group whose modules all lie in one part is reduced as soon as that part has
its last gradient, while the rank goes on with other parts; the rest when the schedule ends. All data ranks run the same
schedule, so they start gathers and reductions in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_5d.data_parallel.engine import ShardedEngine
from lightning_5d.data_parallel.hooks_aside import hooks_aside
from lightning_5d.data_parallel.param_group import RecordingParamGroup
from lightning_5d.data_parallel.parts import Owners
from lightning_5d.parallelism import Part


class PartGroups:
    """Parameter groups by the part of a schedule that uses them.

    Attributes:
        parts: The parts.
        own: For each stage the groups that lie wholly in its part.
        widened: For each stage the groups whose gradients may be added up in another dtype once it has added to them.
        shared: Groups of several parts, or of none.
    """

    def __init__(self, groups: Sequence[RecordingParamGroup], parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        owners = Owners(parts)
        self.own: dict[int, list[RecordingParamGroup]] = {part.stage: [] for part in parts}
        self.shared: list[RecordingParamGroup] = []
        for group in groups:
            stage = owners.only(group.owners())
            (self.shared if stage is None else self.own[stage]).append(group)
        self.widened = {
            stage: [group for group in (*own, *self.shared) if group.widens] for stage, own in self.own.items()
        }


class SchedulingEngine(ShardedEngine):
    """A `ShardedEngine` that also runs schedules of microbatches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._part_groups: PartGroups | None = None
        self._reduces = self._each_microbatch = self._regathers = self._failed = False

    # Around a schedule #
    @override
    @contextmanager
    def schedule(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        self._initialize()
        by_part = self._by_part(parts)
        stage = self.options.stage
        self._regathers = stage == 3 and self.options.per_microbatch
        self._reduces = backward and (last or stage >= 2)
        self._each_microbatch = self._reduces and stage >= 2 and self.options.per_microbatch
        self._begin_schedule(last, backward)
        self._gather(by_part.shared if self._regathers else self.groups)
        try:
            with hooks_aside(self._hooks()):
                yield
        except BaseException:
            self._abandon()
            raise
        if backward:
            self._finish_schedule(last)
        else:
            self._reshard()  # full parameters would be stale after the next optimizer step

    @override
    def part_begins(self, stage: int) -> None:
        if self._regathers and self._part_groups is not None:
            self._gather(self._part_groups.own[stage])

    @override
    def part_ends(self, stage: int, *, gradients: bool, complete: bool, partly: bool = False) -> None:
        by_part = self._part_groups
        if by_part is None:
            return
        if gradients or partly:
            for group in by_part.widened[stage]:
                group.widen_gradients()
        if gradients and self._reduces and (complete or self._each_microbatch):
            for group in by_part.own[stage]:
                group.post_backward()
        if self._regathers:
            for group in by_part.own[stage]:
                group._to_sharded()

    def _by_part(self, parts: Sequence[Part]) -> PartGroups:
        if self._part_groups is None or self._part_groups.parts != tuple(parts):
            self._part_groups = PartGroups(self.groups, parts)
        return self._part_groups

    def _begin_schedule(self, last: bool, backward: bool) -> None:
        exchange = self._exchange
        if exchange is not None:
            exchange.settle()
        if self._complete:
            self._reshard()  # anything may have changed the sharded parameters
        if not backward:
            return
        self._last, self._complete, self._depth = last, False, 0
        if exchange is not None:
            exchange.reuse = False
            # A part's groups start together, and waiting for the slowest data rank there would hold up other stages.
            for peers in exchange.peers:
                peers.pending.in_flight = len(self.groups)
        # The same on accelerators: checked with torch 2.13, where 1 lets compute wait for each reduction before the next.
        self._root._comm_ctx.reduce_scatter_max_input_buffers = max(len(self.groups), 1)
        for group in self.groups:
            group.reduce_grads, group.reshard_after_backward = self._reduces, False
            group.resume_gradients()

    def _finish_schedule(self, last: bool) -> None:
        # Reduces what parts have not reduced, and ends the iteration for FSDP2; checked with torch 2.13.
        self._root._state_ctx.is_last_backward = True
        self._root._root_post_backward_final_callback()
        self._restore_limits()
        if last:
            self.wait()
            return
        if self._reduces:
            self._finish_reductions()
        else:
            for group in self.groups:
                group.suspend_gradients()
        if self.options.stage == 3:
            self.reshard()
        elif self._scalars is not None:
            self._scalars.to_sharded()

    def _abandon(self) -> None:
        """Ends a schedule that has failed, without waiting for anyone: its gradients are lost."""
        self._restore_limits()
        for peers, _ in self._groups_of:
            peers.pending.drop()
        for group in self.groups:
            group.drop_gradients()
        if self._scalars is not None:
            self._scalars.drop_gradients()
        self._last = self._complete = self._failed = True
        if not any(group.arriving for group in self.groups):
            self._reshard()

    @override
    def _initialize(self) -> None:
        super()._initialize()
        if self._failed:
            # Ranks had started other reductions when they failed: those are ended together before anything else begins.
            self._failed = False
            for group, _ in self._finish_reductions():
                group.forget_unused(set())

    def _restore_limits(self) -> None:
        for peers, _ in self._groups_of:
            peers.pending.restore()
        self._root._comm_ctx.reduce_scatter_max_input_buffers = 1

    def _hooks(self) -> list[tuple[nn.Module, set[int]]]:
        # Checked with torch 2.13: FSDP2 keeps the handles of the two hooks it registers on a module in its state.
        hooks = [
            (state._modules[0], {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id})
            for state in self._states
        ]
        return hooks + [(owner, {handle.id}) for owner, handle in self._handles]
