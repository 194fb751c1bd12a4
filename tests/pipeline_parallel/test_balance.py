"""The split that training takes by itself."""

from itertools import product

import pytest

from lightning_5d.pipeline_parallel import Durations, make_schedule, simulate
from lightning_5d.pipeline_parallel.balance import shortest_split
from lightning_5d.pipeline_parallel.stage import partition

HEAD = 1.1


def _takes(name: str, sizes: tuple[int, ...], **options: int) -> float:
    schedule = make_schedule(name, 2, 8, **options)
    each = tuple((size + HEAD * (stage == len(sizes) - 1)) / 3 for stage, size in enumerate(sizes))
    return simulate(schedule, Durations(each, each, each)).makespan


@pytest.mark.parametrize(("name", "options"), [("1f1b", {}), ("zb_v", {}), ("interleaved_1f1b", {"chunks": 2})])
def test_no_other_split_of_nine_blocks_is_simulated_faster(name: str, options: dict[str, int]) -> None:
    schedule = make_schedule(name, 2, 8, **options)
    found = shortest_split(schedule, [1.0] * 9, last=HEAD)
    others = [s for s in product(range(1, 9), repeat=schedule.stages) if sum(s) == 9]
    assert _takes(name, found, **options) == pytest.approx(min(_takes(name, s, **options) for s in others))


def test_it_beats_even_stages_where_a_rank_holds_two() -> None:
    even = partition([1.0] * 9, 4, 0.0, HEAD)
    found = shortest_split(make_schedule("zb_v", 2, 8), [1.0] * 9, last=HEAD)
    assert _takes("zb_v", found) < 0.9 * _takes("zb_v", even)
    assert sum(found) == 9
    assert min(found) >= 1


def test_a_large_schedule_is_not_searched_for_ever() -> None:
    schedule = make_schedule("interleaved_1f1b", 16, 64, chunks=8)
    assert sum(shortest_split(schedule, [1.0] * 256, last=4.0)) == 256


def test_too_few_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be divided among 4"):
        shortest_split(make_schedule("1f1b", 4, 8), [1.0] * 3)
