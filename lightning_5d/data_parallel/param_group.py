"""FSDP2's parameter groups with this package's own exchanges: no copies that are not needed, nothing waits in backward.

This file, with `states` where it is put to work, is the one place that knows the private parts of
``torch.distributed.fsdp._fully_shard``; checked with torch 2.13. On CPU, FSDP2's collectives are synchronous and go through a
flat copy on both sides; here a gather is copied from where it arrives straight into the parameters, and a reduction is only
started in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from typing_extensions import override

from lightning_5d.data_parallel.exchange import Exchange
from lightning_5d.data_parallel.layout import Layout, cut_among_ranks
from lightning_5d.data_parallel.param import (
    can_lend,
    clear,
    deliver,
    drop_gradient,
    hand_over,
    has_gradient,
    keep_writes,
    lend,
    move_into,
    places_of_shards,
    resume_gradient,
    suspend_gradient,
    take_gradient,
    widen_gradient,
)
from lightning_5d.data_parallel.peers import Peers
from lightning_5d.data_parallel.reduction import GradientReduction, allocate_padded
from lightning_5d.data_parallel.transport import Arrival


class RecordingParamGroup(FSDPParamGroup):
    """An FSDP2 parameter group that remembers which parameters took part in the present accumulation window.

    Never constructed: :func:`lightning_5d.data_parallel.states.adopt` turns groups that ``fully_shard`` has made into this class.
    """

    used: set[int]
    fresh: set[int]
    reductions: int
    holding: bool
    pinned: bool
    compare_all: bool
    exposed: bool
    _full_versions: list[int]

    # Parameters that a validation in inference mode makes must still be good for training.
    @override
    def unshard(self, async_op: bool = False) -> None:
        with torch.inference_mode(False), torch.no_grad():
            super().unshard(async_op)

    @override
    def wait_for_unshard(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            super().wait_for_unshard()

    @override
    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        self.pinned |= self.holding
        super().pre_backward(default_prefetch, *unused)

    @override
    def reshard(self) -> None:
        if not self.pinned:
            super().reshard()

    @override
    def post_backward(self, *unused: Any) -> None:
        self.record()
        super().post_backward(*unused)

    def record(self) -> None:
        """Notes the parameters that have a gradient, and those without one from an earlier window."""
        for index, param in enumerate(self.fsdp_params):
            if has_gradient(param):
                self.used.add(index)
            if param.sharded_param.grad is None and not self.reductions:
                self.fresh.add(index)

    @override
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.exposed = True
        return super().pre_forward(module, args, kwargs)

    # Writes to full parameters #
    @override
    def _to_unsharded(self) -> None:
        super()._to_unsharded()  # type: ignore[no-untyped-call]
        self.exposed |= self._training_state != TrainingState.PRE_BACKWARD
        self._full_versions = [param._unsharded_param._version for param in self.fsdp_params]

    @override
    def _to_sharded(self) -> None:
        if self.is_unsharded:
            with torch.inference_mode(False), torch.no_grad():
                for param, version in zip(self.fsdp_params, self._full_versions, strict=True):
                    frozen = not param.sharded_param.requires_grad
                    keep_writes(param, version, self.compare_all or (frozen and self.exposed))
            self.exposed = False
        super()._to_sharded()  # type: ignore[no-untyped-call]

    # Schedules of microbatches #
    def owners(self) -> list[nn.Module]:
        """The modules that hold its parameters."""
        infos = [param._module_info for param in self.fsdp_params]
        return [module for info in infos for module in (info.module, *info.shared_modules)]

    @property
    def widens(self) -> bool:
        """Whether gradients are added up in another dtype than they come in."""
        return any(param.reduce_dtype is not None for param in self.fsdp_params)

    def widen_gradients(self) -> None:
        """Adds the gradients of a microbatch to the sums in the dtype of the reduction."""
        for param in self.fsdp_params:
            widen_gradient(param)

    def suspend_gradients(self) -> None:
        """Keeps gradients of an unfinished window where nobody else finds them."""
        for param in self.fsdp_params:
            suspend_gradient(param)

    def resume_gradients(self) -> None:
        """Goes on with them."""
        for param in self.fsdp_params:
            resume_gradient(param)

    def drop_gradients(self) -> None:
        """Forgets a window that has failed."""
        self._training_state = TrainingState.IDLE
        self.used.clear()
        self.fresh.clear()
        for param in self.fsdp_params:
            drop_gradient(param)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Clears the gradients of shards, and those that were not reduced."""
        if set_to_none:
            self.used.clear()
            self.fresh.update(range(len(self.fsdp_params)))
        for param in self.fsdp_params:
            drop_gradient(param)
            clear(param.sharded_param, set_to_none)

    @property
    def arriving(self) -> bool:
        """Whether a gather is under way."""
        return self._all_gather_result is not None

    def join_reductions(self, count: int) -> None:
        """Takes part, with zeros, in reductions that other ranks have started and this one has not."""
        self.reductions = 0

    def full_parameters(self) -> list[nn.Parameter]:
        """Those that have been whole by now."""
        return [param._unsharded_param for param in self.fsdp_params if hasattr(param, "_unsharded_param")]

    def mirror_requires_grad(self) -> None:
        """Gives full parameters that exist the `requires_grad` of their sharded ones."""
        for param in self.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)

    def discard_arrival(self) -> None:
        """Drops a gather under way that nothing will use."""
        if self._all_gather_result is not None:
            self.wait_for_unshard()

    def has_gradients(self) -> bool:
        """Whether a backward left gradients that have not been reduced."""
        return any(has_gradient(param) for param in self.fsdp_params)

    def forget_unused(self, used_somewhere: set[int]) -> None:
        """Takes the zeros off parameters that no rank used, and opens the next window."""
        for index in self.fresh - used_somewhere:
            self.fsdp_params[index].sharded_param.grad = None
        self.used.clear()
        self.fresh.clear()


class ExchangingParamGroup(RecordingParamGroup):
    """A parameter group that gathers and reduces through an :class:`Exchange`."""

    exchange: Exchange
    peers: Peers
    index: int
    uses: int
    _arrival: Arrival | None
    _gathered: list[int] | None
    _layout: Layout | None
    _targets: list[list[torch.Tensor]]

    # Initialization #
    @override
    def _init_mp_dtypes(self) -> None:
        # Unlike the base class this allows parameters of several dtypes: they are reduced one dtype at a time.
        for param in self.fsdp_params:
            param.init_dtype_attrs(self.mp_policy)
        self._orig_dtype = self._reduce_dtype = None

    # Gathering #
    @override
    def unshard(self, async_op: bool = False) -> None:
        if self._arrival is not None or self.is_unsharded:
            return
        if self.peers.shard is None:
            super().unshard(False)
            return
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return
        if self.exchange.reuse and self._gathered == self._versions():
            self._to_unsharded()
            return
        self.exchange.reach(self)
        if self._arrival is None:
            self.send()

    def send(self) -> None:
        """Starts a gather, whatever this rank holds."""
        if self.peers.shard is None:
            return
        layout = self._shard_layout()
        with torch.inference_mode(False), torch.no_grad():
            buffer = self.peers.shard.allocate(layout.nbytes, torch.uint8)
            # In the order and dtype of FSDP2's `all_gather_inputs`, which only a sharded group may be asked for.
            torch._foreach_copy_(layout.views(buffer), [param._sharded_param_data for param in self.fsdp_params])
            self._arrival = self.peers.shard.share(buffer, 2 * self.index)
        self.exchange.traffic.add("all_gather", layout.payload * self.peers.shard.size)

    def _shard_layout(self) -> Layout:
        if self._layout is None:
            numels = [param._sharded_param_data.numel() for param in self.fsdp_params]
            self._layout = Layout(numels, [param.param_dtype or param.orig_dtype for param in self.fsdp_params])
        return self._layout

    @override
    def wait_for_unshard(self) -> None:
        if self.peers.shard is None:
            if self._all_gather_result is None:
                return
            if all(map(can_lend, self.fsdp_params)):
                with torch.inference_mode(False), torch.no_grad():
                    for param in self.fsdp_params:
                        lend(param)
                    self._all_gather_result = None
                    self._to_unsharded()
                return
            super().wait_for_unshard()
            return
        if self._arrival is None:
            return
        if self.is_unsharded:
            self.discard_arrival()
            return
        with torch.inference_mode(False), torch.no_grad():
            parts, layout, transport = self._arrival.wait(), self._shard_layout(), self.peers.shard
            if not self._targets:
                self._make_targets(transport.size, transport.rank)
            for param in self.fsdp_params:
                param.alloc_all_gather_outputs()
            wholes = tuple(param.all_gather_outputs[0] for param in self.fsdp_params)
            own = self._targets[transport.rank]
            places = zip(self.fsdp_params, own, strict=True)
            in_place = all(param._sharded_param_data.data_ptr() == target.data_ptr() for param, target in places)
            with torch.autograd._unsafe_preserve_version_counter(wholes):
                for targets, part in zip(self._targets, parts, strict=True):
                    if not (in_place and targets is own):
                        pairs = zip(layout.views(part), targets, strict=True)
                        torch._foreach_copy_(targets, [flat.view(target.shape) for flat, target in pairs])
            self._drop_arrival()
            for param in self.fsdp_params:
                param.init_unsharded_param()  # type: ignore[no-untyped-call]
        self._gathered = self._versions()
        self._to_unsharded()

    def _make_targets(self, ranks: int, rank: int) -> None:
        """Views of the full parameters, for each rank those that its shards go to; the memory comes and goes beneath."""
        for param in self.fsdp_params:
            numel, dtype = param._sharded_param_data.numel(), param.param_dtype or param.orig_dtype
            param.init_all_gather_outputs([numel], [dtype], ranks, self.device)
            param.alloc_all_gather_outputs()
        wholes = [places_of_shards(param, ranks) for param in self.fsdp_params]
        self._targets = [list(targets) for targets in zip(*wholes, strict=True)]
        if self.exchange.keep_unsharded:
            for param, target in zip(self.fsdp_params, self._targets[rank], strict=True):
                move_into(param, target)

    def forget_gathered(self) -> None:
        """The next use gathers, whatever the last one left in memory."""
        self._gathered = None

    def _versions(self) -> list[int]:
        return [param._sharded_local_tensor._version for param in self.fsdp_params]

    @override
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.exchange.reach(self)
        return super().pre_forward(module, args, kwargs)

    @override
    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if self.is_spared else super()._register_post_backward_hook(args, kwargs)

    @override
    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if torch.is_grad_enabled() and not is_bw():
            self.uses += 1
        return super().post_forward(module, input, output)

    @override
    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if self._training_state != TrainingState.PRE_BACKWARD:
            self.exchange.reach_backward(self)
        super().pre_backward(False)

    @override
    def reshard(self) -> None:
        # A block that its forward has used more than once stays whole until the last of its backwards, as a second
        # gather would ask for something that other ranks may not need.
        if self._training_state != TrainingState.POST_BACKWARD or self.uses <= 0:
            super().reshard()

    @override
    def finalize_backward(self) -> None:
        self.exchange.finish_backward()
        if self.uses > 0 and self.reshard_after_backward:
            super().reshard()
        self.forget_uses()
        super().finalize_backward()  # type: ignore[no-untyped-call]

    @override
    def _reset_iter_state(self) -> None:
        self.discard_arrival()
        super()._reset_iter_state()

    @property
    @override
    def arriving(self) -> bool:
        return self._arrival is not None or super().arriving

    @property
    def is_alone(self) -> bool:
        """Whether it is spread over no other rank, as experts are of which each rank has others."""
        return self.peers.shard is None and self.peers.replicate is None

    @property
    def is_spared(self) -> bool:
        """Whether hooks of its module have nothing to free and nothing to send, beside those of other groups.

        Then gradients are taken in where backward ends, and hooks gather what is not whole yet. Where backward ends is known from groups that are
        spread over the data ranks: they have their hooks also where these are one rank. A backward of the user's own inside of a step would
        else leave its gradients to the next one, past a `zero_grad` in between.
        """
        return self.is_alone and self.exchange.keep_unsharded and self.peers is not self.exchange.peers[0]

    @property
    def is_trained(self) -> bool:
        """Whether a backward may come."""
        return any(param.sharded_param.requires_grad for param in self.fsdp_params)

    def forget_uses(self) -> None:
        """No backward is expected any more."""
        self.uses = 0

    @override
    def discard_arrival(self) -> None:
        """Takes in what was gathered ahead for a use that never came."""
        if self._arrival is not None:
            self._arrival.wait()
            self._drop_arrival()

    def _drop_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.release()
            self._arrival = None

    # Reducing #
    @override
    def post_backward(self, *unused: Any) -> None:
        self.record()
        self._training_state = TrainingState.POST_BACKWARD
        self.uses -= 1
        for param in self.fsdp_params:
            param.accumulate_unsharded_grad_if_needed()
        if not self.reduce_grads:
            if self.reshard_after_backward:
                self.reshard()
            for param in self.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    param.to_accumulated_grad_if_needed()
            return
        with torch.no_grad():
            grads = [take_gradient(param) for param in self.fsdp_params]
            if self.reshard_after_backward:
                self.reshard()
            if any(grad is not None for grad in grads):
                self.reduce(grads)

    @override
    def join_reductions(self, count: int) -> None:
        while self.reductions < count:
            self.record()
            self.reduce([None] * len(self.fsdp_params))
        self.reductions = 0
        self.forget_uses()

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Starts reducing one gradient for each parameter (None: not used here, counts as zero)."""
        self.reductions += 1
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for index, param in enumerate(self.fsdp_params):
            if not param.sharded_param.requires_grad:
                continue
            compute_dtype = param.param_dtype or param.orig_dtype
            by_dtype.setdefault((param.reduce_dtype or compute_dtype, compute_dtype), []).append(index)
        for position, ((reduce_dtype, compute_dtype), indices) in enumerate(by_dtype.items()):
            indices = [index for index in indices if self.fsdp_params[index]._orig_size.numel()]
            if not indices:
                continue
            params = [self.fsdp_params[index] for index in indices]
            present = [
                grad if (grad := grads[index]) is not None else torch.zeros(param._orig_size, dtype=compute_dtype)
                for index, param in zip(indices, params, strict=True)
            ]
            self._start_reduction(params, present, reduce_dtype, position)

    def _start_reduction(
        self, params: list[FSDPParam], grads: list[torch.Tensor], reduce_dtype: torch.dtype, position: int
    ) -> None:
        exchange, peers = self.exchange, self.peers
        if self.is_alone and all(grad.dtype == param.orig_dtype for grad, param in zip(grads, params, strict=True)):
            hand_over(params, grads, float(peers.divide_by))
            return
        ranks = peers.shard.size if peers.shard is not None else 1
        dims = [param.fsdp_placement.dim for param in params]
        shard_numels = [
            -(-grad.shape[dim] // ranks) * (grad.numel() // grad.shape[dim])
            for grad, dim in zip(grads, dims, strict=True)
        ]
        numel = ranks * sum(shard_numels)
        own = None
        if peers.shard is not None:
            # Only what the other ranks read goes through the transport; the sum takes the place of what stays.
            own = exchange.results.take(numel // ranks, reduce_dtype)
            buffer = peers.shard.allocate(numel - numel // ranks, reduce_dtype)
            targets = list(buffer.chunk(ranks - 1))
            targets.insert(peers.shard.rank, own)
        elif peers.replicate is not None:
            buffer = allocate_padded(peers.replicate, numel, reduce_dtype)
            targets = [buffer[:numel]]
        else:
            buffer = torch.empty(numel, dtype=reduce_dtype)
            targets = [buffer]
        cut_among_ranks(grads, targets, dims)

        def take_in(result: torch.Tensor) -> None:
            deliver(params, result, shard_numels)

        if peers.shard is not None:
            exchange.traffic.add("reduce_scatter", numel * reduce_dtype.itemsize)
        if peers.replicate is not None:
            exchange.traffic.add("all_reduce", numel // ranks * reduce_dtype.itemsize)
        # A group with parameters of several dtypes makes several reductions; a few tags are set aside for them.
        tag, divide_by = self.index * 8 + position, float(peers.divide_by)
        reduction = GradientReduction(
            buffer, own, peers.shard, peers.replicate, 2 * tag + 1, divide_by, take_in, exchange.results
        )
        peers.pending.add(reduction, can_poll=peers.can_poll)
