"""Training under FiveD equals training in one process."""

from typing import Any

import pytest
import torch

from lightning_5d import FiveD, ZeRO
from lightning_5d.comparison import Recording, compare
from lightning_5d.verify import Parity, verify
from tests.modules import TinyLM, batches
from tests.ranks.pool import RankPool

SEPARATE = {"backend": None, "timeout": 50.0}


def _verify(rank: int, ranks: int, plugin: ZeRO | None, module: Any, accumulate: int, clip: float | None) -> Parity:
    strategy = FiveD(plugin) if plugin else FiveD()
    data = batches(3 * ranks * accumulate)
    return verify(module(), data, strategy, devices=ranks, accumulate_grad_batches=accumulate, gradient_clip_val=clip)


def tiny() -> TinyLM:
    return TinyLM()


def tied() -> TinyLM:
    return TinyLM(tied=True)


def check(results: list[Parity]) -> None:
    assert results[0].passed, "\n" + results[0].table()
    assert all(result == results[0] for result in results)
    assert results[0].notes == ()
    assert {row.quantity for row in results[0].rows} == {"loss", "gradient norm", "gradient", "parameter"}


# The product of all three is that of the engine without a Trainer, in tests/data_parallel/test_parity.py.
@pytest.mark.parametrize(
    ("world", "stage", "accumulate"),
    [(world, stage, 3 if (world + stage) % 2 else 1) for world in (1, 2, 3, 4) for stage in (0, 1, 2, 3)],
)
def test_every_stage_equals_one_process(ranks: RankPool, world: int, stage: int, accumulate: int) -> None:
    check(ranks(world, _verify, world, ZeRO(stage=stage), tiny, accumulate, 0.5, **SEPARATE))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_equals_one_process(ranks: RankPool, stage: int) -> None:
    check(ranks(4, _verify, 4, ZeRO(stage=stage, replicate=2), tiny, 2, 0.5, **SEPARATE))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_weights_equal_one_process(ranks: RankPool, stage: int) -> None:
    check(ranks(2, _verify, 2, ZeRO(stage=stage), tied, 1, None, **SEPARATE))


def test_no_plugin_is_plain_data_parallel(ranks: RankPool) -> None:
    check(ranks(2, _verify, 2, None, tiny, 1, None, **SEPARATE))


class _Biased(TinyLM):
    """Its gradients depend on the rank: what a fault in the reduction looks like."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1.0 + 0.01 * self.global_rank)


def test_verify_notices_a_wrong_gradient(ranks: RankPool) -> None:
    results = ranks(2, _verify, 2, ZeRO(stage=1), _Biased, 1, None, **SEPARATE)
    assert not results[0].passed
    assert "FAIL" in results[0].table()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_trains_like_one_process(ranks: RankPool, stage: int) -> None:
    check(ranks(2, _verify, 2, ZeRO(stage=stage, offload="cpu"), tiny, 2, 0.5, **SEPARATE))


class Convolutional(TinyLM):
    """A bias before batch normalization: its gradient is zero but for rounding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(layers=0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(8, 3),
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch[:, :6].float()).pow(2).mean() + 0.0 * super().loss(batch)


def _noisy(rank: int, dropout: float) -> Parity:
    data = batches(8, size=4)
    return verify(Convolutional(dropout), data, FiveD(ZeRO(stage=3)), devices=2)


def test_a_gradient_that_is_only_rounding_does_not_fail_a_right_run(ranks: RankPool) -> None:
    result = ranks(2, _noisy, 0.0, **SEPARATE)[0]
    assert result.passed, "\n" + result.table()
    assert "net.0.bias" in result.table()
    assert "not judged" in result.table()


def test_dropout_is_named_where_it_makes_a_comparison_fail(ranks: RankPool) -> None:
    result = ranks(2, _noisy, 0.5, **SEPARATE)[0]
    assert not result.passed
    assert "Dropout draws other numbers" in result.table()


def _recording(keys: float, weight: float) -> Recording:
    """Of a fused bias: the last element is the keys', whose gradient is what rounding leaves."""
    gradients = {"bias": torch.tensor([1.0, weight, keys])}
    # One step of Adam: every element moves by its gradient's sign.
    return Recording([1.0], [1.0], [gradients], {"bias": 0.1 - 1e-3 * gradients["bias"].sign()})


@pytest.mark.parametrize(
    ("keys", "weight", "passed"),
    [(-2e-9, 0.5, True), (3e-9, 0.5, True), (1e-9, -0.5, False)],
    ids=["sign of rounding", "size of rounding", "sign of a gradient"],
)
def test_elements_whose_gradient_is_rounding_are_not_judged(keys: float, weight: float, passed: bool) -> None:
    rows = {row.quantity: row for row in compare(_recording(2e-9, 0.5), _recording(keys, weight), 1e-5)}

    assert rows["parameter"].passed is passed


def test_small_gradients_that_agree_are_judged() -> None:
    one, other = _recording(1e-7, 0.5), _recording(1e-7, 0.5)
    other.parameters["bias"][2] += 1e-3

    assert not {row.quantity: row for row in compare(one, other, 1e-5)}["parameter"].passed


def _one_step(gradient: list[float], parameter: list[float]) -> Recording:
    tensors = [{"w": torch.tensor(values, dtype=torch.float64)} for values in (gradient, parameter)]
    return Recording([1.0], [1.0], [tensors[0]], tensors[1])


@pytest.mark.parametrize(
    ("ours", "theirs", "gradient_passes", "parameter_passes"),
    [
        (1e-8, 2e-8, True, True),  # two orders of summation
        (1e-2, 1.0001e-2, True, False),  # the same but for a ten-thousandth: that is no reason to end elsewhere
        (1e-2, 1.1e-2, False, False),
    ],
)
def test_an_element_that_ends_elsewhere_passes_only_by_the_rounding_of_its_gradient(
    ours: float, theirs: float, gradient_passes: bool, parameter_passes: bool
) -> None:
    expected, found = _one_step([1.0, ours], [1.0, 0.5]), _one_step([1.0, theirs], [1.0, 0.5001])
    rows = {row.quantity: row for row in compare(expected, found, 1e-5)}
    assert rows["gradient"].passed == gradient_passes
    assert rows["parameter"].passed == parameter_passes
