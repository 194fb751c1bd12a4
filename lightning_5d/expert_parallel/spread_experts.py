"""The expert axis at work: experts on other ranks than the tokens that go to them, inside Lightning's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.checkpoint.forms import Formed, whole_tensor
from lightning_5d.expert_parallel.bias import routers_never_restarted
from lightning_5d.expert_parallel.counted import Counted, Counting, counting_modules
from lightning_5d.expert_parallel.counted_over import CountedOver
from lightning_5d.expert_parallel.door import ExpertDoor
from lightning_5d.expert_parallel.exchange import TokenExchange, open_exchange
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.load import ExpertLoads
from lightning_5d.expert_parallel.owed import OwedBackward
from lightning_5d.expert_parallel.placement import ExpertWeights
from lightning_5d.expert_parallel.report import ExpertPlaces, describe_experts
from lightning_5d.expert_parallel.router_losses import RouterLosses
from lightning_5d.expert_parallel.row_ranks import RowRanks
from lightning_5d.expert_parallel.survey import found_experts
from lightning_5d.expert_parallel.weight_uses import ExpertWeightUses
from lightning_5d.mesh import GRADIENT_AXES, ExpertView, ParallelMesh
from lightning_5d.parallelism import Parallelized, Part, Problem, StoredForm
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.sharded import ShardedLayers

if TYPE_CHECKING:
    from lightning_5d.expert_parallel.expert import ExpertParallel


class SpreadExperts(Parallelized):
    """Experts spread over the ranks of a place of the pipeline; and, also where they are not, what routers count over ranks.

    Args:
        module: The user's LightningModule, or this rank's stages of it.
        plugin: The settings.
        mesh: The ranks by axis.
        layers: The experts of the whole module, also those of other stages.
        first_names: Their names there, by every name that they have: of layers that share experts, a stage may have only later ones.

    Attributes:
        loads: The tokens that come to each layer's experts.
    """

    def __init__(
        self,
        module: nn.Module,
        plugin: ExpertParallel,
        mesh: ParallelMesh,
        layers: Sequence[FoundExperts],
        first_names: Mapping[str, str],
    ) -> None:
        self.loads = ExpertLoads.of(layers)
        self._module, self._plugin, self._mesh, self._layers = module, plugin, mesh, layers
        self._here, self._first_names = found_experts(module), first_names
        self._view: ExpertView | None = None
        self._weights: ExpertWeights | None = None
        self._exchange: TokenExchange | None = None
        self._own_axis: TensorAxis | None = None
        self._ranks: RowRanks | None = None
        self._doors: list[ExpertDoor] = []
        self._losses: RouterLosses | None = None
        self._owed: OwedBackward | None = None
        self._waiting: dist.ProcessGroup | None = None
        self._stepped = self._told = False
        self._uses: ExpertWeightUses | None = None
        self._stage = 0
        if plugin.size > 1 or plugin.tensor > 1:
            self._view = mesh.expert_view(plugin.size, plugin.tensor)
            self._weights = ExpertWeights(self._here, self._view, mesh)
            self._uses = ExpertWeightUses(module, self._here, plugin.size * plugin.tensor)
        if plugin.size > 1 and self._view is not None:
            self._exchange = open_exchange(self._view.device_mesh.get_group("ep"), mesh.device)
            self._exchange.layers = [layer.name for layer in layers]

    @override
    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        self._ranks = RowRanks.of(self._mesh, axes)
        for router in counting_modules(self._module):
            router.counted = CountedOver(self._ranks, partial(self._holders, router, axes))
        self._losses = RouterLosses(self._module, CountedOver(self._ranks))
        if self._losses.unknown and self._mesh.size(*GRADIENT_AXES) > 1:
            rank_zero_warn(
                f"{', '.join(self._losses.unknown)}: the balance loss is computed by a formula of the model's own, and so of each rank's tokens alone. It"
                " is that of one process only where each rank's batch is a batch of that process."
            )
        axis = self._tensor_axis(axes)
        numbers = {layer.name: number for number, layer in enumerate(self._layers)}
        for layer in self._here:
            first = self._first_names[layer.name]
            door = ExpertDoor(
                layer,
                self._ranks,
                self.loads[first],
                self._exchange,
                axis,
                has_parts=self._plugin.tensor > 1,
                capacity=self._plugin.capacity,
                number=numbers[first],
            )
            self._doors.append(door)
        if self._exchange is not None:
            self._owed = OwedBackward(self._module, self._here)
        self._refresh()
        together = self._mesh.stage_group
        if self._mesh.size("pp") > 1 and together is not None:
            # On the host, where its result is needed.
            ranks = dist.get_process_group_ranks(together)
            self._waiting = dist.new_group(
                ranks, timeout=self._mesh.timeout, backend="gloo", use_local_synchronization=True
            )

    def _holders(self, router: Counting, axes: Sequence[Parallelized]) -> dist.ProcessGroup | None:
        # Looked up now: a weight is another tensor while its layer computes.
        weight = next(cast(nn.Module, router).parameters(recurse=False))
        return next((group for axis in axes if (group := axis.holders_of(weight)) is not None), None)

    # [Note: as many microbatches]
    # In a pipeline each microbatch is an exchange between data ranks, in every layer. A batch with fewer rows than microbatches has as many as
    # rows, so a data rank with a smaller batch would be waited for without end.
    @override
    def microbatches(self, count: int) -> int:
        if self._waiting is None or self._ranks is None or self._ranks.are_apart:
            return count
        least = torch.tensor(count)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._waiting)
        return int(least)

    @override
    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            if self._owed is not None:
                self._owed.clear()
                stack.callback(self._owed.clear)
            if self._uses is not None:
                trainer = getattr(self._module, "_trainer", None)
                kind = "" if trainer is None or trainer.state.stage is None else trainer.state.stage.value
                stack.enter_context(self._uses.watching(f"{kind} {self._stage}"))
            return step(*args, **kwargs)

    @override
    def owed(self) -> Sequence[Tensor]:
        return () if self._owed is None else self._owed.outputs()

    @override
    def taking_back(self) -> Callable[[], None]:
        return self.loads.taking_back()

    @override
    def recomputing_together(self) -> dist.ProcessGroup | None:
        return None if self._exchange is None else self._exchange.group

    def _tensor_axis(self, axes: Sequence[Parallelized]) -> TensorAxis | None:
        if self._view is None or self._mesh.size("tp") == 1:
            return None
        shared = next((axis.axis for axis in axes if isinstance(axis, ShardedLayers)), None)
        if shared is None:
            self._own_axis = open_axis(self._mesh.group("tp"), self._mesh.device)
        return shared or self._own_axis

    @override
    def step_context(self) -> AbstractContextManager[None]:
        return super().step_context() if self._losses is None else self._losses.step()

    @override
    def part_begins(self, stage: int) -> None:
        self._stage = stage

    @override
    def begin_microbatch(self, *, last: bool) -> None:
        self._refresh()

    @contextmanager
    @override
    def scheduled(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        self._refresh()
        yield

    @override
    def before_optimizer_step(self) -> None:
        # Of a step that is left out nobody hears here, nor does what starts loads anew.
        self._stepped = True

    def _refresh(self) -> None:
        if self._weights is not None:
            self._weights.refresh()
        if self._stepped and not self._told:
            self._told = True
            if counting := routers_never_restarted(self._module):
                rank_zero_warn(
                    f"{counting[0]} ({len(counting)} in all) counts the load of its experts, and nothing starts it anew after a step of the"
                    " optimizer: its bias does not move, and a global balance loss is about all steps so far. Call"
                    " lightning_5d.expert_parallel.balance_by_bias(self, optimizer) in configure_optimizers."
                )

    @override
    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        return () if self._weights is None else self._weights.gradient_axes(parameter)

    @override
    def stored_forms(self) -> Mapping[str, StoredForm]:
        return {} if self._weights is None else self._weights.forms

    @override
    def shares_of_work(self) -> Mapping[nn.Module, float]:
        # Ranks that have the same rows, those of the tensor axis, share them out at the door.
        return {} if self._view is None else {layer.module: 1.0 for layer in self._here}

    @override
    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        return [] if self._weights is None else self._weights.optimizer_problems(optimizers)

    @override
    def evaluation_context(self, *, uneven: bool) -> AbstractContextManager[None]:
        return self._alone() if uneven else super().evaluation_context(uneven=uneven)

    @contextmanager
    @override
    def unsharded(self) -> Iterator[None]:
        with self._alone():
            yield

    # [Note: experts without other ranks]
    # Where data ranks may have different numbers of batches, or only one of them calls the module, nobody answers an exchange. All experts are
    # gathered before, as they are at rest, and a door computes with them in place of what is in the module.
    @contextmanager
    def _alone(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._ranks is not None:
                stack.enter_context(self._ranks.apart())
            if self._weights is not None:
                for door in self._doors:
                    stack.enter_context(door.alone(self._whole(door.layer)))
            yield

    def _whole(self, layer: FoundExperts) -> dict[str, Tensor]:
        forms = self.stored_forms()
        whole = {}
        for key in layer.stacked:
            parameter, form = layer.module._parameters[key], forms.get(f"{layer.name}.{key}")
            if parameter is not None:
                whole[key] = whole_tensor(parameter if form is None else Formed(parameter, form)).detach()
        return whole

    @override
    def describe(self) -> str:
        view = self._view
        same = 1 if view is None else int(view.device_mesh["edp"].size())
        places = ExpertPlaces(self._plugin.size, same, self._plugin.tensor, self._mesh.size("dp_replicate"))
        return describe_experts(self._layers, places)

    @override
    def memory(self) -> Iterable[tuple[str, Tensor]]:
        if self._ranks is not None:
            yield from self._ranks.memory()
        for held in (self._exchange, self._own_axis):
            if held is None:
                continue
            for tensor in held.memory():
                yield "communication buffers", tensor
            for tensor in held.mapped():
                yield "memory of other ranks", tensor

    @override
    def close(self) -> None:
        for router in counting_modules(self._module):
            router.counted = Counted()
        for noting in (self._losses, self._owed):
            if noting is not None:
                noting.close()
        while self._doors:
            self._doors.pop().take_off()
        for held in (self._ranks, self._exchange, self._own_axis):
            if held is not None:
                held.close()
