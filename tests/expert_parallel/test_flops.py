"""Throughput counts the operations of the model once, however many ranks do them, and whichever."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_5d import ExpertParallel, FiveD, Parallelism, PipelineParallel, TensorParallel
from lightning_5d.callbacks import Throughput
from tests.expert_parallel.adapted import Spreading, rows, sentences
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, decoder
from tests.trainers import quiet

MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dense": (decoder(), rows),  # a vocabulary that the ranks do not divide
    "own": (mixture(shared=1), rows),
    "Mixtral": (lambda: Spreading("Mixtral"), sentences),
}
LAYOUTS: dict[int, list[tuple[str, Sequence[Parallelism]]]] = {
    2: [
        ("own", [ExpertParallel(2)]),
        ("dense", [TensorParallel(2)]),
        ("own", [TensorParallel(2)]),
        ("own", [TensorParallel(2, sequence_parallel=True), ExpertParallel(2)]),
        ("Mixtral", [TensorParallel(2), ExpertParallel(2)]),
        ("dense", [PipelineParallel(2, schedule="zb_h1", microbatches=2)]),
    ],
    4: [("own", [ExpertParallel(2), TensorParallel(2), PipelineParallel(2, schedule="zb_h1", microbatches=2)])],
}


def _operations(rank: int, layouts: Sequence[tuple[str, Sequence[Parallelism]]], world: int) -> list[float]:
    """Of three steps, the first of which is not counted."""
    found = []
    for model, plugins in layouts:
        meter = Throughput()
        chosen = {"strategy": FiveD(*plugins)} if plugins else {}
        settings: dict[str, Any] = {"log_every_n_steps": 1, "use_distributed_sampler": False, **chosen}
        module, data = MODELS[model]
        quiet(devices=world, max_steps=3, callbacks=[meter], **settings).fit(module(), datamodule=data())
        found.append(meter.totals["model_flops"])
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_step_has_the_operations_of_one_process(ranks: RankPool, world: int) -> None:
    layouts = LAYOUTS[world]
    alone = dict(zip(MODELS, _operations(0, [(model, ()) for model in MODELS], 1), strict=True))
    expected = [alone[model] for model, _ in layouts]
    assert min(expected) > 0
    for found in ranks(world, _operations, layouts, world, **SEPARATE):
        assert found == pytest.approx(expected, rel=1e-9), layouts
