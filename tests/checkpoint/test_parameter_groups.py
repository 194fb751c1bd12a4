"""Groups and orders of one process are found again from those of its stages."""

import pytest

from lightning_5d.checkpoint.parameter_groups import Group, join_groups, merge_orders

MODULE = ["embed", *(f"layers.{i}" for i in range(6)), "norm", "head"]
POSITION = {name: index for index, name in enumerate(MODULE)}
LAYERS = MODULE[1:7]


def _cut(names: list[str], *stages: list[str]) -> list[list[str]]:
    return [[name for name in names if name in stage] for stage in stages]


@pytest.mark.parametrize(
    "names",
    [
        MODULE,
        MODULE[::-1],
        ["norm", "head", "embed", *LAYERS],
        ["layers.1", "layers.2", "layers.4", "layers.5"],
        ["head"],
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_the_order_of_one_process_is_found_again(names: list[str], cut: int) -> None:
    assert merge_orders(_cut(names, MODULE[:cut], MODULE[cut:]), POSITION) == names
    three = _cut(names, MODULE[:cut], MODULE[cut : cut + 1], MODULE[cut + 1 :])
    assert merge_orders(three, POSITION) == names


@pytest.mark.parametrize("names", [MODULE, MODULE[::-1]])
def test_stages_of_few_parameters_are_put_in_order(names: list[str]) -> None:
    assert merge_orders(_cut(names, MODULE[:7], MODULE[7:]), POSITION) == names
    assert merge_orders(_cut(names, MODULE[:2], MODULE[2:7], MODULE[7:]), POSITION) == names


def test_an_order_of_ones_own_is_found_where_a_stage_tells_it() -> None:
    names = ["norm", "head", *LAYERS, "embed"]
    assert merge_orders(_cut(names, MODULE[:4], MODULE[4:]), POSITION) == names


def test_orders_that_contradict_each_other_become_the_modules() -> None:
    assert merge_orders([["norm", "embed", "head"], ["embed", "head", "norm"]], POSITION) == ["embed", "norm", "head"]


def _groups(*groups: tuple[dict[str, float], list[str]]) -> list[Group]:
    return [Group(options, tuple(names), tuple(names)) for options, names in groups]


def test_equal_groups_are_joined_one_by_one() -> None:
    options = {"lr": 0.1}, {"lr": 0.1}
    stages = [
        _groups((options[0], ["embed", "layers.0"]), (options[1], [])),
        _groups((options[0], ["layers.1"]), (options[1], ["head"])),
    ]
    joined = join_groups(stages, POSITION)
    assert [group.names for group in joined.groups] == [("embed", "layers.0", "layers.1"), ("head",)]
    assert joined.places == ((0, 1), (0, 1))
    assert joined.numbers == {"embed": 0, "layers.0": 1, "layers.1": 2, "head": 3}


def test_a_group_for_each_layer_stays_one() -> None:
    def layered(*numbers: int) -> list[Group]:
        return _groups(*(({"lr": 0.5**number}, [f"layers.{number}"]) for number in numbers))

    assert [g.names[0] for g in join_groups([layered(0, 1), layered(2, 3)], POSITION).groups] == LAYERS[:4]
    backwards = join_groups([layered(1, 0), layered(3, 2)], POSITION)
    assert [g.names[0] for g in backwards.groups] == LAYERS[3::-1]
    assert backwards.places == ((2, 3), (0, 1))


def test_groups_left_out_because_they_are_empty_are_found_by_their_options() -> None:
    decay, none = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    joined = join_groups([_groups((none, ["embed"])), _groups((decay, ["layers.1"]), (none, ["norm"]))], POSITION)
    assert [group.names for group in joined.groups] == [("layers.1",), ("embed", "norm")]
    assert joined.places == ((1,), (0, 1))


def test_what_a_schedule_changes_does_not_part_groups() -> None:
    stages = [
        _groups(({"lr": 0.0, "initial_lr": 0.1}, ["embed"]), ({"lr": 0.0, "initial_lr": 0.2}, ["layers.0"])),
        _groups(({"lr": 0.0, "initial_lr": 0.4}, ["layers.1"]), ({"lr": 0.0, "initial_lr": 0.8}, ["head"])),
    ]
    assert len(join_groups(stages, POSITION).groups) == 4


def test_a_shared_weight_stands_where_its_first_name_does() -> None:
    last = Group({}, ("layers.1", "norm", "embed"), ("layers.1", "norm"))
    joined = join_groups([_groups(({}, ["embed", "layers.0"])), [last]], POSITION)
    assert joined.groups[0].names == ("embed", "layers.0", "layers.1", "norm")
