"""What a rank holds and sends in mixed precision: 16-bit copies whole, fp32 masters, gradients and states as shards."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, ZeRO
from tests.data_parallel.test_memory import _bytes
from tests.modules import TinyLM, batches
from tests.ranks.pool import RankPool
from tests.trainers import quiet
from tests.traps.replicas import TRAINER

WIDTH = 64  # of which all ranks' shards are equal, but for the embedding's 13 rows
COUNT = sum(p.numel() for p in TinyLM(layers=2, width=WIDTH).parameters())


class Watched(TinyLM):
    """Looks at what it holds while an optimizer is about to step, and while a block runs."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=WIDTH)
        self.held: dict[str, int] = {}

    def _full(self) -> int:
        groups = self.trainer.strategy.parallelized[-1].engine.groups
        full = [getattr(p, "_unsharded_param", None) for group in groups for p in group.fsdp_params]
        return _bytes(p for p in full if p is not None)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.held["copies"] = max(self.held.get("copies", 0), self._full())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.held["masters"] = _bytes(self.parameters())
        self.held["gradients"] = _bytes(p.grad for p in self.parameters())

    def on_train_end(self) -> None:
        entries = [v for state in self.trainer.optimizers[0].state.values() for k, v in state.items() if k != "step"]
        self.held["states"] = _bytes(entries)
        traffic = self.trainer.strategy.parallelized[-1].engine.traffic
        self.held.update({f"sent {kind}": volume for kind, volume in traffic.bytes.items()})


def _held(rank: int, ranks: int) -> list[dict[str, int]]:
    found = []
    for stage in (0, 1, 2, 3):
        module = Watched()
        trainer = quiet(
            strategy=FiveD(ZeRO(stage=stage)),
            devices=ranks,
            plugins=FiveDPrecision("16-mixed"),
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(batches(1), batch_size=None))  # type: ignore[arg-type]
        found.append(module.held)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_holds_2_bytes_of_each_weight_and_its_share_of_the_rest(ranks: RankPool, world: int) -> None:
    for results in ranks(world, _held, world, **TRAINER):
        for stage, held in enumerate(results):
            share = 1 if stage == 0 else world
            expected: dict[str, Any] = {
                "masters": 4 * COUNT / share,
                "gradients": 4 * COUNT / share,
                "states": 8 * COUNT / share,
            }
            if stage < 3:
                expected["copies"] = 2 * COUNT
            else:
                assert held["copies"] < 2 * COUNT * 0.5 or world == 1
            if world == 2 and stage > 0:
                # Stage 3 gathers blocks again in backward; the root's weights, once used, stay.
                expected["sent reduce_scatter"] = 4 * COUNT
                if stage < 3:
                    expected["sent all_gather"] = 2 * COUNT
            for name, right in expected.items():
                # Gradients live in whole pages; the embedding's 13 rows are padded to 14.
                slack = 8 * 4096 if name == "gradients" else 0
                assert right * 0.98 <= held[name] <= right * 1.03 + slack, f"stage {stage}: {name}"
