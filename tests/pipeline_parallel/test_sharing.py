"""What only the last stage sees, every stage sees, with the values of one process."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.modules import Tokens
from tests.pipeline_parallel.last_stages import Metered, Weighted, staged
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import plain, quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 50.0}
ONE: dict[str, Any] = {**TRAINER, "env": {"WORLD_SIZE": None}}


def _loader(rows: int, size: int, seed: int, data_rank: int, data_ranks: int) -> DataLoader[Tensor]:
    """This data rank's part of each of the batches of `size` that one process has."""
    data = Tokens(rows, seed=seed)
    own = [part for batch in torch.arange(rows).split(size) for part in batch.chunk(data_ranks)[data_rank].tolist()]
    return DataLoader(data, size // data_ranks, sampler=own)


def _fit(rank: int, ranks: int, sources: tuple[int, ...], one_source: bool) -> Any:
    module = Metered(one_source)
    arguments: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1, "use_distributed_sampler": False}
    trainer = quiet(**arguments) if ranks == 1 else staged(ranks, sources=sources, **arguments)
    data_ranks = max(1, ranks // 2)
    place = rank % data_ranks, data_ranks
    # No batch can be divided by the number of microbatches, and the last one has fewer rows than there are of them.
    trainer.fit(module, _loader(22, 10, 2, *place), [_loader(12, 8, seed, *place) for seed in (3, 4)])
    return module.seen, module.outputs, plain(trainer.progress_bar_metrics)


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            try:
                close(found[key], expected[key])
            except AssertionError as error:
                raise AssertionError(f"{key}: {error}") from None
    elif isinstance(expected, str):
        assert found == expected
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            try:
                close(one, other)
            except AssertionError as error:
                raise AssertionError(f"{index}: {error}") from None
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("sources", [(1,), (0, 1)], ids=["last stage", "two directions"])
def test_logs_metrics_and_outputs_equal_one_process_on_every_stage(ranks: RankPool, sources: tuple[int, ...]) -> None:
    one_source = len(sources) == 1
    expected = ranks(1, _fit, 1, sources, one_source, **ONE)[0]
    for found in ranks(2, _fit, 2, sources, one_source, **TRAINER):
        close(found, expected)


def test_replicas_count_once_beside_data_ranks(ranks: RankPool) -> None:
    expected = ranks(1, _fit, 1, (1,), True, **ONE)[0]
    found = ranks(4, _fit, 4, (1,), True, **TRAINER)
    close(found[2], found[0])
    close(found[3], found[1])
    agreed = ("train_loss", "train_sumd", "train_maxd", "train_mind", "val_", " of ")
    for found_on, seen in ((0, found[0][0]), (1, found[1][0])):
        for index, (one, all_ranks) in enumerate(zip(expected[0], seen, strict=True)):
            for key in one:
                local = "local" in key or "sized" in key or "constant" in key or key.startswith("val_step")
                if any(part in key for part in agreed) and not local:
                    close({(found_on, index, key): all_ranks[key]}, {(found_on, index, key): one[key]})


def _predict(rank: int, ranks: int) -> Any:
    trainer = quiet() if ranks == 1 else staged(ranks, use_distributed_sampler=False)
    found = trainer.predict(Metered(), _loader(7, 5, 2, 0, 1))
    return [(part["scores"].tolist(), part["names"]) for part in found]


def test_every_stage_has_the_predictions_of_one_process(ranks: RankPool) -> None:
    expected = ranks(1, _predict, 1, **ONE)[0]
    assert [len(names) for _, names in expected] == [5, 2]
    for found in ranks(2, _predict, 2, **TRAINER):
        close(found, expected)


def _weighted(rank: int, ranks: int, wrong: str = "") -> Any:
    torch.manual_seed(0)
    module = Weighted(wrong)
    trainer = quiet() if ranks == 1 else staged(ranks, use_distributed_sampler=False)
    rows = torch.tensor([[1, 2, 3], [0, 0, 0], [0, 5, 0], [4, 5, 6], [7, 0, 0]])
    trainer.fit(module, DataLoader(rows, 3))
    return module.seen


def test_a_logged_loss_and_the_returned_one_are_weighted_alike(ranks: RankPool) -> None:
    expected = ranks(1, _weighted, 1, **ONE)[0]
    assert [weight for _, weight, _ in expected] == [4, 4]
    for found in ranks(2, _weighted, 2, **TRAINER):
        close(found, expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("group", "'loss' is logged in training_step with a sync_dist_group"),
        ("odd", r"output\['shape'\] cannot be made one: tensors of shapes"),
        ("raises", "on the last stage"),
    ],
)
def test_what_cannot_be_shared_ends_every_stage_at_once(ranks: RankPool, wrong: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=message):
        ranks(2, _weighted, 2, wrong, **TRAINER)
    assert time.monotonic() - started < 30
