"""A context axis with wrong settings is refused when the Trainer is made, all problems at once."""

from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_5d import ContextParallel, FiveD, ZeRO
from tests.trainers import quiet


@pytest.mark.parametrize(
    ("plugin", "devices", "words"),
    [
        ((0,), 2, ["The size of axis 'cp' is 0", "at least 1"]),
        ((2.0,), 2, ["size=2.0", "whole number"]),
        ((4,), 6, ["6 ranks cannot be divided by cp=4", "3 works with 6 ranks", "8 ranks"]),
        ((2, "striped"), 2, ["method='striped'", "'ring' or 'ulysses' or 'all_gather'"]),
        ((2, "ring", "even"), 2, ["balance='even'", "'zigzag' or 'contiguous'"]),
        ((4, "ring", "zigzag", 3), 4, ["3 does not divide 4", "ulysses=2 does"]),
        ((4, "ulysses", "zigzag", 2), 4, ["mixture is of Ulysses and a ring", 'method="ring"']),
        ((2, "ring", "zigzag", 0), 2, ["ulysses=0", "Use 1"]),
        ((2, "ring", "zigzag", 1, ["input_ids"]), 2, ["keys=['input_ids']", "no mapping"]),
        ((2, "ring", "zigzag", 1, {"x": "1"}), 2, ["keys={'x': '1'}", "no mapping"]),
        ((2, "ring", "zigzag", 1, None, "yes"), 2, ["pad='yes'"]),
    ],
)
def test_wrong_settings_are_refused_when_the_trainer_is_made(
    plugin: tuple[Any, ...], devices: int, words: list[str]
) -> None:
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(ContextParallel(*plugin)), devices=devices)
    for word in words:
        assert word in str(error.value)


def test_all_problems_come_in_one_error() -> None:
    plugin = ContextParallel(4, method="rings", balance="even", ulysses=3, pad=1)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(plugin, ZeRO(stage=7)), devices=4)
    assert "5 settings do not work" in str(error.value)


def test_the_cut_follows_method_and_balance() -> None:
    assert ContextParallel(2).cut(8).spans(0) == ((0, 2), (6, 8))
    assert ContextParallel(2, balance="contiguous").cut(8).spans(0) == ((0, 4),)
    assert ContextParallel(2, method="ulysses").cut(8).spans(1) == ((4, 8),)
    assert ContextParallel(4, ulysses=2).cut(8).spans(1) == ((6, 8),)
