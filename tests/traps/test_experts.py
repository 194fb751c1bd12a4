"""Section J, and what of the others is about experts, in a real Trainer whose ranks hold different ones."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

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
from tests.expert_parallel.routed import Block, Routed
from tests.pipeline_parallel.recorded import Record
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, apart, decoder, fit, whole
from tests.trainers import quiet
from tests.traps.expert_models import Sloped, Tokens
from tests.traps.replicas import TRAINER

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
    module = mixture({"top_k": 1, "normalize": False, "bias_rate": 0.0, "balance": 0.01})()
    module.__class__ = Pushed
    return module


def _pushed(rank: int, stages: list[int]) -> list[Any]:
    found = []
    for stage in stages:
        module = _pushed_model()
        run = fit(rank, lambda module=module: module, dealt, partial(FiveD, EP2, ZeRO(stage=stage)), devices=4)
        found.append((run, module.missing))
    return found


def dealt(rows: int = 24, batch: int = 8, tokens: int = TOKENS) -> Dealt:
    return Dealt(Rows(rows, tokens), batch)


def test_52_experts_without_any_token_take_part_and_have_zeros_for_gradients(ranks: RankPool) -> None:
    stages = [1, 3]
    found = ranks(4, _pushed, stages, **SEPARATE)
    expected = fit(0, _pushed_model, dealt, None)
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


def _run(strategy: Any, path: Path | None, save: Path | None, **flags: Any) -> dict[str, Any]:
    devices = 4 if isinstance(strategy, FiveD) else 1
    epochs = 1 if save else 2
    common: dict[str, Any] = {"devices": devices, "use_distributed_sampler": False, "limit_val_batches": 0, **flags}
    trainer = quiet(strategy=strategy, max_epochs=epochs, **common)
    module = _grouped_model(seed=0 if path is None else 5)
    trainer.fit(module, datamodule=dealt(16, 8), ckpt_path=path)
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


def _scaled(name: str, path: Path | None, save: Path | None) -> tuple[float, int]:
    precision = FiveDPrecision("16-mixed", loss_scaling=LossScaling(1024.0, growth_interval=4))
    _run(FiveD(*RESUMED[name]), path, save, plugins=precision)
    scaler: Any = precision.scaler
    return scaler.scale, scaler.growth_tracker


def _saved(rank: int, folder: str) -> Any:
    for name in RESUMED:
        _run(FiveD(*RESUMED[name]), None, Path(folder) / f"{name}.ckpt")
    return _scaled("ep=2", None, Path(folder) / "scaled.ckpt")


def _resumed(rank: int, folder: str) -> dict[str, Any]:
    names = list(RESUMED)
    found = {}
    for number, name in enumerate(names):  # around the ring: each goes on with what another one has saved
        found[name] = _run(FiveD(*RESUMED[name]), Path(folder) / f"{names[number - 1]}.ckpt", None)
    found["from one process"] = _run(FiveD(*RESUMED["ep=2"]), Path(folder) / "alone.ckpt", None)
    found["scaled"] = _scaled("ep=4, ZeRO 3", Path(folder) / "scaled.ckpt", None)
    return found


def test_10_65_68_70_73_a_run_resumes_under_any_other_layout_of_experts_with_all_its_state(
    ranks: RankPool, tmp_path: Path
) -> None:
    _run("auto", None, tmp_path / "alone.ckpt")
    assert ranks(4, _saved, str(tmp_path), **SEPARATE) == [(1024.0, 2)] * 4
    expected = _run("auto", tmp_path / "alone.ckpt", None)
    start = _grouped_model()
    frozen = "decoder.layers.1.mlp.experts.down_proj"
    assert len(expected["state"]) == len([p for p in start.parameters() if p.requires_grad])
    found = ranks(4, _resumed, str(tmp_path), **SEPARATE)
    assert [each.pop("scaled") for each in found] == [(2048.0, 0)] * 4
    found[0]["alone"] = _run("auto", tmp_path / "tp=2, ep=4.ckpt", None)
    for name, run in found[0].items():
        assert run["lr"] == expected["lr"] == pytest.approx([0.005, 0.0025, 0.0025]), name
        assert len(run["losses"]) == 2
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-4), name
        torch.testing.assert_close(run["weights"], expected["weights"], rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(run["state"], expected["state"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(run["weights"][frozen], start.get_parameter(frozen).detach(), rtol=0, atol=0)


class Unit(Block):
    """Its experts get directions; that of padding, which is zeros, is not a number."""

    def body(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        index, weights = self.gate(rows)
        return x + self.experts(rows / rows.norm(dim=-1, keepdim=True), index, weights).view_as(x)


class Units(Routed):
    def __init__(self) -> None:
        super().__init__((4, 4), lr=0.1)
        for layer in self.layers:
            layer.__class__ = Unit

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def _units(rank: int) -> Any:
    return [
        fit(rank, Units, dealt, partial(FiveD, *experts, ContextParallel(2)), devices=4) for experts in ((EP4,), ())
    ]


def test_56_padding_reaches_no_expert_and_no_gradient(ranks: RankPool) -> None:
    expected = fit(0, Units, dealt, None)
    for found in zip(*ranks(4, _units, **SEPARATE), strict=True):
        assert len(found[0]["gradients"]) == 3
        assert all(gradient.isfinite().all() for step in found[0]["gradients"] for gradient in step.values())
        differences = apart([*found], expected, 1e-6)
        assert max(differences.values()) < 1e-5, differences
