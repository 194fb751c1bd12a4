"""Lightning with experts on other ranks: whatever a user sees of a run is what one process shows."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_5d import ContextParallel, ExpertParallel, FiveD, Parallelism, TensorParallel, ZeRO
from lightning_5d.callbacks import Throughput
from lightning_5d.models import LanguageModel
from tests.expert_parallel.adapted import COMPILED, RUNS, TWICE, Spreading, rows, sentences
from tests.expert_parallel.hugging_face_models import BALANCED
from tests.expert_parallel.routed import Block
from tests.expert_parallel.test_training import mixture
from tests.pipeline_parallel.test_lightning import table_in, without_steps
from tests.pipeline_parallel.test_sharing import ONE, TRAINER, close
from tests.pipeline_parallel.whole_runs import Model, whole_run
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, apart, fit
from tests.trainers import quiet


def _trainer(plugins: tuple[Any, ...], world: int, **arguments: Any) -> L.Trainer:
    strategy = {"strategy": FiveD(*plugins)} if plugins else {}
    return quiet(devices=world, use_distributed_sampler=False, **strategy, **arguments)


def _everything(rank: int, plugins: tuple[Any, ...], world: int, folder: str) -> dict[str, Any]:
    module = Model(plateau=True)
    torch.manual_seed(5)
    module.layers = nn.ModuleList(Block(4, 2) for _ in range(2))
    return whole_run(module, partial(_trainer, plugins, world), folder, rank, world)


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """What one process shows, and its log."""
    folder = tmp_path_factory.mktemp("one")
    return rank_pool(1, _everything, (), 1, str(folder), **ONE)[0], table_in(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_shows_what_one_process_shows(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Any], stage: int
) -> None:
    expected, table = one
    assert 1 < expected["epochs"] < 8, "one process stops early"
    found = ranks(2, _everything, (ExpertParallel(2), ZeRO(stage=stage)), 2, str(tmp_path), **TRAINER)
    agreed = ["epochs", "steps", "stopped", "best", "kept", "files", "bar", "rates", "validate", "test"]
    for each in found:
        close({name: each[name] for name in agreed}, {name: expected[name] for name in agreed})
    close(without_steps(table_in(tmp_path)), without_steps(table))
    for loader, batches in enumerate(expected["predict"]):
        for number, batch in enumerate(batches):
            parts = [each["predict"][loader][number]["logits"] for each in found]
            close([*parts[0], *parts[1]], batch["logits"])


def _fit_each(rank: int, runs: Mapping[str, Any], strategy: Any, **arguments: Any) -> list[Any]:
    """Several runs in one call of the pool: most of a short run's time is its start."""
    common: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 1, **arguments}
    return [fit(rank, module, data, strategy, **common) for module, data in runs.values()]


def _named(*names: str) -> dict[str, Any]:
    return {name: {**RUNS, **TWICE}[name] for name in names}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("plugins", "world", "runs"),
    [
        ((ExpertParallel(2),), 2, {**RUNS, **TWICE, **COMPILED}),
        ((ExpertParallel(2), ZeRO(stage=3)), 4, _named("frozen experts", "twice")),
        ((ExpertParallel(4), TensorParallel(2)), 4, _named("only routers", "Mixtral again")),
        ((ExpertParallel(2), ContextParallel(2)), 2, _named("Mixtral plain", "only routers")),
    ],
    ids=["ep2", "ep2+zero3", "ep4+tp2", "ep2+cp2"],
)
def test_adapted_models_train_as_in_one_process(
    ranks: RankPool, plugins: Sequence[Parallelism], world: int, runs: Mapping[str, Any]
) -> None:
    call = partial(_fit_each, runs=runs)
    found = ranks(world, partial(call, strategy=partial(FiveD, *plugins), devices=world), **SEPARATE)
    for index, (name, expected) in enumerate(zip(runs, call(0, strategy=None), strict=True)):
        differences = apart([each[index] for each in found], expected, 1e-6)
        # The library computes losses and scores of routers in single precision.
        tolerance = 1e-5 if name.startswith(("Mixtral", "Qwen")) else 1e-10
        assert max(differences.values()) < tolerance, (name, differences)


class Predicting(LanguageModel):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return _logits(self, batch["input_ids"])


def _logits(module: LanguageModel, ids: Tensor) -> Tensor:
    found: Tensor | tuple[Tensor, Any] = module.decoder(ids)
    return found[0] if isinstance(found, tuple) else found


def _predicting() -> Predicting:
    torch.manual_seed(0)
    return Predicting(decoder=mixture(shared=1)().hparams["decoder"])


def _generated(module: Any) -> list[list[int]]:
    if isinstance(module, LanguageModel):
        found = module.decoder.generate(torch.tensor([[1, 2, 3]]), 5, temperature=0)
    else:
        found = module.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)
    return found.tolist()  # type: ignore[no-any-return]


def _around(rank: int, world: int) -> dict[str, Any]:
    """What people do besides training, in `world` ranks, or in one process without a strategy."""
    seen: dict[str, Any] = {}

    def trainer(**arguments: Any) -> L.Trainer:
        chosen = {"strategy": FiveD(ExpertParallel(2), timeout=30)} if world > 1 else {}
        return quiet(devices=world, use_distributed_sampler=False, **chosen, **arguments)

    for name, make, data in (
        ("own", mixture(shared=1), rows),
        ("Mixtral", partial(Spreading, "Mixtral", **BALANCED), sentences),
    ):
        module, meter = make(), Throughput()
        made = trainer(callbacks=[meter], log_every_n_steps=1, max_steps=3)
        made.fit(module, datamodule=data())
        if world == 1:
            seen[name] = _generated(module)
        else:
            with made.strategy.unsharded():  # type: ignore[attr-defined]
                seen[name] = _generated(module) if rank == 0 else None
                everyone = _generated(module)
            assert rank or everyone == seen[name]
            seen[f"{name} text"] = made.strategy.describe()  # type: ignore[attr-defined]
        made.fit_loop.epoch_loop.max_steps = 5
        made.fit(module, datamodule=data())  # goes on
        seen[f"{name} steps"] = made.global_step
        metrics = made.validate(module, datamodule=data(), verbose=False)[0]
        seen[f"{name} val"] = metrics.get("val_loss", metrics.get("loss"))
    # Other numbers of batches, and of rows, on each rank; before that nothing has been fitted.
    data_of = [[0, 1, 2, 3, 4], [5]] if world > 1 else [[0, 1, 2, 3, 4, 5]]
    loader = DataLoader(Subset(Rows(6, 5), data_of[rank]), 2)
    seen["predict"] = torch.cat(trainer().predict(_predicting(), loader)).tolist()  # type: ignore[arg-type]
    tuned: Any = Spreading("Mixtral")
    tuned.lr = 0.1
    tuned.configure_optimizers = lambda: torch.optim.SGD(tuned.parameters(), lr=tuned.lr)
    found: Any = Tuner(trainer()).lr_find(tuned, datamodule=sentences(96), num_training=12, update_attr=False)
    seen["rates"] = [round(loss, 4) for loss in found.results["loss"]]
    return seen


@pytest.mark.timeout(400)
def test_what_people_do_around_training(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the tuner keeps a file in the working folder
    first, second = ranks(2, _around, 2, **SEPARATE)
    expected = _around(0, 1)
    close(first["predict"] + second["predict"], expected.pop("predict"))
    assert first["rates"] == second["rates"]
    expected.pop("rates")
    # Logged by each rank for itself, as it asks for nothing else.
    first["Mixtral val"] = (first["Mixtral val"] + second["Mixtral val"]) / 2
    close({name: first[name] for name in expected}, expected)
    assert "rank 1  experts 2-3" in first["own text"]
    assert "model.model.layers.*.mlp.experts (2)" in first["Mixtral text"]


class _Summary(L.Callback):
    """What is said of a module's size while its experts are spread."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for depth in (1, -1):
            summary = ModelSummary(module, max_depth=depth)
            self.found.append([*zip(summary.layer_names, summary.param_nums, strict=True), summary.total_parameters])


def _little(rank: int, world: int) -> dict[str, Any]:
    """Runs on three rows, which two ranks do not divide: the first one is then there twice."""
    seen: dict[str, Any] = {}
    three, summary = [0, 1, 2] if world > 1 else [0, 1, 2, 0], _Summary()

    def trainer(**arguments: Any) -> L.Trainer:
        chosen = {"strategy": FiveD(ExpertParallel(2), timeout=30)} if world > 1 else {}
        return quiet(devices=world, **{"use_distributed_sampler": False, **chosen, **arguments})

    bar = {"enable_progress_bar": True, "callbacks": [summary, RichProgressBar()]}
    for name, rows_of, options in (
        ("fit", three, {"max_epochs": 2, **bar}),
        ("limits", range(12), {"limit_val_batches": 1, "limit_train_batches": 0.5, "max_epochs": 2}),
    ):
        made = trainer(**options)  # type: ignore[arg-type]
        made.fit(mixture()(), datamodule=Dealt(Subset(Rows(12, 5), rows_of), 4))
        seen[name] = [made.global_step, float(made.callback_metrics["val_loss"])]
    made = trainer(use_distributed_sampler=True, overfit_batches=1, max_epochs=2)
    loader = DataLoader(Rows(12, 5), 4 // world)
    made.fit(mixture()(), loader, loader)
    seen["overfit"] = [made.global_step, float(made.callback_metrics["val_loss"])]
    # And nothing has been fitted before.
    seen["validate"] = trainer().validate(mixture()(), datamodule=Dealt(Subset(Rows(8, 5), three), 4), verbose=False)
    seen["summary"] = summary.found
    if world > 1:
        with pytest.raises(Exception, match="has 1 samples for 2 data ranks"):
            trainer(use_distributed_sampler=True).fit(mixture()(), DataLoader(Rows(1, 5), 2))
    return seen


def test_little_data_and_few_batches(ranks: RankPool) -> None:
    expected = _little(0, 1)
    for found in ranks(2, _little, 2, **SEPARATE):
        close(found, expected)
