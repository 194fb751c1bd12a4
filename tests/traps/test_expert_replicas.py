"""Sections F, G and N where ranks hold different experts: what is the same on which of them, and what is not."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import Dealt, Rows, whole
from tests.trainers import quiet
from tests.traps.expert_models import Drawing, Numbered
from tests.traps.replicas import TRAINER, one_and_same
from tests.traps.test_experts import EP2, EP4, RESUMED, dealt, mixture

DRAWN: dict[str, tuple[Any, ...]] = {
    "dp=2, tp=2": (TensorParallel(2, plan=Drawing.plan), ZeRO(stage=1)),
    "tp=2, ep=4": (EP4, TensorParallel(2, plan=Drawing.plan), ZeRO(stage=1)),
    "tp=2, sp, ep=4": (EP4, TensorParallel(2, sequence_parallel=True, plan=Drawing.plan)),
    "cp=2, ep=4": (EP4, ContextParallel(2), ZeRO(stage=2)),
    "ep=2, ZeRO 3": (EP2, ZeRO(stage=3)),
}
"""Layouts of four ranks: neighbours are of one data rank where there are others."""


def _drawn(rank: int) -> dict[str, Any]:
    found = {}
    for name, plugins in DRAWN.items():
        for checkpointing in (None, "full"):
            L.seed_everything(3, verbose=False)
            module = Drawing()
            strategy = FiveD(*plugins, activation_checkpointing=checkpointing)
            quiet(strategy=strategy, devices=4).fit(module, datamodule=Dealt(Rows(16, 6, 7), 8))
            found[name, checkpointing] = (module.drawn(), module.gradients)
    return found


def _of(drawn: dict[str, list[Any]], *places: str) -> list[Any]:
    return [each for name, masks in drawn.items() if name.endswith(places) for each in masks]


def test_31_32_experts_draw_as_their_rows_lie_on_ranks_and_the_same_again_in_backward(ranks: RankPool) -> None:
    found = ranks(4, _drawn, **TRAINER)
    for name in DRAWN:
        drawn = [each[name, None][0] for each in found]
        pairs = [(0, 1), (2, 3)] if "tp" in name or "cp" in name else []
        outside = ["gate", "residual"]
        for one, other in pairs:
            same = _of(drawn[one], *outside) == _of(drawn[other], *outside)
            # The same rows on both: the same noise, and the same dropout behind experts.
            assert same == ("cp" not in name and "sp" not in name), name
            same = _of(drawn[one], "experts.inside") == _of(drawn[other], "experts.inside")
            assert same == ("ep" not in name), name
        # Long masks, which do not agree by chance: of all ranks, layers and steps that have rows of their own.
        apart_ranks = drawn if "cp" in name or "sp" in name or not pairs else drawn[::2]
        for ranks_, places in ((apart_ranks, outside), (drawn if "ep" in name else drawn[::2], ["experts.inside"])):
            every = [each for one in ranks_ for each in _of(one, *places) if len(each) >= 24]
            assert len(every) > 8
            assert len(set(every)) == len(every), (name, places)
        for each in found:
            torch.testing.assert_close(each[name, "full"][1], each[name, None][1], rtol=1e-6, atol=1e-7, msg=name)


STARTED: dict[str, tuple[Any, ...]] = {
    **{name: plugins for name, plugins in RESUMED.items() if name != "ep=2"},
    "parts of experts": (ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1)),
    "pp=2": (EP2, PipelineParallel(2, microbatches=2), ZeRO(stage=1)),
}


def _started(rank: int) -> dict[str, Any]:
    found = {}
    for how in ("own seeds", "meta"):
        for name, plugins in STARTED.items():
            torch.manual_seed(1000 + rank)
            trainer = quiet(strategy=FiveD(*plugins), devices=4, limit_train_batches=0)
            if how == "meta":
                with trainer.init_module(empty_init=True):
                    module = mixture(tie_embeddings=True)()
                assert all(p.is_meta for p in module.parameters())
            else:
                module = mixture(tie_embeddings=True)()
                with torch.no_grad():
                    for p in module.parameters():
                        p.add_(float(rank))
            trainer.fit(module, datamodule=dealt())
            found[how, name] = whole(trainer, dict(module.named_parameters()))
            decoder_ = module.decoder
            found[how, name, "tied"] = "pp" in name or decoder_.lm_head.weight is decoder_.embed_tokens.weight
    return found


def test_28_29_34_every_layout_of_experts_starts_with_the_same_weights_on_all_ranks(ranks: RankPool) -> None:
    found = ranks(4, _started, env={"PL_GLOBAL_SEED": "7"}, **TRAINER)
    first = found[0]
    for (how, name, *tied), weights in first.items():
        if tied:
            assert all(each[how, name, "tied"] for each in found)
        elif how == "meta":
            torch.testing.assert_close(weights, first["meta", "no ep"], rtol=0, atol=0, msg=name)
        else:
            expected = dict(mixture(tie_embeddings=True)().named_parameters())
            torch.testing.assert_close(weights, {n: p.detach() for n, p in expected.items()}, rtol=0, atol=0, msg=name)
    experts = [w for name, w in first["meta", "no ep"].items() if name.endswith("gate_up_proj")]
    every = [expert for layer in experts for expert in layer]
    assert len(every) == 8
    assert not any(torch.equal(one, other) for i, one in enumerate(every) for other in every[:i])


class Reading(Drawing):
    """Notes the numbers of the rows that it reads."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, noise=0.0)
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.epochs[-1] += batch[:, 0].tolist()
        return self(batch % 7).float().logsumexp(-1).mean()


class Stream(IterableDataset[Tensor]):
    """As many rows as a rank's number says."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(self.counts[torch.distributed.get_rank()], 6, dtype=torch.long))


def _read(rank: int) -> Any:
    numbered, streamed = Reading(), Reading()
    plugins = (EP4, TensorParallel(2, plan=Drawing.plan), ZeRO(stage=1))
    quiet(strategy=FiveD(*plugins), devices=4, max_epochs=2).fit(numbered, datamodule=Numbered(16, 2))
    trainer = quiet(strategy=FiveD(EP2, ZeRO(stage=3)), devices=4)
    trainer.fit(streamed, DataLoader(Stream([4, 2, 3, 5]), batch_size=1))
    return numbered.epochs, trainer.global_step


def test_76_77_ranks_with_other_experts_read_other_samples_and_end_together(ranks: RankPool) -> None:
    found = ranks(4, _read, **TRAINER)
    epochs = [each[0] for each in found]
    assert epochs[0] == epochs[1]
    assert epochs[2] == epochs[3]
    for epoch in range(2):
        assert sorted(epochs[0][epoch] + epochs[2][epoch]) == list(range(16))
    assert epochs[0][0] != epochs[0][1]
    assert one_and_same([steps for _, steps in found]) == 2
