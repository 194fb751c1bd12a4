"""Ranks that run the user's script: started from here once for each device, or by torchrun or Slurm."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_5d.launch import job as jobs
from lightning_5d.launch.environment import kept
from lightning_5d.launch.job import PARENT_VARIABLE, Job
from lightning_5d.launch.processes import die_with
from lightning_5d.launch.rendezvous import Rendezvous, default_store, listen
from lightning_5d.launch.signals import take_over_sigterm
from lightning_5d.launch.slurm import check_tasks
from lightning_5d.launch.waiting import progress_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.strategies import ParallelStrategy

_LOOPBACK = "127.0.0.1"


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher, with a port nobody can take, supervision, and an environment that is put back.

    It is also the launcher of ranks that exist already. A second run in the same process, with the same Trainer or
    another of the same size, is a second run of the same job: its ranks are still there.

    Args:
        strategy: The strategy this belongs to; devices, nodes and cluster environment are its.
    """

    # Written against lightning 2.6.6. The base class is what `_call_and_handle_interrupt` looks for on Ctrl-C.

    def __init__(self, strategy: "ParallelStrategy") -> None:
        if strategy.cluster_environment is None:
            raise ValueError("A launcher needs the strategy's cluster environment, which a Trainer sets.")
        super().__init__(strategy.cluster_environment, len(strategy.parallel_devices or []), strategy.num_nodes)  # type: ignore[attr-defined]
        self._job: Job | None = None

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        environment = self.cluster_environment
        check_tasks(environment, self.num_processes, self.num_nodes)
        if trainer is not None:
            take_over_sigterm(trainer)
        with kept(("MASTER_ADDR", "MASTER_PORT")):
            # Some environments write these when they are asked for them; the job keeps them for the run.
            self._job = self._find_or_start()
        self.procs = list(self._job.children.values())

        def run() -> Any:
            _set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)

        return self._job.run(run, lambda: trainer is not None and trainer.received_sigterm, progress_of(trainer))

    def connect(self, backend: str, **options: Any) -> None:
        """Makes the default process group; called by the strategy inside `launch`.

        Args:
            backend: `"gloo"`, `"nccl"`, …
            options: Passed to `torch.distributed.init_process_group`: `timeout`, `device_id`.
        """
        if self._job is None:
            raise RuntimeError("A process group is made inside of `launch`.")
        self._job.connect(backend, **options)

    def finish(self) -> None:
        """Called by the strategy at the end of its teardown: after a failure, nothing hurries this process any more."""
        if self._job is not None:
            self._job.finish()

    def _find_or_start(self) -> Job:
        environment, world_size = self.cluster_environment, self.num_processes * self.num_nodes
        job = jobs.current()
        if world_size == 1:
            if job is None or job.key != ("alone",):
                # A rank of a larger job may train alone in between; its job stays what it is.
                alone = Job(("alone",), Rendezvous(_LOOPBACK, 0, 0, 1), {})
                if job is None:
                    jobs.enter(alone)
                return alone
            return job
        if environment.creates_processes_externally:
            return self._join(environment, world_size, job)
        key = ("script", _hydra_job(), self.num_nodes)
        if job is not None:
            if job.children and job.key == key:
                return _still_there(job, world_size)
            jobs.forget()
        return self._start(environment, world_size, key)

    def _join(self, environment: "ClusterEnvironment", world_size: int, job: Job | None) -> Job:
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # The strategy says so later, too: `LightningEnvironment` has no other way to know its rank.
        rank = environment.node_rank() * self.num_processes + environment.local_rank()
        environment.set_global_rank(rank)
        environment.set_world_size(world_size)
        rank = environment.global_rank()
        host, port = environment.main_address, environment.main_port
        key = ("external", host, port, rank, os.environ.get("TORCHELASTIC_RUN_ID"))
        if job is not None and job.key == key:
            if job.rendezvous.world_size != world_size:
                raise MisconfigurationException(_other_size(job.rendezvous.world_size, world_size))
            return job
        if job is not None:
            jobs.forget()
        parent = jobs.parent_of_ranks()
        if parent is not None:
            die_with(parent)
        elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != 1:
            die_with(os.getppid(), kernel=False)
        hosting = store = None
        if dist.is_initialized():
            # The user's own process group: its store is there, and may well listen on MASTER_PORT.
            store = default_store()
        elif rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            hosting, port = listen(host, port)
        values = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        job = Job(key, Rendezvous(host, port, rank, world_size, hosting, store), values)
        jobs.enter(job)
        return job

    def _start(self, environment: "ClusterEnvironment", world_size: int, key: tuple[object, ...]) -> Job:
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        node = environment.node_rank()
        if self.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            raise MisconfigurationException(
                f"num_nodes={self.num_nodes} without a launcher needs MASTER_ADDR, MASTER_PORT and NODE_RANK set on each node;"
                f" {', '.join(sorted({'MASTER_ADDR', 'MASTER_PORT'} - set(os.environ)))} is missing. torchrun and srun set them."
            )
        host = os.environ.get("MASTER_ADDR", _LOOPBACK)
        port = int(os.environ.get("MASTER_PORT", 0))
        hosting = None
        if node == 0:
            hosting, port = listen(host, port)
        values = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "NODE_RANK": str(node),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(world_size),
        }
        if hasattr(environment, "_main_port"):
            # `LightningEnvironment` keeps the first port it ever read, also when that job is over.
            environment._main_port = port
        first = node * self.num_processes
        job = Job(key, Rendezvous(host, port, first, world_size, hosting), values)
        jobs.enter(job)
        for local_rank in range(1, self.num_processes):
            job.children[first + local_rank] = _start_script(local_rank, values)
        return job


def _start_script(local_rank: int, values: dict[str, str]) -> subprocess.Popen[bytes]:
    from hydra.core.hydra_config import HydraConfig

    command: Sequence[str]
    folder: str | None
    if HydraConfig.initialized():
        command, folder = _hydra_subprocess_cmd(local_rank)
        if "--multirun" in command or "-m" in sys.argv[1:]:
            command = _one_job(local_rank)
    else:
        command, folder = _basic_subprocess_cmd(), None
    environment = {**os.environ, **values, "LOCAL_RANK": str(local_rank), PARENT_VARIABLE: str(os.getpid())}
    return subprocess.Popen(command, env=environment, cwd=folder)


def _one_job(local_rank: int) -> list[str]:
    """The command that repeats only this job of a sweep: with the sweep's own arguments a rank would start all of it."""
    from hydra.core.hydra_config import HydraConfig

    config = HydraConfig.get()
    flags, words = [], iter(sys.argv[1:])
    for word in words:
        if word in ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"):
            flags += [word, next(words, "")]
        elif word.startswith("--config-"):
            flags.append(word)
    # As Lightning writes them for a single run: the same folder, and no second copy of the configuration in it.
    return [
        *_basic_subprocess_cmd()[: -len(sys.argv[1:]) or None],
        *flags,
        *config.overrides.task,
        f'hydra.run.dir="{config.runtime.output_dir}"',
        f"hydra.job.name=train_ddp_process_{local_rank}",
        "hydra.output_subdir=null",
    ]


def _hydra_job() -> str | None:
    """What tells one job of a Hydra sweep from the next, all of which run in this process."""
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.output_dir) if HydraConfig.initialized() else None


def _still_there(job: Job, world_size: int) -> Job:
    ended = [rank for rank, child in job.children.items() if child.poll() is not None]
    if ended:
        raise MisconfigurationException(
            f"The ranks this script has started have ended (rank {', '.join(map(str, ended))}), so a second run cannot use"
            " them, and starting the script again would repeat the first one. To run several jobs from one process use"
            ' FiveD(start_method="forkserver") or "spawn".'
        )
    if job.rendezvous.world_size != world_size:
        raise MisconfigurationException(_other_size(job.rendezvous.world_size, world_size))
    return job


def _other_size(running: int, wanted: int) -> str:
    return (
        f"This process is one of {running} ranks, and this Trainer wants {wanted}. A script's ranks stay what they are: use"
        f' devices x num_nodes = {running} or 1, or FiveD(start_method="forkserver") or "spawn", which starts new ranks for each'
        " run."
    )
