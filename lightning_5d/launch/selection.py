"""Which launcher a strategy gets."""

from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_5d.launch.in_process import InProcessLauncher
from lightning_5d.launch.script import ScriptLauncher
from lightning_5d.launch.slurm import check_tasks

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy


def launcher_for(strategy: "ParallelStrategy", start_method: str) -> ScriptLauncher | InProcessLauncher:
    """The launcher for `strategy`, called when a Trainer configures it.

    Args:
        strategy: With devices and cluster environment set.
        start_method: `"popen"`, `"spawn"`, `"forkserver"` or `"fork"`. It says nothing when ranks exist already: under
            torchrun or srun.

    Raises:
        MisconfigurationException: If Slurm has started another number of tasks than the Trainer wants ranks, or
            `start_method` needs one node and there are several.
    """
    environment = strategy.cluster_environment
    if environment is None:
        raise ValueError("A launcher needs the strategy's cluster environment, which a Trainer sets.")
    num_nodes = strategy.num_nodes  # type: ignore[attr-defined]
    devices = len(strategy.parallel_devices or [])
    check_tasks(environment, devices, num_nodes)
    if start_method == "popen" or environment.creates_processes_externally:
        return ScriptLauncher(strategy)
    if num_nodes > 1:
        raise MisconfigurationException(
            f'start_method="{start_method}" starts ranks on one node, the Trainer wants num_nodes={num_nodes}. Use torchrun or'
            ' srun, or start_method="popen" with MASTER_ADDR, MASTER_PORT and NODE_RANK set on each node.'
        )
    if not isinstance(environment, LightningEnvironment):
        raise MisconfigurationException(
            f'start_method="{start_method}" works with Lightning\'s own cluster environment, not with'
            f' {type(environment).__name__}. Use start_method="popen".'
        )
    return InProcessLauncher(strategy, start_method)
