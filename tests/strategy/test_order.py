"""Where all ranks share the batches, training data keep the order that the user's loader has."""

from functools import partial
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_5d import ContextParallel, FiveD, PipelineParallel, TensorParallel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import Rows, decoder
from tests.trainers import quiet

SHARED = {
    "pipeline": PipelineParallel(2, microbatches=2),
    "tensor": TensorParallel(2),
    "context": ContextParallel(2),
}
ROWS = Rows(10, 6)


class _Order(L.Callback):
    """The rows in the order in which they come."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.rows += batch["input_ids"].tolist()


def _seen(rank: int, plugin: Any, shuffle: bool) -> list[list[int]]:
    order = _Order()
    chosen: dict[str, Any] = {"devices": 1} if plugin is None else {"devices": 2, "strategy": FiveD(plugin)}
    quiet(callbacks=[order], **chosen).fit(decoder()(), DataLoader(ROWS, 2, shuffle=shuffle))
    return order.rows


@pytest.mark.parametrize("name", SHARED)
def test_rows_come_in_the_order_of_one_process(ranks: RankPool, name: str) -> None:
    first, second = ranks(2, partial(_seen, plugin=SHARED[name], shuffle=False), backend=None)
    assert first == second
    assert first == ROWS.ids[:, :-1].tolist() == _seen(0, None, shuffle=False)


def test_shuffled_rows_are_the_same_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks(2, partial(_seen, plugin=SHARED["tensor"], shuffle=True), backend=None)
    assert first == second != ROWS.ids[:, :-1].tolist()
    assert sorted(first) == sorted(ROWS.ids[:, :-1].tolist())
