"""Ranks that are forked from a process that has done other things before; and what their parent hears of them."""

import os
import time
from pathlib import Path

import pytest

from lightning_5d.launch import watch
from lightning_5d.launch.pulse import SILENCE_SECONDS
from lightning_5d.launch.rendezvous import HashStore
from lightning_5d.launch.watch import END_SECONDS, FROZEN_SECONDS, LOOK_SECONDS, START_SECONDS, Watch
from tests.launch.running import HERE
from tests.ranks.warm import run_warm


def run_forking(name: str, folder: Path) -> str:
    """What one of the programs of `forked_after.py` prints; it has a minute."""
    code, printed = run_warm(str(HERE / "forked_after.py"), name, folder=folder, environment=os.environ, seconds=60)
    assert code == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_that_has_computed_with_several_threads_can_fork_ranks_that_do(tmp_path: Path) -> None:
    printed = run_forking("openmp", tmp_path)
    # Before and after: the threads that a fork would miss come back when they are needed.
    assert printed.count("threads of this process: 2") == 2, printed
    assert "trained, {'threads': 2.0}" in printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_server_is_at_work_while_ranks_are_forked(tmp_path: Path) -> None:
    # It asks for names of hosts: a rank forked meanwhile has a resolver whose lock nobody gives back.
    assert "more threads at forks: [0, 0]" in run_forking("server", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "rank", "ranks"), [("locked", 1, 2), ("locked_alone", 0, 1)])
def test_a_forked_rank_that_never_gets_to_run_is_named(tmp_path: Path, name: str, rank: int, ranks: int) -> None:
    printed = run_forking(name, tmp_path)
    told = f'rank {rank} of {ranks} failed first: it was started by "fork" and has given no sign of life for 3 s'
    assert told in printed
    assert 'use start_method="popen" or "forkserver"' in printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_are_all_frozen_are_ended_by_their_parent(tmp_path: Path) -> None:
    assert "rank 0 of 2 failed first: it has given no sign of life for 4 s: it is frozen" in run_forking(
        "frozen", tmp_path
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_that_does_not_end_after_its_work_is_ended_and_the_results_are_there(tmp_path: Path) -> None:
    printed = run_forking("lingering", tmp_path)
    assert "trained" in printed
    assert "The work of rank 1 is done, and 2 s later its process has not ended" in printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_rank_is_noticed_whoever_holds_its_pipes(tmp_path: Path) -> None:
    began = time.monotonic()
    assert "rank 0 of 1 failed first: it was killed by SIGKILL" in run_forking("orphaning", tmp_path)
    assert time.monotonic() - began < 50


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_error_of_a_single_rank_is_told(tmp_path: Path) -> None:
    printed = run_forking("failing", tmp_path)
    assert "rank 0 of 1 failed first: it raised KeyError: 'the planned failure'" in printed
    assert "in on_train_start" in printed


def _named(watch: Watch, seconds: float, ranks: int = 2) -> list[str]:
    looks = (watch.look(range(ranks)) for _ in range(round(seconds / LOOK_SECONDS)))
    return [f"{told.rank} {told.what}" for told in looks if told is not None]


def test_a_rank_has_its_time_to_begin() -> None:
    store = HashStore()
    store.add("alive/0", 1)
    for method, limit in START_SECONDS.items():
        seen = Watch(store, 1, method)
        assert _named(seen, 3 * limit, 1) == []  # it has begun, and alone it has nobody to tell more
    for method, limit in START_SECONDS.items():
        seen = Watch(HashStore(), 1, method)
        assert _named(seen, limit, 1) == []
        (told,) = _named(seen, 2 * LOOK_SECONDS, 1)[:1]
        assert f'0 was started by "{method}" and has given no sign of life for {limit:.0f} s' in told


def test_silence_counts_from_the_last_sign_of_life_and_ranks_tell_it_first() -> None:
    assert FROZEN_SECONDS > SILENCE_SECONDS
    store = HashStore()
    seen = Watch(store, 2, "fork")
    for _ in range(3):
        store.add("alive/0", 1)
        store.add("alive/1", 1)
        assert _named(seen, FROZEN_SECONDS) == []
    assert _named(seen, 3 * LOOK_SECONDS)[0] == f"0 has given no sign of life for {FROZEN_SECONDS:.0f} s: it is frozen"


def test_a_rank_that_is_done_need_not_live_but_end() -> None:
    store = HashStore()
    for rank in range(2):
        store.add(f"alive/{rank}", 1)
        store.set(f"done/{rank}", "1")
    seen = Watch(store, 2, "fork")
    assert _named(seen, END_SECONDS) == []
    assert seen.late is None
    assert _named(seen, 3 * LOOK_SECONDS) == []
    assert f"The work of rank 1 is done, and {END_SECONDS:.0f} s later" in str(seen.late)
    assert watch.END_SECONDS >= 60
