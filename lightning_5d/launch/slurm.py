"""Slurm's idea of the number of ranks against the Trainer's, before anything waits."""

import os
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment


def check_tasks(environment: "ClusterEnvironment", devices: int, num_nodes: int) -> None:
    """Compare the tasks that Slurm has started with the ranks the Trainer wants.

    Lightning 2.6.6 compares `--ntasks-per-node` and `--nodes` only when these were given: a plain `srun python` with
    `devices=3` waits for two ranks that nobody starts.

    Raises:
        MisconfigurationException: If they differ.
    """
    if not isinstance(environment, SLURMEnvironment) or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return
    tasks = int(os.environ.get("SLURM_NTASKS", 1))
    if tasks == devices * num_nodes:
        return
    nodes = int(os.environ.get("SLURM_NNODES", num_nodes))
    per_node = tasks // nodes if nodes and tasks % nodes == 0 else None
    fits = f"devices={per_node}, num_nodes={nodes}" if per_node else f"a Trainer of {tasks} ranks"
    raise MisconfigurationException(
        f"Slurm has started {tasks} tasks (SLURM_NTASKS), the Trainer wants devices x num_nodes = {devices} x {num_nodes} ="
        f" {devices * num_nodes} ranks. Start one task for each rank (srun --nodes={num_nodes} --ntasks-per-node={devices}), or"
        f" use {fits}. In an interactive allocation without srun, name the job 'interactive', and the ranks are started"
        " from here."
    )
