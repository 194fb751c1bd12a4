"""Balance losses leave blocks whose sequences are cut, and routers get the gradients of one process for them (trap 55)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
from torch import nn
from typing_extensions import override

from lightning_5d import ContextParallel, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.expert_parallel.counted import counting_modules
from lightning_5d.expert_parallel.counted_over import CountedOver
from lightning_5d.expert_parallel.row_ranks import RowRanks
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized
from lightning_5d.plan import ParallelPlan
from tests.context_parallel.test_training import uneven
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import compare, decoder


@dataclass(frozen=True)
class Counting(Parallelism):
    """What an expert axis does to routers, and nothing else."""

    axis: ClassVar[str] = "expert"
    order: ClassVar[int] = 15

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        return _Counting(module, mesh)


class _Counting(Parallelized):
    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self._module, self._mesh = module, mesh

    @override
    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        self._ranks = RowRanks.of(self._mesh, axes)
        for counting in counting_modules(self._module):
            counting.counted = CountedOver(self._ranks)

    @override
    def close(self) -> None:
        self._ranks.close()


MOE: dict[str, Any] = {
    "experts": 4,
    "top_k": 2,
    "intermediate_size": 8,
    "shared": 1,
    "balance": 0.05,
    "z": 0.02,
    "bias_rate": 0.01,
}


def model(**changes: Any) -> Any:
    return decoder(moe={**MOE, **changes}, dense_layers=1, num_layers=3)


CUTS = {
    "tp": (TensorParallel(2),),
    "tp+sp": (TensorParallel(2, sequence_parallel=True),),
    "cp": (ContextParallel(2),),
    "cp x tp+sp": (ContextParallel(2), TensorParallel(2, sequence_parallel=True)),
}


@pytest.mark.parametrize("name", ["tp", "cp x tp+sp"])
def test_cut_sequences_train_routers_as_one_process_does(ranks: RankPool, name: str) -> None:
    # Seven tokens: with padding on both axes.
    world = 2 ** len(CUTS[name])
    compare(ranks, model(), Counting(), *CUTS[name], world=world, data=partial(uneven, tokens=7))


@pytest.mark.parametrize("name", ["cp", "tp+sp"])
def test_data_ranks_balance_together(ranks: RankPool, name: str) -> None:
    compare(ranks, model(), Counting(), *CUTS[name], ZeRO(stage=2), world=4, tokens=7)


def test_losses_of_an_early_stage_come_back_through_doors(ranks: RankPool) -> None:
    # Without a balance loss, whose shares of the whole batch a microbatch does not know. Adam makes more of a small gradient's rounding.
    plugins = PipelineParallel(2, microbatches=2), *CUTS["cp"]
    compare(ranks, model(balance=0.0), Counting(), *plugins, world=4, tokens=7, tolerance=5e-5)


def test_recomputed_blocks_count_once(ranks: RankPool) -> None:
    strategy = {"activation_checkpointing": "full"}
    data = partial(uneven, tokens=7)
    compare(ranks, model(balance_scope="sequence"), Counting(), *CUTS["tp+sp"], world=2, data=data, strategy=strategy)
