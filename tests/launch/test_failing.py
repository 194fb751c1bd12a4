"""A rank that fails ends the job, everywhere, with its own story."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch.running import PYTHON, TORCHRUN, run, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("where", "rank", "method"),
    [
        ("training_step", 1, "popen"),
        ("training_step", 0, "popen"),
        ("training_step", 1, "forkserver"),
        ("validation", 1, "popen"),
        ("setup", 1, "popen"),
        ("hook", 1, "forkserver"),
        ("prepare_data", 0, "popen"),
        ("prepare_data", 0, "forkserver"),
    ],
)
def test_an_exception_ends_the_job_and_is_shown_once(tmp_path: Path, where: str, rank: int, method: str) -> None:
    job = run(tmp_path, "--where", where, "--rank", str(rank), "--method", method)
    assert job.code != 0
    assert job.seconds < 30
    assert job.err.count("ValueError: the planned failure") <= 2, "headline and traceback, no more"
    assert job.err.count("strike(self.options.how)") == 1
    assert f"rank {rank} of 2 failed first" in job.err
    assert "Connection closed" not in job.err
    assert job.job.left_after(1) == []


@pytest.mark.parametrize(
    ("where", "how", "rank", "says"),
    [
        ("training_step", "raise", 0, "ValueError: the planned failure"),
        ("training_step", "kill", 1, "was killed by SIGKILL"),
        ("training_step", "exit", 1, "ended with exit code 0 before its work was done"),
        ("validation", "raise", 1, "ValueError: the planned failure"),
        ("hook", "raise", 1, "ValueError: the planned failure"),
        ("worker", "raise", 1, "ValueError: the planned failure"),
    ],
)
def test_a_stage_of_a_pipeline_that_fails_ends_the_others(
    tmp_path: Path, where: str, how: str, rank: int, says: str
) -> None:
    options = ("--workers", "1", "--steps", "20") if where == "worker" else ()
    job = run(tmp_path, "--pipeline", "2", "--where", where, "--how", how, "--rank", str(rank), *options)
    assert job.code != 0
    assert job.seconds < 30
    assert f"rank {rank} of 2 failed first" in job.err
    assert says in job.err
    assert job.job.left_after(6) == []


@pytest.mark.parametrize("method", ["popen", "forkserver"])
def test_a_data_worker_that_raises_ends_the_job(tmp_path: Path, method: str) -> None:
    job = run(tmp_path, "--where", "worker", "--workers", "1", "--method", method, "--steps", "20")
    assert job.code != 0
    assert job.seconds < 30
    assert "rank 1 of 2 failed first" in job.err
    assert "ValueError: the planned failure" in job.err
    assert job.job.left_after(6) == []


@pytest.mark.parametrize(
    ("how", "method", "says"),
    [
        ("kill", "popen", "was killed by SIGKILL"),
        ("kill", "forkserver", "was killed by SIGKILL"),
        ("exit", "popen", "ended with exit code 0 before its work was done"),
    ],
)
def test_a_rank_that_vanishes_ends_the_job(tmp_path: Path, how: str, method: str, says: str) -> None:
    job = run(tmp_path, "--where", "training_step", "--how", how, "--method", method, "--workers", "1")
    assert job.code != 0
    assert job.seconds < 30
    assert f"rank 1 of 2 failed first: it {says}" in job.err
    assert job.job.left_after(8) == []


def test_rank_0_killed_ends_its_script_ranks(tmp_path: Path) -> None:
    job = run(tmp_path, "--where", "training_step", "--rank", "0", "--how", "kill")
    assert job.code == -signal.SIGKILL
    assert job.job.left_after(5) == []


def test_rank_0_frozen_with_the_interpreter_lock_is_ended_by_the_others(tmp_path: Path) -> None:
    job = run(tmp_path, "--where", "training_step", "--rank", "0", "--how", "freeze", "--silence", "4")
    assert job.code == -signal.SIGKILL
    assert "[rank 1] stopped: rank 0 of 2 failed first: it has given no sign of life" in job.err
    assert job.job.left_after(5) == []


def test_a_job_that_does_not_end_says_where_each_process_is(tmp_path: Path) -> None:
    stuck = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1)
def strike():
    time.sleep(60)
print("TRAINING", flush=True)
strike()
"""
    job = start(tmp_path, launcher=(*PYTHON, "-c", stuck))
    job.wait_for("TRAINING", 1, 20)
    with pytest.raises(AssertionError, match=r"(?s)stacks of process.*in strike.*threads and what they wait for"):
        job.wait(0.1)
    assert job.left_after(5) == []


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_torchrun_ends_with_the_first_failure(tmp_path: Path, how: str) -> None:
    job = run(tmp_path, "--where", "training_step", "--how", how, launcher=TORCHRUN)
    assert job.code != 0
    assert job.seconds < 35
    if how == "raise":
        assert job.err.count("strike(self.options.how)") == 1
        assert "rank 1 of 2 failed first" in job.err
    assert job.job.left_after(5) == []


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
        (signal.SIGTERM, 1, "forkserver"),
        (signal.SIGKILL, 1, "forkserver"),
    ],
)
def test_a_signal_to_the_parent_leaves_no_process(
    tmp_path: Path, number: signal.Signals, times: int, method: str
) -> None:
    job = start(tmp_path, "--workers", "1", "--steps", "1000", "--pause", "0.05", "--method", method, launcher=PYTHON)
    job.wait_for("TRAINING", 2, 40)
    for _ in range(times):
        os.kill(job.process.pid, number)
        time.sleep(0.3)
    assert job.left_after(10) == []
    assert job.wait(1).code != 0


def test_a_signal_to_the_whole_group_as_from_a_terminal(tmp_path: Path) -> None:
    job = start(tmp_path, "--workers", "1", "--steps", "1000", "--pause", "0.05")
    job.wait_for("TRAINING", 2, 40)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.left_after(10) == []
    assert job.wait(1).code != 0


def test_sigterm_ends_a_rank_that_is_stuck(tmp_path: Path) -> None:
    job = start(tmp_path, "--where", "training_step", "--how", "hang")
    job.wait_for("TRAINING", 2, 40)
    time.sleep(1)
    job.process.terminate()
    assert job.left_after(10) == []
    assert job.wait(1).code != 0
