"""Loads are those of all tokens of a step, once each, and the same numbers on all ranks."""

import json
import pickle
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.callbacks import ExpertLoad
from tests.expert_parallel.routed import Routed
from tests.modules import TinyLM, Tokens, loader
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import Dealt, Rows, decoder
from tests.trainers import plain, quiet

SEPARATE: dict[str, Any] = {"backend": None, "timeout": 50.0}
A, B = "layers.0.experts", "layers.1.experts"


def fit(callback: ExpertLoad, module: L.LightningModule, data: Any = None, **settings: Any) -> L.Trainer:
    trainer = quiet(callbacks=[callback], **{"default_root_dir": callback.dirpath, **settings})
    trainer.fit(module, *(data or (loader(12),)))
    return trainer


def tokens(callback: ExpertLoad, layer: str) -> list[list[int]]:
    assert callback.history is not None
    return callback.history.series(layer).tokens_E.long().tolist()


def test_a_step_is_all_its_microbatches_and_no_validation(tmp_path) -> None:
    callback, module = ExpertLoad(dirpath=tmp_path, chart=False), Routed()
    data = loader(24), loader(4)
    trainer = fit(callback, module, data, accumulate_grad_batches=3, val_check_interval=3, num_sanity_val_steps=1)
    assert trainer.global_step == 4
    for layer, name in enumerate((A, B)):
        expected = [module.chosen(layer, slice(3 * step, 3 * step + 3)) for step in range(4)]
        assert tokens(callback, name) == expected
        assert sum(expected[0]) == 3 * 2 * 6 * 2  # microbatches, rows, tokens, experts
    last = [module.chosen(layer, slice(9, 12)) for layer in range(2)]
    imbalance = [max(counts) * len(counts) / sum(counts) for counts in last]
    logged = plain(trainer.callback_metrics)
    assert logged[f"expert_load/{A}/imbalance"] == pytest.approx(imbalance[0])
    assert logged[f"expert_load/{B}/imbalance"] == pytest.approx(imbalance[1])
    assert logged["expert_load/imbalance"] == pytest.approx(sum(imbalance) / 2)
    assert logged["expert_load/imbalance_worst"] == pytest.approx(max(imbalance))
    assert logged["expert_load/bias_spread"] == 1.0
    assert logged["expert_load/dropped"] == logged["expert_load/dropped_worst"] == 0.0


@pytest.mark.parametrize("mode", ["full", "selective", 0.5, "reentrant", "non-reentrant"])
def test_recomputation_and_what_it_measures_count_nothing(tmp_path, mode: Any) -> None:
    callback, module = ExpertLoad(dirpath=tmp_path, chart=False), Routed()
    own = mode in ("reentrant", "non-reentrant")
    for block in module.layers if own else ():
        block.again = mode
    strategy = FiveD(activation_checkpointing=None if own else mode)
    fit(callback, module, strategy=strategy, devices=1, max_steps=2)
    runs = len(module.layers[0].seen)
    assert runs > 2
    assert [sum(step) for step in tokens(callback, A)] == [2 * 6 * 2] * 2


class Deal(L.LightningDataModule):
    """Rows dealt out in order, so that data ranks together read what one process reads."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        rows = Tokens(24)
        sampler: Any = DistributedSampler(rows, shuffle=False, **place)
        return DataLoader(rows, batch_size=4 // place["num_replicas"], sampler=sampler)


class Skips(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 1:
            trainer.strategy.skip_step("a test")


def trained(rank: int, folder: str, plugins: list[Any] | None = None, world: int = 1, **settings: Any) -> Any:
    callback = ExpertLoad(dirpath=f"{folder}/{rank}", chart=False)
    chosen = {"strategy": "auto" if plugins is None else FiveD(*plugins), "devices": world}
    callbacks = [callback] if plugins is None else [callback, Skips()]
    trainer = quiet(callbacks=callbacks, use_distributed_sampler=False, **chosen, **settings)
    trainer.fit(Routed(), datamodule=Deal())
    metrics = {name: value for name, value in plain(trainer.callback_metrics).items() if name.startswith("expert_load")}
    return {"loads": [tokens(callback, name) for name in (A, B)], "metrics": metrics, "files": len(callback.files)}


@pytest.mark.parametrize(
    ("world", "plugins"),
    [
        (2, [ZeRO(stage=1)]),
        (2, [ExpertParallel(2), ZeRO(stage=1)]),
        (2, [PipelineParallel(2, microbatches=2)]),
        (4, [ExpertParallel(2), ContextParallel(2), ZeRO(stage=1)]),
    ],
    ids=["data", "experts", "pipeline", "experts and context"],
)
def test_every_rank_has_the_numbers_of_one_process(ranks: RankPool, tmp_path, world: int, plugins: list[Any]) -> None:
    expected = trained(0, str(tmp_path / "one"), accumulate_grad_batches=2)
    found = ranks(world, trained, str(tmp_path), plugins, world, accumulate_grad_batches=2, **SEPARATE)
    assert len(expected["loads"][0]) == 3
    for rank in found:
        assert rank["loads"] == expected["loads"]
        assert rank["metrics"] == pytest.approx(expected["metrics"])
        assert rank["metrics"] == found[0]["metrics"]
    assert [rank["files"] for rank in found] == [2] + [0] * (world - 1)


def _limited(rank: int, folder: str, size: int, plugins: list[Any], world: int) -> Any:
    callback = ExpertLoad(dirpath=f"{folder}/{rank}", chart=False)
    strategy = FiveD(ExpertParallel(size, capacity_factor=0.75), *plugins)
    trainer = quiet(strategy=strategy, devices=world, callbacks=[callback], use_distributed_sampler=False)
    moe = {"experts": 4, "top_k": 2, "intermediate_size": 8, "shared": 1, "bias_rate": 0.1}
    trainer.fit(decoder(moe=moe)(), datamodule=Dealt(Rows(16, 7), 4))
    assert callback.history is not None
    loads = [
        {name: (load.tokens_E.tolist(), load.dropped_E.tolist()) for name, load in column.loads.items()}
        for column in callback.history.columns
    ]
    return loads, plain(trainer.callback_metrics)["expert_load/dropped"]


@pytest.mark.parametrize(
    ("world", "size", "plugins"),
    [
        (2, 2, [ContextParallel(2)]),
        (2, 2, [TensorParallel(2, sequence_parallel=True)]),
        (4, 4, [TensorParallel(2), ContextParallel(2)]),
        (4, 2, [PipelineParallel(2, microbatches=1), TensorParallel(2)]),
    ],
    ids=["context", "sequence", "tensor and context", "pipeline"],
)
def test_what_experts_have_no_room_for_is_logged_alike_by_all_ranks(
    ranks: RankPool, tmp_path, world: int, size: int, plugins: list[Any]
) -> None:
    ((expected, share),) = ranks(1, _limited, str(tmp_path / "one"), 1, [], 1, **SEPARATE)
    assert len(expected) == 4
    for step in expected:
        for chosen, dropped in step.values():
            # Of 28 tokens with two choices each expert takes 11.
            assert dropped == [max(0.0, count - 11) for count in chosen]
    last = [numbers for of_layer in expected[-1].values() for numbers in zip(*of_layer, strict=True)]
    assert share == pytest.approx(sum(dropped for _, dropped in last) / sum(chosen for chosen, _ in last))
    assert share > 0
    for loads, logged in ranks(world, _limited, str(tmp_path), size, plugins, world, **SEPARATE):
        assert loads == expected
        assert logged == pytest.approx(share)


def test_a_reading_of_several_steps_is_their_sum_and_reaches_loggers_at_its_own_pace(tmp_path) -> None:
    callback, module = ExpertLoad(every_n_steps=4, dirpath=tmp_path, chart=False), Routed()
    fit(callback, module, logger=CSVLogger(tmp_path, name="", version="csv"), log_every_n_steps=50)
    assert tokens(callback, A) == [module.chosen(0, slice(0, 4)), module.chosen(0, slice(4, 6))]
    rows = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[rows[0].split(",").index("step")] for row in rows[1:]] == ["3"]


def test_a_resumed_run_goes_on_with_the_history(tmp_path) -> None:
    first, module = ExpertLoad(dirpath=tmp_path), Routed()
    fit(first, module, max_steps=4).save_checkpoint(tmp_path / "four.ckpt")
    second, module = ExpertLoad(dirpath=tmp_path), Routed()
    trainer = quiet(callbacks=[second], max_epochs=2)
    trainer.fit(module, loader(12), ckpt_path=tmp_path / "four.ckpt")
    assert second.history is not None
    assert trainer.global_step > 4
    assert [column.last for column in second.history.columns] == list(range(1, trainer.global_step + 1))
    assert tokens(second, B)[:4] == tokens(first, B)
    assert (tmp_path / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "expert_load.json").read_text())["steps"][-1] == [trainer.global_step] * 2


def test_files_are_there_while_it_runs_and_when_it_fails(tmp_path) -> None:
    there: list[int] = []

    class Fails(Routed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            path = tmp_path / "expert_load.json"
            there.append(len(json.loads(path.read_text())["steps"]) if path.exists() else 0)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                raise RuntimeError("no")
            return super().training_step(batch, batch_idx)

    callback = ExpertLoad(dirpath=tmp_path, chart=False, write_every_n_steps=2)
    with pytest.raises(RuntimeError, match="no"):
        fit(callback, Fails())
    assert there == [0, 2, 2, 4, 4]
    assert len(json.loads((tmp_path / "expert_load.json").read_text())["steps"]) == 5


def test_nothing_stays_on_the_module(tmp_path) -> None:
    callback, module = ExpertLoad(dirpath=tmp_path, chart=False), Routed()
    fit(callback, module)
    assert not module.layers[0].experts._forward_pre_hooks
    pickle.loads(pickle.dumps(callback))


@pytest.mark.parametrize("strategy", ["auto", "fived"])
def test_a_model_without_experts_is_refused_before_training(tmp_path, strategy: str) -> None:
    with pytest.raises(MisconfigurationException, match="TinyLM has no experts whose tokens could be counted"):
        fit(ExpertLoad(dirpath=tmp_path), TinyLM(), strategy=strategy, devices=1)

    class Late(L.LightningModule):
        def configure_model(self) -> None:
            self.line = torch.nn.Linear(2, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise AssertionError

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(MisconfigurationException, match="Late has no experts"):
        fit(ExpertLoad(dirpath=tmp_path), Late(), strategy=strategy, devices=1)


def test_wrong_settings_are_refused_together() -> None:
    with pytest.raises(MisconfigurationException) as error:
        ExpertLoad(every_n_steps=0, write_every_n_steps=2.5, columns=1)  # type: ignore[arg-type]
    for said in ("every_n_steps=0", "write_every_n_steps=2.5", "columns=1 must be a whole number of at least 2"):
        assert said in str(error.value)
