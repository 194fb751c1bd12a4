"""ZeRO stages 0 to 3 for any module: one engine object that a training loop calls at four points of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_5d.data_parallel import account
from lightning_5d.data_parallel.exchange import Exchange
from lightning_5d.data_parallel.options import ShardOptions
from lightning_5d.data_parallel.param import clear
from lightning_5d.data_parallel.param_group import RecordingParamGroup
from lightning_5d.data_parallel.parts import Owners
from lightning_5d.data_parallel.peers import Peers
from lightning_5d.data_parallel.reducer import GradientReducer
from lightning_5d.data_parallel.scalars import ScalarParams
from lightning_5d.data_parallel.shown_gradients import ShownGradients
from lightning_5d.data_parallel.states import adopt
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transport import Transport
from lightning_5d.parallelism import Part

# So many groups are on their way while one is copied: ranks hardly wait for each other, and hold little twice.
_GATHERED_AHEAD = 3


class Engine:
    """Nothing to share: one data rank. The base of the others; every method is safe to call at any time."""

    def __init__(self, module: nn.Module, options: ShardOptions) -> None:
        self.module, self.options = module, options
        self.traffic = Traffic()

    def begin(self, last: bool = True) -> None:
        """Call before each microbatch's forward; ``last`` says that its backward completes the gradients."""

    def wait(self) -> None:
        """Call after the last backward and before anyone reads a gradient. All data ranks must call it.

        Then ``grad`` is the mean over the data ranks, and None for parameters that no rank used. Before, in the middle
        of an accumulation window, gradients are not readable: they may be unreduced, on their way, or absent.
        """

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Around a backward after which `wait` completes the gradients, also in the middle of a window or outside of one."""
        yield

    @contextmanager
    def schedule(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        """Around a schedule of microbatches, in place of `begin` and `wait`; all data ranks run the same one.

        Inside, the module's forward and that of all its parts run as if nothing was sharded, and gradients add up in
        ``grad`` of the parameters that stand in the module.

        Args:
            parts: What the schedule runs on its own.
            last: Gradients are complete after it, and reduced.
            backward: Whether it has backwards.
        """
        yield

    def part_begins(self, stage: int) -> None:
        """Call before each forward, backward or weight gradient of a part."""

    def part_ends(self, stage: int, *, gradients: bool, complete: bool, partly: bool = False) -> None:
        """Call after each of them; ``gradients``: a microbatch's have been added up; ``complete``: they were the last.

        ``partly``: some of a microbatch's have been added up, and the others come later.
        """

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Full parameters on every rank, for generation or export. All data ranks must enter."""
        yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a loop that does not change parameters: stages 1 and 2, which hold all of them, gather them once."""
        yield

    def full_parameters(self) -> Iterable[nn.Parameter]:
        """What modules compute with in place of sharded parameters, also while it does not stand in them."""
        return ()

    def memory(self) -> Iterable[tuple[str, torch.Tensor]]:
        """See :meth:`lightning_5d.parallelism.Parallelized.memory`."""
        return ()

    def close(self) -> None:
        """Gives back hooks, connections and shared memory. The module keeps its (sharded) parameters."""


class ReplicatedEngine(Engine):
    """Stage 0 with plain parameters: gradients are averaged in buckets during the last microbatch's backward."""

    def __init__(self, module: nn.Module, options: ShardOptions, transport: Transport) -> None:
        super().__init__(module, options)
        self._transport = transport
        self._reducer: GradientReducer | None = None
        self._parts: tuple[Part, ...] | None = None

    @override
    def begin(self, last: bool = True) -> None:
        self._reducer_for(None).synchronize = last

    @override
    def wait(self) -> None:
        if self._reducer is not None:
            self._reducer.finish()

    @override
    @contextmanager
    def completing(self) -> Iterator[None]:
        reducer = self._reducer_for(None)
        before, reducer.synchronize = reducer.synchronize, True
        try:
            yield
        finally:
            reducer.synchronize = before

    @override
    @contextmanager
    def schedule(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        if not backward:
            yield
            return
        reducer = self._reducer_for(tuple(parts))
        reducer.synchronize = last
        try:
            yield
        except BaseException:
            reducer.drop()
            raise
        reducer.finish()

    @override
    def part_ends(self, stage: int, *, gradients: bool, complete: bool, partly: bool = False) -> None:
        if complete and gradients and self._reducer is not None:
            self._reducer.part_is_complete(stage)

    def _reducer_for(self, parts: tuple[Part, ...] | None) -> GradientReducer:
        trainable = [param for param in self.module.parameters() if param.requires_grad]
        reducer = self._reducer
        if reducer is not None:
            reducer.settle()
        if reducer is None or self._parts != parts or not reducer.covers(trainable):  # also after (un)freezing
            if reducer is not None:
                reducer.close()
            owners = None if parts is None else Owners(parts).of_parameters(self.module)
            reducer = GradientReducer(trainable, self._transport, self.traffic, parts=owners)
            self._reducer, self._parts = reducer, parts
        return reducer

    @override
    def memory(self) -> Iterable[tuple[str, torch.Tensor]]:
        return account.of_transport(self._transport)

    @override
    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        self._transport.close()


class ShardedEngine(Engine):
    """Stages 1 to 3 (and stage 0 in mixed precision) on FSDP2's parameter groups.

    Attributes:
        groups: The groups.
        shown: Gradients of shards on full parameters.
        keeps_pinned: Whether parameters that `hold_through_backward` has kept whole stay so, whatever is freed.
    """

    def __init__(
        self,
        module: nn.Module,
        options: ShardOptions,
        states: Sequence[tuple[Any, Peers]],
        exchange: Exchange | None,
        scalars: ScalarParams | None,
    ) -> None:
        super().__init__(module, options)
        self._states, self._exchange, self._scalars = [state for state, _ in states], exchange, scalars
        if exchange is not None:
            self.traffic = exchange.traffic
        self._root, self._peers = states[0]
        self.groups: list[RecordingParamGroup] = []
        # By the ranks they are spread over, the data ranks first.
        self._groups_of: list[tuple[Peers, list[RecordingParamGroup]]] = [(self._peers, [])]
        for state, peers in states:
            groups = adopt(state, peers, exchange)
            self.groups += groups
            if state is self._root and exchange is not None:
                exchange.of_root = len(exchange.groups)
            known = next((mine for each, mine in self._groups_of if each is peers), None)
            if known is None:
                self._groups_of.append((peers, groups))
            else:
                known += groups
        self._last = self._complete = True
        self._depth = 0
        self._held = self.keeps_pinned = False
        self.shown = ShownGradients(self.groups, scalars)
        for state in self._states[1:]:
            # A block that is called before the root must not become a root of its own.
            state._lazy_init = self._root._lazy_init
        self._wrap_root_hooks()
        self._handles: list[tuple[nn.Module, RemovableHandle]] = []
        for owner in self._root_owners():
            self._handles.append((owner, owner.register_forward_pre_hook(self._before_outside_call)))

    @override
    def begin(self, last: bool = True) -> None:
        self._initialize()
        if self._exchange is not None:
            self._exchange.reuse = False
            self._exchange.settle()
        if self._complete:
            self._reshard()  # a forward without backward may have left parameters that are stale by now
        self._complete, self._depth = False, 0
        self._expect(last)

    def _expect(self, last: bool) -> None:
        """Says whether the next backward completes the gradients."""
        self._last, stage = last, self.options.stage
        for group in self.groups:
            group.reduce_grads = last or stage >= 2
            group.reshard_after_backward = last or stage == 3
        # Without an exchange an earlier microbatch need not wait for its reductions; with one, nothing waits anyway.
        self._root._state_ctx.is_last_backward = last or self._exchange is not None

    @override
    def wait(self) -> None:
        if self._exchange is not None:
            self._exchange.settle()
        if not self._last:
            return
        for group in self.groups:
            if group.has_gradients():  # of modules called outside the root
                group.post_backward()
        for group, used_somewhere in self._finish_reductions():
            group.forget_unused(used_somewhere)
        self.reshard()
        self._complete = True

    @override
    @contextmanager
    def completing(self) -> Iterator[None]:
        self._initialize()
        last, complete = self._last, self._complete
        self._expect(True)
        try:
            yield
        finally:
            self._expect(last)
            self._complete = complete

    @override
    @contextmanager
    def unsharded(self) -> Iterator[None]:
        self._initialize()
        self.reshard()
        self._gather(self.groups)
        after_forward = [group.post_forward_mesh_info for group in self.groups]
        for group in self.groups:
            group.post_forward_mesh_info = None  # a forward in here must neither free nor gather anything
        self._hold(True)
        try:
            yield
        finally:
            self._hold(False)
            for group, mesh_info in zip(self.groups, after_forward, strict=True):
                group.post_forward_mesh_info = mesh_info
            self._reshard()

    @override
    @contextmanager
    def evaluating(self) -> Iterator[None]:
        exchange = self._exchange
        if exchange is None or not exchange.keep_unsharded:
            yield
            return
        # In between, parameters are registered sharded as ever, so hooks see nothing unusual. Writes through `.data`
        # before or after the loop (weights swapped for an average) leave no trace, hence the fresh start.
        for group in exchange.groups:
            group.forget_gathered()
        exchange.reuse = True
        try:
            yield
        finally:
            exchange.reuse = False

    @override
    def full_parameters(self) -> Iterable[nn.Parameter]:
        for group in self.groups:
            yield from group.full_parameters()
        if self._scalars is not None:
            yield from self._scalars.plain

    @override
    def memory(self) -> Iterable[tuple[str, torch.Tensor]]:
        for group in self.groups:
            yield from account.of_group(group)
        if self._exchange is not None:
            yield from account.of_exchange(self._exchange)

    @override
    def close(self) -> None:
        for _, handle in self._handles:
            handle.remove()
        self._reshard()
        if self._exchange is not None:
            for peers in self._exchange.peers:
                for transport in peers.transports:
                    transport.close()

    def _initialize(self) -> None:
        self._root._lazy_init()

    def reshard(self) -> None:
        """Frees full parameters now, and forgets a forward that was not finished."""
        self._depth = 0
        if self._exchange is not None:
            self._exchange.settle()
        self._reshard()

    def _hold(self, whole: bool) -> None:
        self._held = whole
        if self._exchange is not None:
            self._exchange.whole = whole

    def hold_through_backward(self, hold: bool) -> None:
        """Whether parameters that a backward uses stay whole until `wait`: it may itself be differentiated.

        A gradient penalty is such a backward, inside the step: the step's own backward then goes through products with
        the same full parameters, in whatever order. With `keeps_pinned` another backward in between leaves them whole, too.
        """
        for group in self.groups:
            group.holding = hold

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Clears the gradients of shards, and what is to be added to them, while full parameters stand in the module."""
        for group in self.groups:
            group.clear_gradients(set_to_none)
        if self._scalars is not None:
            self._scalars.drop_gradients()
        for sharded in () if self._scalars is None else self._scalars.sharded:
            clear(sharded, set_to_none)
        for peers, _ in self._groups_of:
            peers.pending.forget()

    def mirror_requires_grad(self) -> None:
        """Gives full parameters that exist the `requires_grad` of their sharded ones, outside the usual gather."""
        for group in self.groups:
            group.mirror_requires_grad()

    def _wrap_root_hooks(self) -> None:
        # Both as hooks of the root and when called directly, around something else than the root's forward.
        root, module = self._root, self.module
        enter, leave = root._pre_forward, root._post_forward

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._before_forward()
            return enter(module, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            output = leave(module, args, output)
            self._after_forward()
            return output

        root._pre_forward, root._post_forward = before, after
        module._forward_pre_hooks[root._pre_forward_hook_handle.id] = before
        module._forward_hooks[root._post_forward_hook_handle.id] = after

    def _before_forward(self) -> None:
        self._depth += 1
        outermost = self._depth == 1  # the root may call itself, as `self(x)` in a step does
        self._initialize()
        if outermost and self._complete:
            self._reshard()  # outside a window anything may have changed the sharded parameters
        if outermost and self._exchange is not None:
            self._exchange.begin_forward()
        if self._scalars is not None:
            self._scalars.to_plain()
        if self.options.stage < 3:
            # All at once and in one order, whatever this rank's forward will use.
            self._gather(self.groups)

    def _after_forward(self) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        if self._exchange is not None:
            self._exchange.finish_forward()
        if not torch.is_grad_enabled():
            # Nothing will need the full parameters again, and they would be stale after the next optimizer step.
            self._reshard()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before_outside_call(self, module: nn.Module, args: Any) -> None:
        # A submodule called on its own, outside the root's forward: gather what the root would have gathered.
        if self._root._training_state == TrainingState.IDLE:
            self._initialize()
            if self._scalars is not None:
                self._scalars.to_plain()
            for group in self._root._fsdp_param_groups:
                group.unshard()
                group.wait_for_unshard()

    def _root_owners(self) -> list[nn.Module]:
        """The modules, other than the root, that hold parameters of the root's group."""
        owners: dict[int, nn.Module] = {}
        for group in self._root._fsdp_param_groups:
            for param in group.fsdp_params:
                for owner in (param._module_info.module, *param._module_info.shared_modules):
                    owners[id(owner)] = owner
        owners.pop(id(self.module), None)
        return list(owners.values())

    def _gather(self, groups: Sequence[RecordingParamGroup]) -> None:
        if self._scalars is not None:
            self._scalars.to_plain()
        ahead = len(groups) if self._exchange is None else _GATHERED_AHEAD
        for index, group in enumerate(groups):
            for coming in groups[index : index + 1 + ahead]:
                coming.unshard()
            group.wait_for_unshard()

    def _reshard(self) -> None:
        if self._held:
            return
        for group in self.groups:
            group.discard_arrival()  # gathered ahead, before what is about to change
            if self.keeps_pinned and group.pinned:
                continue
            group.pinned = False
            group._to_sharded()
        if self._scalars is not None:
            self._scalars.to_sharded()

    def _finish_reductions(self) -> list[tuple[RecordingParamGroup, set[int]]]:
        """Ends all reductions together with the other ranks, and says which parameters of each group any of them used.

        Also those that only other ranks have started.
        """
        flags = [
            [int(index in group.used) for index in range(len(group.fsdp_params))] + [group.reductions]
            for _, groups in self._groups_of
            for group in groups
        ]
        flags.append([] if self._scalars is None else [int(is_used) for is_used in self._scalars.used()])
        # All data ranks agree on groups that are spread over others, too: whether a weight has a gradient, it has on each of its
        # ranks. Those others know best how often a group was reduced among them, and come last.
        values = iter(self._peers.agreement.maximum([flag for each in flags for flag in each]))
        agreed = iter([[next(values) for _ in each] for each in flags])
        found = []
        for peers, groups in self._groups_of:
            of_groups = [next(agreed) for _ in groups]
            if peers is not self._peers:
                values = iter(peers.agreement.maximum([flag for each in of_groups for flag in each]))
                of_groups = [[next(values) for _ in each] for each in of_groups]
            for group, (*used, reductions) in zip(groups, of_groups, strict=True):
                group.join_reductions(reductions)
                found.append((group, {index for index, is_used in enumerate(used) if is_used}))
        if self._scalars is not None:
            self._scalars.reduce([bool(value) for value in next(agreed)], self._peers.axes)
        # Of one set of ranks after the other, in one order everywhere, when all have started theirs.
        for peers, _ in self._groups_of:
            peers.pending.finish()
        return found
