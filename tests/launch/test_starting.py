"""Ports, environment, and several runs in one process."""

import os
import socket
import time
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_5d import FiveD, ZeRO
from lightning_5d.launch import RankFailure, supervisor
from lightning_5d.launch.rendezvous import listen
from tests.launch.running import HERE, TORCHRUN, run, start
from tests.ranks import RankError, RankPool
from tests.ranks.warm import run_warm

LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOBAL_RANK", "RANK")


def make_trainer(devices: int, folder: Path, method: str = "forkserver", **options: object) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FiveD(ZeRO(stage=1), start_method=method),
        max_steps=3,
        limit_val_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


class Failing(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> object:
        if self.trainer.global_rank == 1:
            raise KeyError("the planned failure")
        return super().training_step(batch, batch_idx)


class Logging(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss, sync_dist=True)
        self.log("world", float(self.trainer.world_size))
        return loss


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_runs_of_2_then_4_then_1_ranks_with_a_failure_between(tmp_path: Path) -> None:
    before = dict(os.environ)
    for devices in (2, 4):
        trainer = make_trainer(devices, tmp_path)
        module = Logging()
        start_weight = module.layer.weight.detach().clone()
        trainer.fit(module)
        assert trainer.callback_metrics["world"] == devices
        assert trainer.checkpoint_callback.best_model_path
        assert type(module.layer.weight) is torch.nn.Parameter
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
        torch.testing.assert_close(saved["layer.weight"], module.layer.weight.detach(), rtol=0, atol=0)
        assert not torch.equal(module.layer.weight, start_weight)
        assert dict(os.environ) == before
        if devices == 2:
            with pytest.raises(RankFailure, match=r"rank 1 of 2 failed first: it raised KeyError") as caught:
                make_trainer(2, tmp_path).fit(Failing())
            assert caught.value.failure.rank == 1
            assert "in training_step" in str(caught.value)
            assert dict(os.environ) == before
    alone = make_trainer(1, tmp_path, "popen")
    alone.fit(Logging())
    assert (alone.world_size, alone.callback_metrics["world"]) == (1, 1)
    # One rank stays one: its process group is kept for the next run, and makes way for a larger job.
    assert {name: os.environ.get(name) for name in LAUNCH} == {name: before.get(name) for name in LAUNCH}
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_forked_rank_that_never_gets_to_run_is_named(tmp_path: Path) -> None:
    code, printed = run_warm(str(HERE / "forked_while_locked.py"), folder=tmp_path, environment=os.environ, seconds=60)
    assert code == 0
    assert 'rank 1 of 2 failed first: it was started by "fork" and has given no sign of life for 3 s' in printed
    assert 'use start_method="popen" or "forkserver"' in printed


def test_three_scripts_started_at_once_all_end_well(tmp_path: Path) -> None:
    jobs = [start(tmp_path) for _ in range(3)]
    for job in jobs:
        done = job.wait(300)
        assert done.code == 0, done.err
        assert {rank: report["steps"] for rank, report in done.reports.items()} == {0: 4, 1: 4}, done.out + done.err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("then", ["test", "again"])
def test_a_second_run_in_a_script_uses_the_same_ranks(tmp_path: Path, then: str) -> None:
    done = run(tmp_path, "--then", then)
    assert done.code == 0, done.err
    assert set(done.reports) == {0, 1}
    for rank, report in done.reports.items():
        assert report["leaked"] == {}
        assert report.get("tested", True)
        assert report.get("again", [rank, 2, 4]) == [rank, 2, 4]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_second_run_of_another_size_in_a_script_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--then", "3")
    assert done.code == 0, done.err
    assert "one of 2 ranks, and this Trainer wants 3" in done.reports[0]["error"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_runs_twice_in_one_process(tmp_path: Path) -> None:
    done = run(tmp_path, "--then", "again", launcher=TORCHRUN)
    assert done.code == 0, done.err
    assert {rank: report["again"] for rank, report in done.reports.items()} == {0: [0, 2, 4], 1: [1, 2, 4]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_port_set_by_the_user_is_kept_and_a_busy_one_named(tmp_path: Path) -> None:
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            busy = run(tmp_path, env={"MASTER_PORT": port})
            in_use = f"Port {port} (MASTER_PORT) on 127.0.0.1 is in use"
            assert busy.code != 0
            assert in_use in busy.err
        free = run(tmp_path, env={"MASTER_PORT": port})
        if in_use not in free.err:  # else somebody else has got it in between
            break
    assert free.code == 0, free.err
    assert free.reports[0]["leaked"] == {}


def test_ports_chosen_here_belong_to_their_store_at_once() -> None:
    stores = [listen("127.0.0.1", 0) for _ in range(8)]
    assert len({port for _, port in stores}) == 8
    with pytest.raises(MisconfigurationException, match=f"Port {stores[0][1]} "):
        listen("127.0.0.1", stores[0][1])


def fit_twice(rank: int, folder: str) -> list[tuple[int, int, int]]:
    found = []
    for _ in range(2):
        trainer = make_trainer(2, Path(folder), "popen", enable_checkpointing=False)
        trainer.fit(BoringModel())
        found.append((trainer.global_rank, trainer.world_size, trainer.global_step))
    return found


def test_ranks_started_by_others_are_used(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, fit_twice, str(tmp_path), backend=None) == [[(0, 2, 3)] * 2, [(1, 2, 3)] * 2]


def fail_on_rank_1(rank: int, folder: str) -> str:
    try:
        make_trainer(2, Path(folder), "popen", enable_checkpointing=False).fit(Failing())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_waits_for_a_failed_one_is_ended_with_the_reason(ranks: RankPool, tmp_path: Path) -> None:
    # Rank 1 catches its error and stays, so that its connections do not close: nothing else would wake rank 0.
    with pytest.raises(RankError, match="rank 0 of 2 ended its process with exit code 1") as caught:
        ranks(2, fail_on_rank_1, str(tmp_path), backend=None)
    assert "rank 1: returned" in str(caught.value)
    assert "KeyError: 'the planned failure'\n--- end of rank 1's traceback" in str(caught.value)


class Refusing(BoringModel):
    """Each rank finds out by itself; rank 0 computes for longer than one that waits would be left alone."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> object:
        limit = time.process_time() + 3 * supervisor.GRACE_SECONDS * (self.trainer.global_rank == 0)
        while time.process_time() < limit:
            torch.ones(100, 100) @ torch.ones(100, 100)
        raise KeyError("found by each")


def refused_on_each(rank: int, folder: str) -> str:
    trainer = make_trainer(2, Path(folder), "popen", enable_checkpointing=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "GRACE_SECONDS", 1.0)
        # On a busy machine three seconds of a processor may take longer than a rank has in all.
        patch.setattr(supervisor, "LAST_WORDS_SECONDS", 25.0)
        with pytest.raises(KeyError, match="found by each") as caught:
            trainer.fit(Refusing())
    return caught.value.__notes__[-1]


def test_a_rank_that_still_computes_is_left_to_fail_by_itself_with_its_own_error(
    ranks: RankPool, tmp_path: Path
) -> None:
    alike, first = ranks(2, refused_on_each, str(tmp_path), backend=None)
    assert alike == "[rank 1 of 2 failed first, and alike]"
    assert first == "[rank 1 of 2 failed first]"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_job_of_a_sweep_has_ranks_of_its_own(tmp_path: Path) -> None:
    done = run(tmp_path, "+x=1,2", "--multirun", script="sweep.py", seconds=300)
    assert done.code == 0, done.err
    lines = sorted(line for line in done.out.splitlines() if line.startswith("DONE"))
    assert lines == [f"DONE job {job} rank {rank} of 2" for job in (1, 2) for rank in (0, 1)]
    assert len(list(tmp_path.glob("multirun/*/*/*/.hydra/config.yaml"))) == 2
    assert done.job.left_after(25) == []


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n1",
}


@pytest.mark.parametrize(
    ("changes", "devices", "numbers"),
    [
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": None}, 3, ["1 tasks", "3 x 1", "3 ranks"]),
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"}, 2, ["1 tasks", "2 ranks"]),
        ({}, 3, ["2 tasks", "3 ranks", "devices=2, num_nodes=1"]),
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, 2, ["4 tasks", "2 ranks", "devices=2, num_nodes=2"]),
    ],
)
def test_slurm_tasks_that_do_not_fit_are_named_before_anything_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, str | None], devices: int, numbers: list[str]
) -> None:
    for name, value in {**SLURM, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException) as caught:
        make_trainer(devices, tmp_path, "popen")
    for number in numbers:
        assert number in str(caught.value)


def test_an_interactive_slurm_shell_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**SLURM, "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(3, tmp_path, "popen")
    assert not isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    assert not trainer.strategy.cluster_environment.creates_processes_externally
