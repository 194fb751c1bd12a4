"""Section J, and what of the others is about experts, in a real Trainer whose ranks hold different ones."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_5d import (
    ContextParallel,
    ExpertParallel,
    FiveD,
    FiveDPrecision,
    PipelineParallel,
    TensorParallel,
    ZeRO,
)
from lightning_5d.expert_parallel.bias import balance_by_bias
from lightning_5d.expert_parallel.routing import TopKRouter
from lightning_5d.loss_scaling import LossScaling
from lightning_5d.models import LanguageModel
from tests.pipeline_parallel.recorded import Record
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, apart, decoder, fit, whole
from tests.trainers import quiet
from tests.traps.expert_models import Drawing, Numbered, Sloped, Tokens
from tests.traps.replicas import TRAINER, one_and_same

EP2, EP4 = ExpertParallel(2), ExpertParallel(4)
INF = float("inf")

SLOPES: dict[str, tuple[tuple[Any, ...], bool]] = {
    "two ranks have the same": ((EP2, ZeRO(stage=1)), False),
    "in shards": ((EP2, ZeRO(stage=3)), False),
    "each rank has its own": ((EP4, ZeRO(stage=2)), False),
    "all plain": ((EP4, ZeRO(stage=0)), False),
    "a stage without": ((EP2, PipelineParallel(2, microbatches=2), ZeRO(stage=1)), False),
    "frozen": ((EP2, ZeRO(stage=1)), True),
    "a stage of frozen ones": ((EP2, PipelineParallel(2, microbatches=2), ZeRO(stage=1)), True),
}


def _sloped(
    rank: int, steps: list[list[tuple[int, float]]], scale: float | None, names: list[str], **flags: Any
) -> dict[str, Any]:
    found = {}
    for name in names:
        plugins, frozen = SLOPES[name]
        record, module = Record(), Sloped(frozen)
        scaling = LossScaling(scale or 1.0)
        precision = {} if scale is None else {"plugins": FiveDPrecision("16-mixed", loss_scaling=scaling)}
        trainer = quiet(
            strategy=FiveD(*plugins),
            devices=4,
            callbacks=[record],
            use_distributed_sampler=False,
            **precision,
            **flags,
        )
        trainer.fit(module, datamodule=Tokens(steps))
        weights = whole(trainer, {n: p for n, p in module.named_parameters() if p.numel()})
        found[name] = {
            "weights": [x for value in weights.values() for x in value.flatten().tolist()],
            "norms": record.norms,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "skipped": trainer.strategy.skipped_steps.state_dict()["by_reason"],
            "scale": None if scale is None else trainer.precision_plugin.scaler.scale,
        }
    return found


def test_04_05_one_norm_over_experts_and_all_others_clips_all_alike(ranks: RankPool) -> None:
    step = [[(0, 40.0), (3, 4.0)]]
    found = ranks(4, _sloped, step, None, list(SLOPES), gradient_clip_val=1.0, **TRAINER)
    for name, (_, frozen) in SLOPES.items():
        norm = math.sqrt(25 if frozen else 40**2 + 4**2 + 25)
        experts = [0.0] * 4 if frozen else [40.0, 0.0, 0.0, 4.0]
        expected = [-gradient / norm for gradient in [*experts, 3.0, 0.0, 0.0, 4.0, 0.0]]
        for each in found:
            assert each[name]["norms"] == [pytest.approx(norm)], name
        assert found[0][name]["weights"] == pytest.approx(expected, abs=1e-6), name


def test_07_08_13_an_overflow_in_one_expert_skips_the_step_and_the_schedule_on_all_and_clipping_sees_true_gradients(
    ranks: RankPool,
) -> None:
    good = [(0, 2.0), (3, 4.0)]
    steps = [[(3, INF)], good]
    names = [name for name, (_, frozen) in SLOPES.items() if not frozen]
    norm = math.sqrt(2**2 + 4**2 + 25)
    expected = [-gradient / norm for gradient in [2.0, 0.0, 0.0, 4.0, 3.0, 0.0, 0.0, 4.0, 0.0]]
    found = ranks(4, _sloped, steps, 512.0, names, gradient_clip_val=1.0, **TRAINER)
    for name in names:
        for each in found:
            assert each[name]["skipped"] == {"loss scale": 1}, name
            assert (each[name]["scale"], each[name]["lr"]) == (256.0, 0.5), name
            assert each[name]["norms"][1] == pytest.approx(norm), name
        assert found[0][name]["weights"] == pytest.approx(expected, abs=1e-5), name


MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "intermediate_size": 8}


def mixture(moe: Mapping[str, Any] = {}, **changes: Any) -> Callable[[], LanguageModel]:
    """The reference model with four experts in each of its two layers."""
    return decoder(moe={**MOE, **moe}, **changes)


class Repeated(Rows):
    """The same two rows again and again, so that microbatches are equal."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index % 2)


BATCH, TOKENS = 8, 7


def _repeated() -> Dealt:
    return Dealt(Repeated(BATCH, TOKENS), BATCH)


def _accumulated() -> Dealt:
    return Dealt(Repeated(BATCH, TOKENS), BATCH // 4)


LAYOUTS: dict[str, tuple[tuple[Any, ...], Callable[[], Dealt], dict[str, Any]]] = {
    "dp=2": ((ZeRO(stage=1),), _repeated, {}),
    "ep=2": ((EP2,), _repeated, {}),
    "pp=2": ((PipelineParallel(2, microbatches=4),), _repeated, {}),
    "4 microbatches": ((EP2,), _accumulated, {"accumulate_grad_batches": 4}),
    "tp=2": ((TensorParallel(2),), _repeated, {}),
    "tp=2, ep=2": ((EP2, TensorParallel(2, sequence_parallel=True)), _repeated, {}),
    "cp=2": ((ContextParallel(2),), _repeated, {}),
    "cp=2, ep=2": ((EP2, ContextParallel(2)), _repeated, {}),
}


def _balanced(rank: int, coefficient: float) -> dict[str, Any]:
    found = {}
    for name, (plugins, data, flags) in LAYOUTS.items():
        model = mixture({"balance": coefficient})
        found[name] = fit(rank, model, data, partial(FiveD, *plugins), devices=2, **flags)
    return found


def test_53_55_56_balance_has_the_gradient_of_one_process_in_every_layout_and_so_have_all_others(
    ranks: RankPool,
) -> None:
    found = {c: ranks(2, _balanced, c, **SEPARATE) for c in (0.0, 0.01)}
    module = mixture({"balance": 1.0})()
    module.losses(next(iter(DataLoader(Repeated(BATCH, TOKENS), BATCH))))[1]["balance"].backward()
    alone = {c: fit(0, mixture({"balance": c}), _repeated, None) for c in (0.0, 0.01)}
    for name in LAYOUTS:
        for c, expected in alone.items():
            each = [of_rank[name] for of_rank in found[c]]
            for one in each:
                one["losses"] = [sum(one["losses"])]  # of microbatches
            assert max(apart(each, expected, 1e-6).values()) < 1e-5, (name, c)
        without, with_balance = (found[c][0][name]["gradients"][0] for c in (0.0, 0.01))
        for layer in range(2):
            router = f"decoder.layers.{layer}.mlp.gate.weight"
            expected_grad = 0.01 * module.get_parameter(router).grad  # type: ignore[operator]
            assert expected_grad.abs().max() > 1e-5
            difference = with_balance[router] - without[router]
            torch.testing.assert_close(difference, expected_grad, rtol=1e-3, atol=2e-8)


def _push(module: Any) -> None:
    """All tokens choose expert 0."""
    for router in module.modules():
        if isinstance(router, TopKRouter):
            assert router.expert_bias is not None
            router.expert_bias[0] = 9.0


class Pushed(LanguageModel):
    """Its routers send every token to expert 0. It looks what each rank has for gradients."""

    def on_fit_start(self) -> None:
        _push(self)
        self.missing: list[str] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.missing += [name for name, p in self.named_parameters() if p.grad is None]


def _pushed_model() -> LanguageModel:
    module = mixture({"top_k": 1, "bias_rate": 0.0, "balance": 0.01})()
    module.__class__ = Pushed
    return module


def _pushed(rank: int, stages: list[int]) -> list[Any]:
    found = []
    for stage in stages:
        module = _pushed_model()
        run = fit(rank, lambda module=module: module, _dealt, partial(FiveD, EP2, ZeRO(stage=stage)), devices=4)
        found.append((run, module.missing))
    return found


def _dealt(rows: int = 24, batch: int = 8, tokens: int = TOKENS) -> Dealt:
    return Dealt(Rows(rows, tokens), batch)


def test_52_experts_without_any_token_take_part_and_have_zeros_for_gradients(ranks: RankPool) -> None:
    stages = [1, 3]
    found = ranks(4, _pushed, stages, **SEPARATE)
    expected = fit(0, _pushed_model, _dealt, None)
    for number in range(len(stages)):
        assert [missing for _, missing in (each[number] for each in found)] == [[]] * 4
        runs = [each[number][0] for each in found]
        assert max(apart(runs, expected, 1e-6).values()) < 1e-5
        for step in runs[0]["gradients"]:
            for layer in range(2):
                for key in ("gate_up_proj", "down_proj"):
                    gradient = step[f"decoder.layers.{layer}.mlp.experts.{key}"]
                    assert gradient[0].abs().max() > 0
                    assert not gradient[1:].any()


class Weighted(LanguageModel):
    """Its loss counts by its tokens; rows of half of the data have some, others few or none."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": (batch["labels"] >= 0).sum()}


def _weighted_model() -> LanguageModel:
    module = mixture()()
    module.__class__ = Weighted
    return module


class Sparse(Rows):
    """Of even rows, which rank 0 gets, all tokens count, of others a few, and in the second step none."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        count = TOKENS if index % 2 == 0 else 0 if index >= 4 else 1 + index
        return {**row, "labels": row["labels"].masked_fill(torch.arange(TOKENS) >= count, -100)}


def _sparse() -> Dealt:
    return Dealt(Sparse(8, TOKENS), 4)


WEIGHTED: dict[str, Callable[[], FiveD]] = {
    "ZeRO 2": partial(FiveD, EP2, ZeRO(stage=2)),
    "recomputed": partial(FiveD, EP4, ZeRO(stage=3), activation_checkpointing="full"),
    "tp=2": partial(FiveD, EP2, TensorParallel(2, sequence_parallel=True)),
    "pp=2": partial(FiveD, EP2, PipelineParallel(2, microbatches=2)),
}


def _weighted(rank: int) -> dict[str, Any]:
    return {name: fit(rank, _weighted_model, _sparse, made, devices=4) for name, made in WEIGHTED.items()}


def test_16_17_ranks_and_microbatches_with_few_tokens_or_none_weigh_as_much_and_nobody_waits(ranks: RankPool) -> None:
    found = ranks(4, _weighted, **SEPARATE)
    expected = fit(0, mixture(), _sparse, None)
    for name in WEIGHTED:
        each = [
            {**of_rank[name], "losses": expected["losses"]} for of_rank in found
        ]  # a rank's own are means of its tokens
        differences = apart(each, expected, 1e-6)
        assert max(differences.values()) < 1e-5, (name, differences)


RESUMED: dict[str, tuple[Any, ...]] = {
    "ep=2": (EP2, ZeRO(stage=1)),
    "ep=4, ZeRO 3": (EP4, ZeRO(stage=3)),
    "tp=2, ep=4": (EP4, TensorParallel(2, sequence_parallel=True), ZeRO(stage=2)),
    "parts of experts": (ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1)),
    "pp=2": (EP2, PipelineParallel(2, microbatches=2), ZeRO(stage=1)),
    "no ep": (ZeRO(stage=3),),
}


class Grouped(LanguageModel):
    """Experts are a group of their own, of which a stage may have none; one layer's are partly frozen; one group is empty."""

    losses_seen: list[float]

    def on_fit_start(self) -> None:
        self.losses_seen = []

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses_seen.append(float(self.trainer.strategy.reduce(torch.as_tensor(outputs["loss"]).clone())))

    def configure_optimizers(self) -> Any:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for name, p in trained.items() if "experts" in name], "lr": 0.02, "weight_decay": 0.3},
            {"params": []},
            {"params": [p for name, p in trained.items() if "experts" not in name]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        balance_by_bias(self, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _grouped_model(seed: int = 0) -> LanguageModel:
    module = mixture({"bias_rate": 0.05}, dense_layers=1, num_layers=3)()
    module.__class__ = Grouped
    if seed:
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    tensor.add_(1.0)
    module.decoder.layers[1].mlp.experts.down_proj.requires_grad_(False)  # type: ignore[union-attr]
    return module


def _run(strategy: Any, path: Path | None, save: Path | None) -> dict[str, Any]:
    trainer = quiet(
        strategy=strategy, max_epochs=1 if save else 2, use_distributed_sampler=False, devices=_world(strategy)
    )
    module = _grouped_model(seed=0 if path is None else 5)
    trainer.fit(module, datamodule=_dealt(16, 8), ckpt_path=path)
    if save:
        trainer.save_checkpoint(save)
    found: dict[str, Any] = {"losses": module.losses_seen, "lr": [g["lr"] for g in trainer.optimizers[0].param_groups]}
    if isinstance(strategy, FiveD):
        state = strategy.optimizer_state(trainer.optimizers[0])
        weights = strategy.lightning_module_state_dict()
    else:
        state, weights = trainer.optimizers[0].state_dict(), module.state_dict()
    if trainer.is_global_zero:
        found |= {"weights": {n: w.clone() for n, w in weights.items()}, "state": state["state"]}
    return found


def _world(strategy: Any) -> int:
    return 4 if isinstance(strategy, FiveD) else 1


def _saved(rank: int, folder: str) -> None:
    for name in RESUMED:
        _run(FiveD(*RESUMED[name]), None, Path(folder) / f"{name}.ckpt")


def _resumed(rank: int, folder: str) -> dict[str, Any]:
    names = list(RESUMED)
    found = {}
    for number, name in enumerate(names):  # around the ring: each goes on with what another one has saved
        found[name] = _run(FiveD(*RESUMED[name]), Path(folder) / f"{names[number - 1]}.ckpt", None)
    found["from one process"] = _run(FiveD(*RESUMED["ep=2"]), Path(folder) / "alone.ckpt", None)
    return found


def test_65_68_70_73_a_run_resumes_under_any_other_layout_of_experts_with_all_its_state(
    ranks: RankPool, tmp_path: Path
) -> None:
    _run("auto", None, tmp_path / "alone.ckpt")
    ranks(4, _saved, str(tmp_path), **SEPARATE)
    expected = _run("auto", tmp_path / "alone.ckpt", None)
    start = _grouped_model()
    frozen = "decoder.layers.1.mlp.experts.down_proj"
    assert len(expected["state"]) == len([p for p in start.parameters() if p.requires_grad])
    found = ranks(4, _resumed, str(tmp_path), **SEPARATE)
    found[0]["alone"] = _run("auto", tmp_path / "tp=2, ep=4.ckpt", None)
    for name, run in found[0].items():
        assert run["lr"] == expected["lr"] == pytest.approx([0.005, 0.0025, 0.0025]), name
        assert len(run["losses"]) == 2
        if "pp" not in name:
            assert run["losses"] == pytest.approx(expected["losses"], rel=1e-4), name
        torch.testing.assert_close(run["weights"], expected["weights"], rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(run["state"], expected["state"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(run["weights"][frozen], start.get_parameter(frozen).detach(), rtol=0, atol=0)


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
            module = Drawing(noted="cp" not in name)
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
        outside = {0: ["gate", "residual"], 1: ["experts.inside"]}[0]
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


def _started(rank: int) -> dict[str, Any]:
    found = {}
    for how in ("own seeds", "meta"):
        for name in ("ep=4, ZeRO 3", "tp=2, ep=4", "parts of experts", "pp=2", "no ep"):
            torch.manual_seed(1000 + rank)
            trainer = quiet(strategy=FiveD(*RESUMED[name]), devices=4, limit_train_batches=0)
            if how == "meta":
                with trainer.init_module(empty_init=True):
                    module = mixture(tie_embeddings=True)()
                assert all(p.is_meta for p in module.parameters())
            else:
                module = mixture(tie_embeddings=True)()
                with torch.no_grad():
                    for p in module.parameters():
                        p.add_(float(rank))
            trainer.fit(module, datamodule=_dealt())
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
