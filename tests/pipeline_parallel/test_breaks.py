"""Found by trying to break a pipeline: numbers of one process, or one clear error, never a wait."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_5d import FiveD, PipelineParallel
from lightning_5d.launch.failure import is_lost_peer
from lightning_5d.pipeline_parallel.compatibility import callback_problems, split_optimizer_problems
from tests.modules import Block, TinyLM, loader
from tests.pipeline_parallel.recorded import fit, fit_alone, rows, worst
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import plain, quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 40.0}


def _compare(ranks: RankPool, module: Any, schedule: str = "1f1b", **arguments: Any) -> None:
    strategy = partial(FiveD, PipelineParallel(2, schedule=schedule, microbatches=4, split="blocks"))
    data = partial(rows, 32, 8)
    found = ranks(2, partial(fit, module=module, data=data, strategy=strategy, ranks=2, **arguments), **TRAINER)
    differences = worst(found, fit_alone(module, data, **arguments))
    assert max(differences.values()) < 1e-5, differences


class Nested(Block):
    def forward(self, x: Any) -> Any:
        hidden, extra, nothing = x
        return super().forward(hidden), {"count": extra["count"] + 1, "name": "constant"}, nothing


class NestedLM(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested(8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x: Any = (self.embed(ids), {"count": torch.zeros(len(ids), 1, 1), "name": "constant"}, None)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x[0] * x[1]["count"])
        return logits


def test_blocks_may_return_a_nest_of_tensors_and_constants(ranks: RankPool) -> None:
    _compare(ranks, NestedLM)


class Lbfgs(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def _fit(rank: int, module: Any, *callbacks: Any) -> dict[str, float]:
    strategy = FiveD(PipelineParallel(2, microbatches=4, split="blocks"))
    trainer = quiet(strategy=strategy, devices=2, callbacks=list(callbacks), use_distributed_sampler=False)
    trainer.fit(module(), loader(16, 8))
    return plain(trainer.callback_metrics)


def test_lbfgs_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="LBFGS works on all gradients as one vector, and each stage has only its own"):
        ranks(2, _fit, partial(Lbfgs, layers=4), **TRAINER)
    assert split_optimizer_problems([torch.optim.SGD([nn.Parameter(torch.zeros(1))])]) == []


def test_averages_of_whole_weights_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="WeightAveraging copies the whole module before it is cut"):
        ranks(2, _fit, partial(TinyLM, layers=4), WeightAveraging(), **TRAINER)


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(swa_lrs=0.1), BackboneFinetuning()])
def test_callbacks_that_need_all_weights_are_named(callback: L.Callback) -> None:
    module = TinyLM()
    module.trainer = quiet(callbacks=[callback])
    (problem,) = callback_problems(module)
    assert type(callback).__name__ in problem.what


def test_a_peer_that_is_gone_is_not_the_reason() -> None:
    assert is_lost_peer(RuntimeError("Rank 1 of the pipeline is gone: it ended"))
    assert not is_lost_peer(RuntimeError("a pipeline is gone"))


class Detached(TinyLM):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number == 3 else x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_weights_without_gradient_behind_a_detach_are_left_alone(ranks: RankPool, schedule: str) -> None:
    _compare(ranks, partial(Detached, layers=4), schedule=schedule)


class LoggingBlock(Block):
    def __init__(self, number: int, owner: Any) -> None:
        super().__init__(8)
        self.number, self.owner = number, [owner]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.owner[0].log(f"mean{self.number}", y.mean(), batch_size=len(y))
        return y


class LoggingLM(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoggingBlock(number, self) for number in range(4))


def test_what_blocks_log_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="'mean0', 'mean1' was logged before the last stage, inside of a block"):
        ranks(2, _fit, LoggingLM, **TRAINER)


class TorchClipped(TinyLM):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def test_clipping_by_torch_equals_one_process(ranks: RankPool) -> None:
    _compare(ranks, partial(TorchClipped, layers=4))


def _two_trainers(rank: int) -> None:
    module = TinyLM(layers=4)
    for _ in range(2):
        strategy = FiveD(PipelineParallel(2, microbatches=4, split="blocks"))
        quiet(strategy=strategy, devices=2, use_distributed_sampler=False).fit(module, loader(16, 8))


def test_a_module_that_is_cut_already_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="already sharded, or cut into stages, by another Trainer"):
        ranks(2, _two_trainers, **TRAINER)


class ByRow(TinyLM):
    """Averages one value per row, in batches whose last one has a single row for each microbatch."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.mean = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean(self(batch[:, :-1]).mean((1, 2)))
        self.log("mean", self.mean)


def _validate(rank: int, strategy: Any, devices: int) -> list[float]:
    trainer = quiet(strategy=strategy(), devices=devices, use_distributed_sampler=False)
    (metrics,) = trainer.validate(ByRow(), loader(10, 8), verbose=False)
    return [metrics["mean"]]


def test_a_mean_over_rows_counts_each_row_once(ranks: RankPool) -> None:
    pipeline = PipelineParallel(2, microbatches=3, split="blocks")
    for (found,) in ranks(2, _validate, partial(FiveD, pipeline), 2, **TRAINER):
        assert found == pytest.approx(_validate(0, lambda: "auto", 1)[0], rel=1e-5)


class Thawing(TinyLM):
    """Its first stage is frozen in the first epoch, and trained from the second one on."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self._train_start(False)

    def _train_start(self, trained: bool) -> None:
        for start in (self.embed, self.layers[0], self.layers[1]):
            start.requires_grad_(trained)

    def on_train_epoch_start(self) -> None:
        self._train_start(self.current_epoch > 0)


def test_a_stage_that_is_thawed_when_an_epoch_starts_gets_gradients(ranks: RankPool) -> None:
    _compare(ranks, Thawing, max_epochs=2)


class Unpicklable(TinyLM):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"logits": self(batch), "later": lambda: None}


def _predict(rank: int) -> Any:
    trainer = quiet(strategy=FiveD(PipelineParallel(2, microbatches=1, split="blocks")), devices=2)
    return trainer.predict(Unpicklable(layers=4), loader(4, 4))


def test_an_output_that_cannot_be_sent_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, _predict, **TRAINER)
    assert "What a step returned or logged cannot be sent to the other stages" in str(caught.value)
    assert "UnboundLocalError" not in str(caught.value)
