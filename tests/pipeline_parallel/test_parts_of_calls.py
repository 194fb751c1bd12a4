"""Lists of parameters on several stages are parts of one call, or it is said why that cannot be seen."""

import pytest

from lightning_5d.pipeline_parallel.parts_of_calls import Given, counted_by, problem_of

FIRST = ("embed", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
LAST = ("layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias", "head")
PLACES = [[0], [1]]


def _given(names: tuple[str, ...], held: tuple[str, ...], *groups: tuple[int, int]) -> Given:
    return Given(tuple((name, name) for name in names), frozenset(held), frozenset(groups))


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (FIRST, LAST),
        (FIRST[1:3], ()),
        ((), ("head",)),
        (("embed",), ("head",)),
        (FIRST[1::2], LAST[::2][:2]),
        (("layers.0.bias", "layers.1.bias"), ("layers.2.bias", "layers.3.bias")),
        ((), ()),
    ],
)
def test_parts_that_go_by_the_same_names_belong_together(first: tuple[str, ...], last: tuple[str, ...]) -> None:
    assert problem_of([_given(first, FIRST), _given(last, LAST)], PLACES) is None


def test_parts_of_one_layer_each_do_not() -> None:
    problem = problem_of([_given(FIRST[1:3], FIRST), _given(LAST[:2], LAST)], PLACES)
    assert problem is not None
    assert "layers.1.bias, of the same kind, is missing" in problem


def test_a_group_of_the_optimizer_may_be_anything() -> None:
    given = [_given(FIRST[1:3], FIRST, (0, 1), (0, 2)), _given(LAST[:2], LAST, (0, 1))]
    assert problem_of(given, PLACES) is None
    assert problem_of([given[0], given[1]._replace(groups=frozenset({(0, 0)}))], PLACES) is not None


def test_a_weight_of_two_stages_is_given_on_both() -> None:
    both = [_given(("embed",), FIRST), _given((), (*LAST, "embed"))]
    assert "rank 0 gave embed, which rank 1 holds too" in str(problem_of(both, PLACES))
    assert problem_of([both[0], _given(("embed",), (*LAST, "embed"))], PLACES) is None


def test_ranks_of_a_place_that_give_different_things_are_told() -> None:
    given = [_given(FIRST, FIRST), _given(FIRST[:1], FIRST), _given(LAST, LAST), _given(LAST, LAST)]
    assert "which rank 1 holds too" in str(problem_of(given, [[0, 1], [2, 3]]))


def test_the_first_place_that_lists_a_weight_counts_it() -> None:
    given = [_given(("embed",), FIRST), Given((("embed", "head.weight"), ("head", "head")), frozenset(), frozenset())]
    assert counted_by(given, PLACES) == {"embed": (0, "embed"), "head": (1, "head")}
