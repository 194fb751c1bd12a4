"""An expert axis with wrong settings is refused when the Trainer is made, all problems at once, with the degrees that work."""

from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.parallelism import RunContext
from tests.trainers import quiet


@pytest.mark.parametrize(
    ("plugins", "devices", "words"),
    [
        ([ExpertParallel(0)], 2, ["size=0", "at least 1"]),
        ([ExpertParallel(2.0)], 2, ["size=2.0", "whole number"]),  # type: ignore[arg-type]
        ([ExpertParallel(2, tensor=0)], 2, ["tensor=0", "at least 1"]),
        ([ExpertParallel(2, capacity_factor=0)], 2, ["capacity_factor=0)", "above 0", "1.25"]),
        ([ExpertParallel(2, capacity_factor=-1.5)], 2, ["capacity_factor=-1.5"]),
        ([ExpertParallel(2, capacity_factor=float("nan"))], 2, ["capacity_factor=nan"]),
        ([ExpertParallel(2, drop="first")], 2, ["drop='first'", "'probability' or 'position'"]),  # type: ignore[arg-type]
        ([ExpertParallel(4)], 6, ["4 does not divide the 6 ranks", "dp_shard=6", "A size of 1, 2, 3 or 6 does"]),
        ([ExpertParallel(2)], 1, ["there is one such rank", "ZeRO(size=2)"]),
        ([ExpertParallel(2), PipelineParallel(2)], 2, ["there is one such rank (dp_shard=1)"]),
        ([ExpertParallel(2, tensor=2), TensorParallel(2)], 2, ["there is one such rank"]),
        ([ExpertParallel(2, tensor=2)], 2, ["tensor=2", "which has 1", "add TensorParallel(2)"]),
        ([ExpertParallel(2, tensor=2), TensorParallel(4)], 8, ["which has 4", "tensor=1 or tensor=4"]),
        (
            [ExpertParallel(3), ContextParallel(2), ZeRO(size=2)],
            4,
            ["the 4 ranks", "dp_shard=2 x cp=2", "A size of 1, 2 or 4 does"],
        ),
    ],
)
def test_wrong_settings_are_refused_when_the_trainer_is_made(
    plugins: list[Any], devices: int, words: list[str]
) -> None:
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(*plugins), devices=devices)
    for word in words:
        assert word in str(error.value)


def test_all_problems_come_in_one_error() -> None:
    plugin = ExpertParallel(0, tensor=-1, capacity_factor=0.0, drop="none")  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(plugin, ZeRO(stage=7)), devices=4)
    assert "5 settings do not work" in str(error.value)


@pytest.mark.parametrize(
    ("plugins", "devices"),
    [
        ([ExpertParallel(2), TensorParallel(2)], 2),  # its ranks take part of the rows each
        ([ExpertParallel(2), ContextParallel(2)], 2),
        ([ExpertParallel(4), ZeRO(size=2), ContextParallel(2)], 4),
        ([ExpertParallel(1)], 1),
    ],
)
def test_experts_live_on_the_ranks_of_several_axes(plugins: list[Any], devices: int) -> None:
    quiet(strategy=FiveD(*plugins), devices=devices)


def context(module: Any, **sizes: int) -> RunContext:
    """A run of that module."""
    return RunContext(8, 1, "cpu", "32-true", {"dp_shard": 1, "cp": 1, "tp": 1, **sizes}, module)
