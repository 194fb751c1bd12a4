"""Section M and spares: frozen, wrapped, unused and grouped parameters, and memory that stays flat."""

import gc
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader

from lightning_5d.gradients import clip_by_norm, clip_by_value, global_norm, scale_gradients
from tests.modules import TinyLM, loader
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole, zero
from tests.traps.replicas import STAGES, TRAINER, one_and_same


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRA(TinyLM):
    """Adapters in the first two blocks; a third block and the embedding frozen as a whole."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.requires_grad_(False)
        for layer in list(self.layers)[:2]:
            layer.up = Adapted(layer.up)  # type: ignore[arg-type]
        self.head = Adapted(self.head)  # type: ignore[assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def same_rows(ranks: int, count: int = 4) -> DataLoader[Tensor]:
    """The same batch in every step and on every rank."""
    row = loader(1).dataset[0]
    return DataLoader([row] * (2 * ranks * count), batch_size=2)  # type: ignore[arg-type]


def _adapted(rank: int, stage: int, ranks: int, part: str, folder: str) -> Any:
    path = Path(folder) / "lora.ckpt"
    trainer = zero(stage, ranks, max_epochs=1 if part == "first" else 2)
    module = LoRA(seed=0 if part != "second" else 31)
    trainer.fit(module, same_rows(ranks), ckpt_path=path if part == "second" else None)
    if part == "first":
        trainer.save_checkpoint(path)
    return whole(module), trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]


@pytest.mark.parametrize(("first", "second"), [((s, 2), (s, 2)) for s in STAGES] + [((3, 3), (1, 2)), ((0, 2), (3, 3))])
def test_70_frozen_weights_come_back_bit_by_bit_and_adapters_alone_have_state(
    ranks: RankPool, tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    ranks(first[1], _adapted, *first, "first", str(tmp_path), **TRAINER)
    straight, _ = ranks(second[1], _adapted, *second, "straight", str(tmp_path), **TRAINER)[0]
    initial = LoRA()
    trained = {name for name, p in initial.named_parameters() if p.requires_grad}
    for weights, state in ranks(second[1], _adapted, *second, "second", str(tmp_path), **TRAINER):
        for name, p in initial.named_parameters():
            if name in trained:
                torch.testing.assert_close(weights[name], straight[name], rtol=1e-4, atol=1e-5)
            else:
                torch.testing.assert_close(weights[name], p.detach(), rtol=0, atol=0)
        assert len(state) == len(trained) == 6


class Wrapped(TinyLM):
    """Blocks wrapped for activation checkpointing, compilation, or both, in either order; or in place."""

    def __init__(self, how: str, seed: int = 0) -> None:
        super().__init__(layers=2, seed=seed)
        for index, layer in enumerate(self.layers):
            self.layers[index] = self._wrap(layer, how)

    @staticmethod
    def _wrap(layer: nn.Module, how: str) -> nn.Module:
        for step in how.split("+"):
            if step == "checkpoint":
                layer = checkpoint_wrapper(layer)
            elif step == "compile":
                layer = torch.compile(layer, backend="eager")  # type: ignore[assignment]
            elif step == "in place":
                layer.compile(backend="eager")
        return layer


def _wrapped(rank: int, stage: int, how: str, part: str, folder: str) -> Any:
    path = Path(folder) / "wrapped.ckpt"
    trainer = zero(stage, 2, max_epochs=1 if part == "first" else 2)
    module = Wrapped(how, seed=0 if part != "second" else 31)
    trainer.fit(module, same_rows(2), ckpt_path=path if part == "second" else None)
    if part == "first":
        trainer.save_checkpoint(path)
    return list(whole(module).values())


WRAPPED = [("checkpoint", ""), ("", "checkpoint"), ("compile", ""), ("", "compile"), ("checkpoint+compile", "in place")]


@pytest.mark.parametrize(("first", "second"), WRAPPED)
@pytest.mark.parametrize("stage", [0, 3])
def test_71_names_in_a_checkpoint_are_plain_whatever_wraps_a_block(
    ranks: RankPool, tmp_path: Path, stage: int, first: str, second: str
) -> None:
    ranks(2, _wrapped, stage, first, "first", str(tmp_path), **TRAINER)
    saved = torch.load(tmp_path / "wrapped.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == list(TinyLM(layers=2).state_dict())
    straight = ranks(2, _wrapped, stage, second, "straight", str(tmp_path), **TRAINER)[0]
    for found in ranks(2, _wrapped, stage, second, "second", str(tmp_path), **TRAINER):
        torch.testing.assert_close(found, straight, rtol=1e-5, atol=1e-6)


class Grouped(TinyLM):
    """Matrices decay, vectors do not, and a third group is empty; a schedule for each group."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(layers=2, seed=seed)

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": decay, "weight_decay": 0.5},
            {"params": [], "lr": 0.3},
            {"params": others, "weight_decay": 0.0, "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.5**s, lambda s: 1.0, lambda s: 0.1**s])
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def _grouped(rank: int, stage: int | None, ranks: int, part: str, folder: str) -> Any:
    path = Path(folder) / "grouped.ckpt"
    flags = {"max_epochs": 1 if part == "first" else 2}
    trainer = quiet(**flags) if stage is None else zero(stage, ranks, **flags)
    module = Grouped(seed=0 if part != "second" else 31)
    trainer.fit(module, same_rows(ranks), ckpt_path=path if part == "second" else None)
    if part == "first":
        trainer.save_checkpoint(path)
    groups = trainer.optimizers[0].param_groups
    facts = [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    return facts, whole(module)


@pytest.mark.parametrize("stage", STAGES)
def test_73_groups_keep_their_members_rates_and_decay_also_when_one_is_empty(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    one = ranks(1, _grouped, None, 1, "straight", str(tmp_path), **TRAINER, env={"WORLD_SIZE": None})[0]
    ranks(3, _grouped, stage, 3, "first", str(tmp_path), **TRAINER)
    for facts, weights in ranks(2, _grouped, stage, 2, "second", str(tmp_path), **TRAINER):
        assert facts == one[0]
        assert [fact[0] for fact in facts] == [6, 0, 8]
        assert [fact[1] for fact in facts] == pytest.approx([0.0025, 0.3, 0.0002])
        torch.testing.assert_close(weights, one[1], rtol=1e-4, atol=1e-5)


class Branches(L.LightningModule):
    """Each rank takes its own branch; one branch is taken by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        own = int(batch[0, 0]) % 3
        return (self.layers[own](batch.float()[:, :3]) * self.gates[own]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OwnBranch(L.LightningDataModule):
    """Row r of each step chooses branch r."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def train_dataloader(self) -> DataLoader[Tensor]:
        from tests.traps.test_accumulation import in_order

        assert self.trainer is not None
        rows = [torch.tensor([float(r), 2.0, -1.0]) for r in range(self.ranks)] * 3
        return in_order(self.trainer, rows)


def _branches(rank: int, stage: int | None, ranks: int, accumulate: int) -> dict[str, Tensor]:
    flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.7}
    trainer = quiet(**flags) if stage is None else zero(stage, ranks, **flags)
    module = Branches()
    # One process: the same samples as microbatches of one step.
    trainer.fit(module, OwnBranch(3 if stage is None else ranks))
    return whole(module)


@pytest.mark.parametrize("stage", STAGES)
def test_74_a_parameter_used_by_one_rank_or_none_counts_as_zero_elsewhere(ranks: RankPool, stage: int) -> None:
    one = ranks(1, _branches, None, 1, 3, **TRAINER, env={"WORLD_SIZE": None})[0]
    for found in ranks(3, _branches, stage, 3, 1, **TRAINER):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one["layers.3.weight"], Branches().layers[3].weight.detach(), rtol=0, atol=0)


class Watched(TinyLM):
    """Counts the live tensors at the end of steps."""

    def __init__(self, fused: bool) -> None:
        super().__init__(layers=1)
        self.fused = fused
        self.tensors: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        gc.collect()
        self.tensors.append(sum(isinstance(item, Tensor) for item in gc.get_objects()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


def _watched(rank: int, stage: int, fused: bool) -> list[int]:
    module = Watched(fused)
    zero(stage, 2).fit(module, loader(2 * 2 * 12))
    return module.tensors[2:]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_spare_no_object_is_left_behind_by_a_step(ranks: RankPool, stage: int, fused: bool) -> None:
    for counts in ranks(2, _watched, stage, fused, **TRAINER):
        assert len(counts) == 10
        assert _records(counts) <= 2, counts


def _records(counts: list[int]) -> int:
    """How often the count exceeded all before it: with a leak in every n-th step, (len(counts) - 1) / n times."""
    highest = list(accumulate(counts, max))
    return sum(a < b for a, b in pairwise(highest))


def test_spare_a_leak_is_told_from_an_allocation_that_happens_once() -> None:
    assert _records([871] * 9 + [873]) == 1
    assert _records([871, 873, 871, 874, 872, 871, 874, 873, 871, 872]) == 2
    assert _records([871 + step // 3 for step in range(10)]) == 3
    assert _records(list(range(871, 881))) == 9


def test_spare_a_generator_of_parameters_is_clipped_like_a_list() -> None:
    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
        made[0].grad, made[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
        return made

    ours = parameters()
    norm = global_norm(p for p in ours)
    assert float(norm) == pytest.approx(5.0)
    clip_by_norm((p for p in ours), 1.0, norm)
    assert float(ours[1].grad) == pytest.approx(0.8)  # type: ignore[arg-type]
    clip_by_value((p for p in ours), 0.5)
    assert float(ours[1].grad) == 0.5  # type: ignore[arg-type]
    scale_gradients((p for p in ours), 2.0)
    assert float(ours[1].grad) == 1.0  # type: ignore[arg-type]


class ClippedByHand(TinyLM):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.automatic_optimization = False
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(batch) * 100)
        strategy = self.trainer.strategy
        self.norms.append(float(strategy.gradient_norm(p for p in self.parameters())))  # type: ignore[attr-defined]
        clip_by_norm((p for p in self.parameters()), 0.5, strategy.gradient_norm())  # type: ignore[attr-defined]
        self.norms.append(float(strategy.gradient_norm()))  # type: ignore[attr-defined]
        optimizer.step()  # type: ignore[union-attr]


def _by_hand(rank: int, stage: int) -> list[float]:
    module = ClippedByHand()
    zero(stage, 2).fit(module, loader(4))
    return module.norms


@pytest.mark.parametrize("stage", STAGES)
def test_spare_a_generator_is_clipped_under_every_stage(ranks: RankPool, stage: int) -> None:
    before, after = one_and_same(ranks(2, _by_hand, stage, **TRAINER))
    assert before > 1.0
    assert after == pytest.approx(0.5, rel=1e-4)
