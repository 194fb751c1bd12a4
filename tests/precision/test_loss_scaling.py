"""The scale grows, shrinks and stops as its settings say, and no gradient is divided by it twice."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_5d.loss_scaling import LossScaler, LossScaling
from lightning_5d.skipped_steps import SkippedStep, SkippedSteps


def _scales(settings: LossScaling, overflows: str) -> list[float]:
    """The scale after each step of a word: ``.`` is a good step, ``x`` an overflow."""
    scaler = LossScaler(settings)
    found = []
    for letter in overflows:
        scaler.update(letter == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("settings", "steps", "scales"),
    [
        (LossScaling(16.0), "xx.", [8, 4, 4]),
        (LossScaling(16.0, growth_interval=2), "..x..", [16, 32, 16, 16, 32]),
        (LossScaling(16.0, growth_interval=3), "..x...", [16, 16, 8, 8, 8, 16]),
        (LossScaling(4.0, min_scale=1.0), "xxxx", [2, 1, 1, 1]),
        (LossScaling(16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1), ".x", [64, 16]),
        (LossScaling(16.0, hysteresis=2), "x.xx", [16, 16, 8, 4]),
        (LossScaling(16.0, hysteresis=2, growth_interval=1), "xx.xx", [16, 8, 16, 16, 8]),
        (LossScaling(2.0**127, growth_interval=1), "..", [2.0**127, 2.0**127]),
    ],
)
def test_the_scale_follows_its_rules(settings: LossScaling, steps: str, scales: list[float]) -> None:
    assert _scales(settings, steps) == scales


def test_the_scale_follows_torchs_own_scaler() -> None:
    steps = ".....x..x........xx.....x..........."
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for letter in steps:
        optimizer.zero_grad()
        theirs.scale(weight.sum() * (float("inf") if letter == "x" else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        expected.append(theirs.get_scale())
    assert _scales(LossScaling(64.0, growth_interval=4), steps) == expected


def test_the_floor_is_known() -> None:
    scaler = LossScaler(LossScaling(2.0, min_scale=1.0))
    assert not scaler.at_floor
    scaler.update(True)
    assert scaler.at_floor


def test_state_goes_on_exactly_where_it_was() -> None:
    settings = LossScaling(1024.0, growth_interval=4, hysteresis=3)
    scaler, other = LossScaler(settings), LossScaler(settings)
    for letter in "x...":
        scaler.update(letter == "x")
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.growth_tracker, other.hysteresis_left) == (1024.0, 3, 2)
    other.update(False)
    assert other.scale == 2048.0


def test_wrong_settings_are_listed_in_one_error() -> None:
    with pytest.raises(MisconfigurationException) as error:
        LossScaling(0, growth_factor=0.5, backoff_factor=1.0, growth_interval=0, min_scale=-1, hysteresis=1.5)  # type: ignore[arg-type]
    text = str(error.value)
    assert text.startswith("6 settings do not work:")
    for name in ("init_scale=0", "min_scale=-1", "growth_factor=0.5", "backoff_factor=1.0", "growth_interval=0"):
        assert name in text
    assert "hysteresis=1.5" in text
    with pytest.raises(MisconfigurationException, match=r"init_scale=0\.5, min_scale=1"):
        LossScaling(0.5)
    for value in (float("inf"), float("nan"), "big", True):
        with pytest.raises(MisconfigurationException, match="init_scale"):
            LossScaling(value)  # type: ignore[arg-type]


def _weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1)) for _ in range(count)]


def test_a_gradient_is_divided_once_however_often_it_is_asked_for() -> None:
    scaler, (weight,) = LossScaler(LossScaling(8.0)), _weights(1)
    scaler.scale_loss(3 * weight.sum()).backward()
    assert scaler.unscale([weight])
    assert scaler.unscale([weight])
    assert weight.grad == 3.0


def test_a_backward_onto_a_kept_gradient_adds_to_its_true_value() -> None:
    scaler, (weight,) = LossScaler(LossScaling(8.0)), _weights(1)
    scaler.scale_loss(3 * weight.sum()).backward()
    scaler.unscale([weight])
    scaler.scale_loss(2 * weight.sum()).backward()
    scaler.unscale([weight])
    assert weight.grad == 5.0


def test_a_gradient_that_waits_for_its_step_follows_the_scale() -> None:
    scaler, (first, second) = LossScaler(LossScaling(8.0)), _weights(2)
    scaler.scale_loss(3 * second.sum() + first.sum()).backward()
    scaler.unscale([first])
    scaler.update(True, waiting=[first, second])
    assert scaler.scale == 4.0
    assert first.grad == 1.0
    assert scaler.unscale([second])
    assert second.grad == 3.0


def test_an_overflow_is_found_again_where_it_was_divided_before() -> None:
    scaler, (weight,) = LossScaler(LossScaling(8.0)), _weights(1)
    scaler.scale_loss(weight.sum() * float("inf")).backward()
    assert not scaler.unscale([weight])
    assert not scaler.unscale([weight])


def test_gradients_of_a_bare_backward_are_refused() -> None:
    scaler, (weight,) = LossScaler(), _weights(1)
    weight.sum().backward()
    with pytest.raises(ValueError, match=r"self\.manual_backward"):
        scaler.unscale([weight])


def test_a_half_precision_loss_is_scaled_in_fp32() -> None:
    loss = torch.tensor(40.0, dtype=torch.float16, requires_grad=True)
    assert LossScaler(LossScaling(2.0**15)).scale_loss(loss) == 40.0 * 2**15


def test_skipped_steps_are_counted_by_reason_and_in_a_row_for_each_optimizer() -> None:
    steps = SkippedSteps()
    steps.made()
    steps.skipped("loss scale", 8.0)
    steps.skipped("spike", optimizer_index=1)
    steps.made(0)
    steps.skipped("spike", optimizer_index=1)
    assert (steps.total, steps.attempts, steps.in_a_row) == (3, 5, 2)
    assert steps.by_reason == {"loss scale": 1, "spike": 2}
    assert steps.last == SkippedStep(4, "spike", None, 1)
    other = SkippedSteps()
    other.load_state_dict(steps.state_dict())
    assert other.state_dict() == steps.state_dict()
