"""A rank that fails ends the job, everywhere, with its own story."""

import contextlib
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from lightning_5d.launch import RankFailure
from tests.launch.job import Module, parse, trainer
from tests.launch.running import PYTHON, TORCHRUN, copies_of, run, start, warm_fork_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def fit(*arguments: str) -> None:
    """What `job.py` does, here, with ranks from this process's fork server: only the first of them waits for imports."""
    options = parse([*arguments, "--method", "forkserver"])
    trainer(options).fit(Module(options))


def ranks_left_after(seconds: float) -> list[int]:
    """What the fork server has started and still lives `seconds` from now; returns early when there is nothing."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    limit = time.monotonic() + seconds
    while (left := copies_of(server)) and time.monotonic() < limit:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize(("where", "rank"), [("training_step", 0), ("setup", 1)])
def test_an_exception_ends_the_job_and_is_shown_once(tmp_path: Path, where: str, rank: int) -> None:
    job = run(tmp_path, "--where", where, "--rank", str(rank))
    assert job.code != 0
    assert job.seconds_since_struck < 30
    lines = job.err.splitlines()
    of_rank_1 = [line for line in lines if line.startswith("[rank 1] ")]
    assert len(of_rank_1) <= 1, "rank 1 says a line, unless rank 0 has ended it before"
    shown = "\n".join(line for line in lines if line not in of_rank_1)
    assert shown.count("ValueError: the planned failure") <= 2, "headline and traceback, no more"
    assert job.err.count("strike(self.options.how)") == 1
    assert f"rank {rank} of 2 failed first" in job.err
    assert "Connection closed" not in job.err
    assert job.job.left_after(25) == []


@pytest.mark.parametrize(
    ("how", "says"),
    [("kill", "was killed by SIGKILL"), ("exit", "ended with exit code 0 before its work was done")],
)
def test_a_rank_that_vanishes_ends_the_job(tmp_path: Path, how: str, says: str) -> None:
    job = run(tmp_path, "--where", "training_step", "--how", how, "--workers", "1")
    assert job.code != 0
    assert job.seconds_since_struck < 30
    assert f"rank 1 of 2 failed first: it {says}" in job.err
    assert job.job.left_after(25) == []


def test_a_data_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    job = run(tmp_path, "--where", "worker", "--workers", "1", "--steps", "20")
    assert job.code != 0
    assert job.seconds_since_struck < 30
    assert "rank 1 of 2 failed first" in job.err
    assert "ValueError: the planned failure" in job.err
    assert job.job.left_after(25) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_in_native_code_shows_where_its_rank_was(tmp_path: Path, rank: int) -> None:
    job = run(tmp_path, "--where", "training_step", "--how", "abort", "--rank", str(rank), "--method", "forkserver")
    assert job.code != 0
    assert job.seconds_since_struck < 30
    assert f"rank {rank} of 2 failed first: it was killed by SIGABRT" in job.err
    assert job.err.count("Fatal Python error: Aborted") == 1
    assert job.err.count("in strike") == 1
    assert job.job.left_after(25) == []


RAISED = "it raised ValueError: the planned failure"
KILLED = "it was killed by SIGKILL"
LEFT = "it ended with exit code 0 before its work was done"


@pytest.mark.parametrize("pipeline", [0, 2], ids=["data ranks", "stages"])
@pytest.mark.parametrize(
    ("where", "how", "rank", "says"),
    [
        ("training_step", "raise", 0, RAISED),
        ("training_step", "raise", 1, RAISED),
        ("training_step", "kill", 1, KILLED),
        ("training_step", "exit", 1, LEFT),
        ("validation", "raise", 1, RAISED),
        ("hook", "raise", 1, RAISED),
        ("prepare_data", "raise", 0, RAISED),
        ("worker", "raise", 1, "ValueError: the planned failure"),
    ],
)
def test_a_failed_rank_of_this_process_ends_the_others_and_is_told_once(
    capfd: pytest.CaptureFixture[str], where: str, how: str, rank: int, says: str, pipeline: int
) -> None:
    options = ("--workers", "1", "--steps", "20") if where == "worker" else ()
    warm_fork_server()
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        fit("--pipeline", str(pipeline), "--where", where, "--how", how, "--rank", str(rank), *options)
    assert time.monotonic() - started < 30
    assert f"rank {rank} of 2 failed first: " in str(caught.value)
    assert says in str(caught.value)
    assert ("in strike\n" in str(caught.value)) == (how == "raise")
    assert "the planned failure" not in capfd.readouterr().err
    assert "Connection closed" not in str(caught.value)
    assert ranks_left_after(25) == []


def test_rank_0_killed_ends_its_script_ranks(tmp_path: Path) -> None:
    job = run(tmp_path, "--where", "training_step", "--rank", "0", "--how", "kill")
    assert job.code == -signal.SIGKILL
    assert job.job.left_after(25) == []


def test_rank_0_frozen_with_the_interpreter_lock_is_ended_by_the_others(tmp_path: Path) -> None:
    job = run(tmp_path, "--where", "training_step", "--rank", "0", "--how", "freeze", "--silence", "8")
    assert job.code == -signal.SIGKILL
    assert "[rank 1] stopped: rank 0 of 2 failed first: it has given no sign of life" in job.err
    assert job.job.left_after(25) == []


def test_a_job_that_does_not_end_says_where_each_process_is(tmp_path: Path) -> None:
    stuck = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def strike():
    print("TRAINING", flush=True)
    time.sleep(60)
strike()
"""
    job = start(tmp_path, launcher=(*PYTHON, "-c", stuck))
    job.wait_for("TRAINING", 1, 100)
    with pytest.raises(AssertionError, match=r"(?s)stacks of process.*in strike.*threads and what they wait for"):
        job.wait(0.1)
    assert job.left_after(25) == []


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_torchrun_ends_with_the_first_failure(tmp_path: Path, how: str) -> None:
    job = run(tmp_path, "--where", "training_step", "--how", how, launcher=TORCHRUN)
    assert job.code != 0
    assert job.seconds_since_struck < 30
    if how == "raise":
        assert job.err.count("strike(self.options.how)") == 1
        assert "rank 1 of 2 failed first" in job.err
    assert job.job.left_after(25) == []


def test_an_error_after_training_is_not_lost(tmp_path: Path) -> None:
    job = run(tmp_path, "--then", "raise")
    assert job.code == 1
    assert "ValueError: after training" in job.err
    assert "rank 1 ended with exit code 1" in job.err


@pytest.mark.parametrize(
    ("number", "times", "method"),
    [
        (signal.SIGINT, 1, "popen"),
        (signal.SIGINT, 2, "popen"),
        (signal.SIGTERM, 1, "popen"),
        (signal.SIGKILL, 1, "popen"),
        (signal.SIGINT, 1, "forkserver"),
        (signal.SIGTERM, 1, "fork"),
        (signal.SIGKILL, 1, "forkserver"),
    ],
)
def test_a_signal_to_the_parent_leaves_no_process(
    tmp_path: Path, number: signal.Signals, times: int, method: str
) -> None:
    # One of them from a cold Python, as a person starts it; for the others what is started has imported already.
    launcher = PYTHON if (number, method) == (signal.SIGKILL, "popen") else None
    options = ("--workers", "1", "--steps", "1000", "--pause", "0.05", "--method", method)
    job = start(tmp_path, *options, launcher=launcher)
    job.wait_for("TRAINING", 2, 200)
    for _ in range(times):
        with contextlib.suppress(ProcessLookupError):  # it may be quick
            os.kill(job.process.pid, number)
        time.sleep(0.3)
    assert job.left_after(25) == []
    assert job.wait(20).code != 0


def test_a_signal_to_the_whole_group_as_from_a_terminal(tmp_path: Path) -> None:
    job = start(tmp_path, "--workers", "1", "--steps", "1000", "--pause", "0.05")
    job.wait_for("TRAINING", 2, 200)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.left_after(25) == []
    assert job.wait(20).code != 0


def test_sigterm_ends_a_rank_that_is_stuck(tmp_path: Path) -> None:
    job = start(tmp_path, "--where", "training_step", "--how", "hang")
    job.wait_for("TRAINING", 2, 200)
    time.sleep(1)
    job.process.terminate()
    assert job.left_after(25) == []
    assert job.wait(20).code != 0
