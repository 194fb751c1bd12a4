import os
import threading

from torch.distributed import TCPStore

from lightning_5d.cli.configured import _quiet_rank, run_name


def test_ranks_under_slurm_agree_on_the_name_without_talking():
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2"}
    assert run_name({**step, "SLURM_PROCID": "0"}) == run_name({**step, "SLURM_PROCID": "5"}) == "slurm-17-2"


def test_ranks_under_torchrun_take_the_name_of_the_first():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    names = {}

    def ask(rank):
        names[rank] = run_name({**shared, "RANK": str(rank)})

    late = threading.Thread(target=ask, args=(1,))
    late.start()
    late.join(0.3)
    assert late.is_alive()
    ask(0)
    late.join(100)
    assert names[1] == names[0]
    assert names[0].endswith(f"-{os.getpid()}")


def test_two_runs_that_start_in_the_same_second_have_folders_of_their_own(monkeypatch):
    first = run_name({})
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("time.strftime", lambda pattern: first.rpartition("-")[0] + "-")
    assert run_name({}) != first


def test_only_the_first_of_ranks_started_elsewhere_writes_hydras_files():
    assert _quiet_rank({}) == []
    assert _quiet_rank({"RANK": "0"}) == []
    assert "hydra.output_subdir=null" in _quiet_rank({"RANK": "1"})
    assert "hydra.output_subdir=null" in _quiet_rank({"SLURM_PROCID": "3"})
