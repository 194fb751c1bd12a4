"""What the pool of rank processes promises to every other test."""

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_5d.launch import RankFailure
from lightning_5d.launch.failure import Failure
from tests.ranks import RankError, RankPool
from tests.ranks.forks import ROOT
from tests.ranks.warm import start_warm


def add_over_ranks(rank: int, scale: float) -> float:
    value = torch.tensor([scale * rank])
    dist.all_reduce(value)
    return value.item()


def raise_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        raise KeyError("the learning rate")
    dist.barrier()


def fail_after_the_other_has_said_so(rank: int, guilty: int, how: str) -> None:
    if rank == guilty:
        time.sleep(2.0)
        raise KeyError("the learning rate")
    failure = Failure(guilty, "raised KeyError", "its traceback")
    told = failure.describe(2, with_traceback=rank == 0)
    if how == "raises":
        raise RankFailure(told, failure)
    print(told if rank == 0 else f"[rank {rank}] stopped: {told}", flush=True)
    os._exit(1)


def fail_late(rank: int) -> None:
    """Rank 0 computes for a while, and then has something to say."""
    limit = time.thread_time() + 3.0 * (rank == 0)
    while time.thread_time() < limit:
        pass
    raise KeyError(f"of rank {rank}")


def kill_self(rank: int, guilty: int) -> None:
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def crash(rank: int) -> None:
    if rank == 0:
        os.abort()


def wait_for_ever(rank: int, guilty: int) -> None:
    if rank == guilty:
        dist.barrier()


def return_a_function(rank: int) -> object:
    return lambda: rank


def print_and_raise(rank: int) -> None:
    print(f"printed by {rank}")
    os.write(2, f"written by {rank}\n".encode())
    if rank == 1:
        raise ValueError("after printing")


def disturb(rank: int) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    torch.set_grad_enabled(False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")


def state_of(rank: int) -> tuple[object, ...]:
    return (
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.rand(1).item(),
        random.random(),
        torch.is_grad_enabled(),
        signal.getsignal(signal.SIGTERM),
        list(warnings.filters),
        os.environ["WORLD_SIZE"],
        torch.get_num_threads(),
    )


def leave_a_process(rank: int) -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def leave_a_thread(rank: int) -> None:
    threading.Thread(target=time.sleep, args=(60,), name="forgotten").start()


def read_environment(rank: int, name: str) -> str | None:
    return os.environ.get(name)


def train_with_ddp(rank: int, folder: str) -> tuple[int, int, float]:
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = BoringModel()
    trainer.fit(module)
    total = sum(parameter.sum().item() for parameter in module.parameters())
    return trainer.global_rank, trainer.world_size, total


def pid(rank: int) -> int:
    return os.getpid()


def _keep_group(rank: int) -> None:
    sys.modules[__name__].__dict__["KEPT"] = dist.group.WORLD


@pytest.mark.parametrize("world_size", [1, 2, 4, 16])
def test_every_call_is_a_world_of_its_own_size(ranks: RankPool, world_size: int) -> None:
    total = 2.0 * sum(range(world_size))
    assert ranks(world_size, add_over_ranks, 2.0) == [total] * world_size


@pytest.mark.alone
def test_warm_calls_reuse_processes_and_cost_little(ranks: RankPool) -> None:
    before = ranks(4, pid)
    costs = []
    for _ in range(10):
        start = time.monotonic()
        assert ranks(4, pid) == before
        costs.append(time.monotonic() - start)
    assert min(costs) < 0.3


@pytest.mark.parametrize("guilty", [0, 2])
def test_an_exception_arrives_with_the_traceback_of_its_rank(ranks: RankPool, guilty: int) -> None:
    with pytest.raises(RankError, match=f"rank {guilty} of 4 raised") as caught:
        ranks(4, raise_on, guilty)
    assert caught.value.rank == guilty
    assert isinstance(caught.value.cause, KeyError)
    assert "in raise_on\n" in str(caught.value)
    assert "KeyError: 'the learning rate'" in str(caught.value)
    assert ranks(4, add_over_ranks, 1.0) == [6.0] * 4


@pytest.mark.parametrize("how", ["raises", "ends"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_only_tells_of_another_is_not_the_one_to_blame(ranks: RankPool, guilty: int, how: str) -> None:
    with pytest.raises(RankError, match="KeyError: 'the learning rate'") as caught:
        ranks(2, fail_after_the_other_has_said_so, guilty, how)
    assert caught.value.rank == guilty
    assert f"rank {guilty} of 2 failed first: it raised KeyError" in str(caught.value)


def test_all_failures_are_shown_in_full_and_a_rank_that_computes_is_waited_for(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 raised") as caught:
        ranks(2, fail_late)
    assert str(caught.value).count('raise KeyError(f"of rank {rank}")') == 2
    assert "KeyError: 'of rank 0'" in str(caught.value)


def test_a_killed_rank_is_named_with_its_signal_and_the_places_of_the_others(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL") as caught:
        ranks(3, kill_self, 1)
    assert time.monotonic() - start < 30
    assert caught.value.rank == 1
    assert str(caught.value).count("in kill_self") == 2
    assert ranks(3, add_over_ranks, 1.0) == [3.0] * 3


def test_a_crash_in_native_code_shows_where_its_rank_was(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 was killed by SIGABRT") as caught:
        ranks(2, crash)
    assert "--- rank 0 was here\nFatal Python error: Aborted" in str(caught.value)
    assert str(caught.value).count("in crash") == 1


def test_a_hang_ends_at_the_time_limit_and_shows_where(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="time limit of 2 s passed on 2 ranks; still running: rank 1") as caught:
        ranks(2, wait_for_ever, 1, timeout=0.5)
    assert time.monotonic() - start < 30
    assert "in wait_for_ever" in str(caught.value)
    assert "--- rank 1 was here" in str(caught.value)
    assert ranks(2, add_over_ranks, 1.0) == [1.0] * 2


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_call(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"return_a_function.*lambda"):
        ranks(2, return_a_function)


def test_output_is_shown_with_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, print_and_raise)
    for rank in range(2):
        assert f"printed by {rank}" in str(caught.value)
        assert f"written by {rank}" in str(caught.value)


def test_output_of_a_good_call_is_printed(ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(1, print_and_raise)
    assert "printed by 0" in capfd.readouterr().out


def test_nothing_a_call_changes_is_seen_by_the_next(ranks: RankPool) -> None:
    before = ranks(2, state_of)
    ranks(2, disturb)
    assert ranks(2, state_of) == before


def test_a_process_left_behind_is_reported_and_ended(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 0 left something behind") as caught:
        ranks(1, leave_a_process)
    assert "(sleep 60)" in str(caught.value)
    assert _ended([pickle.loads(caught.value.reports[0].outcome.result)])


def test_a_thread_left_behind_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="thread 'forgotten'"):
        ranks(1, leave_a_thread)


def test_a_process_whose_groups_live_on_is_replaced(ranks: RankPool) -> None:
    before = ranks(2, pid)
    assert ranks(2, pid) == before
    ranks(2, _keep_group)
    assert not set(ranks(2, pid)) & set(before)


def test_the_environment_of_a_call_can_be_extended(ranks: RankPool) -> None:
    assert ranks(2, read_environment, "SPECIAL", env={"SPECIAL": "yes"}) == ["yes"] * 2
    assert ranks(2, read_environment, "SPECIAL") == [None] * 2
    assert ranks(2, read_environment, "RANK", env={"RANK": None}) == [None] * 2


def test_a_trainer_runs_inside_as_under_torchrun(ranks: RankPool, tmp_path: Path) -> None:
    for _ in range(2):
        results = ranks(2, train_with_ddp, str(tmp_path), backend=None)
        assert [result[:2] for result in results] == [(0, 2), (1, 2)]
        assert results[0][2] == results[1][2]


@pytest.mark.parametrize("world_size", [0, 17])
def test_other_sizes_are_refused(ranks: RankPool, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 16 ranks, got {world_size}"):
        ranks(world_size, pid)


INTERRUPTED = """
from tests.ranks import RankPool
from tests.ranks.test_pool import kill_self, pid
pool = RankPool()
print(*pool(3, pid), pool._server.pid, flush=True)
pool(3, kill_self, 9)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_owns_the_pool(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "owner.py").write_text(INTERRUPTED)
    out = tmp_path / "out"
    owner = start_warm(str(tmp_path / "owner.py"), folder=ROOT, environment=os.environ, out=out, err=tmp_path / "err")
    limit = time.monotonic() + 200
    while not (printed := out.read_text()).endswith("\n"):
        assert time.monotonic() < limit
        time.sleep(0.05)
    pids = [int(word) for word in printed.split()]
    assert all(_alive(one) for one in pids)
    time.sleep(0.2)
    os.kill(owner.pid, number)
    assert owner.wait(60) != 0
    assert len(pids) == 4
    assert _ended(pids)


def _ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 40
    while any(_alive(one) for one in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(_alive(one) for one in pids)


def _alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
