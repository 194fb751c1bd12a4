"""A wrong setting gets one error before training starts: everything at once, with the numbers and what would work."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_5d import FiveD, ParallelPlan, ZeRO
from tests.modules import TinyLM, Tokens, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet, zero

TRAINER = {"backend": None, "timeout": 50.0}


@pytest.mark.parametrize(
    ("plugin", "devices", "words"),
    [
        (ZeRO(stage=4), 2, ["stage=4", "Use 0, 1, 2 or 3"]),
        (ZeRO(stage=-1), 2, ["stage=-1", "Use 0, 1, 2 or 3"]),
        (ZeRO(replicate=3), 4, ["4 ranks cannot be divided by dp_replicate=3", "2 works with 4 ranks", "6 ranks"]),
        (ZeRO(replicate=0), 2, ["replicate=0", "at least 1"]),
        (ZeRO(size=0), 2, ["size=0", "at least 1"]),
        (ZeRO(size=-2), 2, ["size=-2", "at least 1"]),
        (ZeRO(size=3), 2, ["make 3 ranks, but the run has 2", "devices x num_nodes = 3"]),
        (ZeRO(size=6, replicate=4), 6, ["4 does not divide 6", "replicate=3 does"]),
        (ZeRO(stage=0, offload="cpu"), 2, ["stage 0 shards nothing", "Use stage 1, 2 or 3"]),
        (ZeRO(offload="disk"), 2, ["offload='disk'", "none, cpu"]),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_size_or_option_is_refused_when_the_trainer_is_made(
    plugin: ZeRO, devices: int, words: list[str]
) -> None:
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(plugin), devices=devices)
    for word in words:
        assert word in str(error.value)


class Int8Precision(Precision):
    """A plugin of someone else's."""

    precision = "int8-training"  # type: ignore[assignment]


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(ZeRO(stage=7, replicate=3, offload="disk")), devices=4, plugins=Int8Precision())  # type: ignore[arg-type]
    text = str(error.value)
    assert text.startswith("4 settings do not work:")
    assert [line.split(".")[0].strip() for line in text.splitlines()[1:]] == ["1", "2", "3", "4"]
    for word in ("stage=7", "dp_replicate=3", "offload='disk'", "int8"):
        assert word in text


def test_two_plugins_of_one_axis_a_stranger_and_unknown_words_are_refused() -> None:
    with pytest.raises(MisconfigurationException) as error:
        FiveD(ZeRO(1), "zero", ZeRO(2), start_method="thread", timeout=-1)  # type: ignore[arg-type]
    text = str(error.value)
    for word in ("'zero' is not a parallelism", "The data axis has 2 plugins", "start_method='thread'", "timeout=-1"):
        assert word in text


def test_an_unknown_strategy_name_is_refused_and_ours_are_registered() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    with pytest.raises(ValueError, match="fived_zero9"):
        quiet(strategy="fived_zero9", devices=2)
    for name, stage in (("fived", 0), ("fived_zero1", 1), ("fived_zero2", 2), ("fived_zero3", 3)):
        assert name in StrategyRegistry.available_strategies()
        strategy = quiet(strategy=name, devices=2).strategy
        assert isinstance(strategy, FiveD)
        assert strategy.plugins[0] == ZeRO(stage=stage)


def test_a_strategy_object_serves_one_trainer() -> None:
    strategy = FiveD(ZeRO())
    quiet(strategy=strategy, devices=2)
    with pytest.raises(MisconfigurationException, match="already belongs to another Trainer"):
        quiet(strategy=strategy, devices=2)


def test_a_plugin_may_be_shared() -> None:
    plugin = ZeRO()
    for _ in range(2):
        quiet(strategy=FiveD(plugin), devices=2)


class Empty(L.LightningModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.float().sum()

    def configure_optimizers(self) -> Any:
        return None


def _fit(rank: int, ranks: int, module: type[L.LightningModule], count: int, arguments: dict[str, Any]) -> None:
    zero(1, ranks).fit(module(), loader(count, **arguments))


def test_a_module_without_parameters_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Empty has no parameters, so there is nothing to train"):
        ranks(2, _fit, 2, Empty, 8, {}, **TRAINER)


def test_a_data_set_smaller_than_the_ranks_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"The data set has 3 samples for 4 data ranks. Give it at least 4"):
        ranks(4, _fit, 4, TinyLM, 3, {}, **TRAINER)


def test_a_loader_without_a_batch_is_refused(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"no batch on some ranks .*5 samples, batch size 4, 2 data ranks, drop_last=True"
    ):
        ranks(2, _fit, 2, TinyLM, 5, {"batch_size": 4, "drop_last": True}, **TRAINER)


def _twice(rank: int) -> None:
    module = TinyLM()
    zero(1, 2).fit(module, loader(8))
    zero(1, 2).fit(module, loader(8))


def test_a_module_that_another_trainer_has_sharded_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="already sharded"):
        ranks(2, _twice, **TRAINER)


def _planned(rank: int) -> None:
    trainer = quiet(strategy=FiveD(ZeRO(1), plan=ParallelPlan(("layers.*", "decoder.*"))), devices=2)
    trainer.fit(TinyLM(), loader(8))


def test_a_plan_that_matches_nothing_is_named_with_what_there_is(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"blocks that the module does not have: decoder\.\*.*Lists in the module: layers\.\*"
    ):
        ranks(2, _planned, **TRAINER)


class NoLoss(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if self.global_rank == 1 and batch_idx == 1 else super().training_step(batch, batch_idx)


def _none(rank: int) -> None:
    zero(1, 2).fit(NoLoss(), DataLoader(Tokens(8), batch_size=2))


def test_a_step_that_returns_none_on_one_rank_ends_the_job(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="training_step returned None on rank 1 of 2"):
        ranks(2, _none, **TRAINER)


def test_world_sizes_that_disagree_are_named(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"product \(3 \* 1\) does not match the world size \(2\)"):
        ranks(2, _three_devices, timeout=50.0)


def _three_devices(rank: int) -> None:
    assert torch.distributed.get_world_size() == 2
    zero(1, 3).fit(TinyLM(), loader(8))
