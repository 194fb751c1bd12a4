"""`FiveD`: the Lightning strategy. It calls the hooks of its plugins in a fixed order and knows nothing of any axis."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import nn
from typing_extensions import override

from lightning_5d.absent import Absent
from lightning_5d.activation_checkpointing import ActivationCheckpointing, activation_checkpointing_of, restore
from lightning_5d.batches import even_loader
from lightning_5d.checkpoint.full_state import contains_sharded
from lightning_5d.communication import point_metrics_to
from lightning_5d.data_parallel.zero import ZeRO
from lightning_5d.expert_parallel.expert import ExpertParallel
from lightning_5d.initialization import materialize, meta_tensors, synchronize_values
from lightning_5d.logs import attach as attach_logs
from lightning_5d.mesh import DATA_AXES, ParallelMesh, resolve_sizes
from lightning_5d.parallelism import Parallelism, Parallelized, Problem, RunContext, plugin_problems, raise_problems
from lightning_5d.plan import ParallelPlan, find_plan
from lightning_5d.precision import FiveDPrecision, fived_precision
from lightning_5d.samplers import deal_rows_once
from lightning_5d.steps import ParallelSteps
from lightning_5d.whole_summary import WholeSummaries

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import Callback

    from lightning_5d.launch.in_process import InProcessLauncher
    from lightning_5d.launch.script import ScriptLauncher

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_START_METHODS = ("popen", "spawn", "fork", "forkserver")
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class FiveD(ParallelSteps):
    """Trains an unchanged LightningModule under any mixture of parallelisms.

    ```python
    trainer = L.Trainer(devices=8, strategy=FiveD(ZeRO(stage=1)))
    trainer.fit(module, datamodule)
    ```

    Args:
        *plugins: One plugin per axis, in any order. Without a data plugin the rest of the world is plain data parallel.
        timeout: Longest wait in any collective, as a timedelta or in seconds.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; what torch has for the device if ``None``.
        start_method: How ranks come to be when nobody else starts them: ``"popen"`` runs the script again for each (the
            default); ``"spawn"``, ``"forkserver"`` and ``"fork"`` start them from this process, for notebooks and tests.
            Under torchrun or Slurm they exist already, and this says nothing.
        plan: Where the module may be cut; found by itself if ``None`` (see `ParallelPlan`).
        activation_checkpointing: What is computed again in backward instead of kept: ``"full"``, ``"selective"``, a memory
            budget from 0 to 1, or an `ActivationCheckpointing`.
        accelerator, cluster_environment, checkpoint_io, precision_plugin: As in Lightning's strategies.

    Raises:
        MisconfigurationException: If settings do not work together; one error that lists all of them. Raised when the
            `Trainer` is made, before any process is started, where the numbers are known by then.
    """

    strategy_name = "fived"
    is_distributed = True

    def __init__(
        self,
        *plugins: Parallelism,
        timeout: timedelta | float | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        plan: ParallelPlan | None = None,
        activation_checkpointing: ActivationCheckpointing | str | float | Mapping[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        checkpointing, problems = activation_checkpointing_of(activation_checkpointing)
        plugins = (*plugins, *checkpointing)
        problems += plugin_problems(plugins)
        if start_method not in _START_METHODS:
            problems.append(
                Problem(f"start_method={start_method!r} is unknown.", f"Use one of {', '.join(_START_METHODS)}.")
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            problems.append(Problem(f"timeout={timeout!r} is not a positive time.", "Give seconds or a timedelta."))
        raise_problems(problems)
        self._configured = False
        self._precision_problems: list[Problem] = []
        self._own_accelerator: Accelerator | None = None
        super().__init__(cluster_environment=cluster_environment, checkpoint_io=checkpoint_io)
        if precision_plugin is not None:
            self.precision_plugin = precision_plugin
        if accelerator is not None:
            self._own_accelerator = accelerator
        if not any(plugin.axis == ZeRO.axis for plugin in plugins):
            plugins = (*plugins, ZeRO(stage=0))
        self.plugins: tuple[Parallelism, ...] = tuple(sorted(plugins, key=lambda plugin: plugin.order))
        # Not asked for, so nobody is told of it: what experts of several ranks have in common is needed wherever they are.
        self._unasked = () if any(plugin.axis == ExpertParallel.axis for plugin in plugins) else (ExpertParallel(1),)
        self.num_nodes = 1
        self._timeout = _DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
        self._process_group_backend = process_group_backend
        self._start_method: StartMethod = start_method
        self._plan = plan
        self._ranks: ScriptLauncher | InProcessLauncher | None = None
        self._mesh: ParallelMesh | None = None
        self._setup_module: nn.Module | None = None
        self._summaries: WholeSummaries | None = None
        self._asked: list[Parallelized] = []
        self._watching = ExitStack()

    # Configuration: before processes exist

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._own_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        # The first thing a Trainer does to its strategy, so the place to notice a second Trainer. (`_accelerator` stays
        # empty: Lightning would read it there and complain about something else.)
        if self._configured:
            raise MisconfigurationException(
                "This FiveD object already belongs to another Trainer. Make a new FiveD(...) for each Trainer; plugins such"
                " as ZeRO(stage=1) may be shared."
            )
        self._own_accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> FiveDPrecision:
        if not isinstance(self._precision_plugin, FiveDPrecision):  # the connector asks before it has given one
            return FiveDPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            precision_plugin, self._precision_problems = fived_precision(precision_plugin)
            precision_plugin.attach(self)
        self._precision_plugin = precision_plugin

    @override
    def _configure_launcher(self) -> None:
        from lightning_5d.launch import launcher_for

        context, problems = self._run_context()
        for plugin in self.plugins:
            problems += plugin.validate(context)
        raise_problems(problems + self._precision_problems)
        self._configured = True
        self._launcher = self._ranks = launcher_for(self, self._start_method)

    def _run_context(self, module: nn.Module | None = None) -> tuple[RunContext, list[Problem]]:
        world = self.num_nodes * self.num_processes
        sizes, problems = resolve_sizes(world, self.plugins)
        device, plugin = self.root_device.type, self.precision_plugin
        precision, dtypes = str(plugin.precision), plugin.dtypes
        return RunContext(world, self.num_nodes, device, precision, sizes, module, self._plan, dtypes), problems

    @property
    def plan(self) -> ParallelPlan | None:
        """Where the module may be cut, if that was given."""
        return self._plan

    @property
    def start_method(self) -> StartMethod:
        """How ranks come to be when nobody else starts them; may be set until a Trainer takes this object."""
        return self._start_method

    @start_method.setter
    def start_method(self, method: StartMethod) -> None:
        if self._configured:
            raise MisconfigurationException("start_method cannot change once a Trainer has taken this FiveD object.")
        self._start_method = method

    # Processes

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank] if self.local_rank < len(devices) else devices[0]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str:
        """The backend of the process groups."""
        return self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)

    @property
    def mesh(self) -> ParallelMesh:
        """The ranks by axis.

        Raises:
            RuntimeError: Before `setup_environment` has run.
        """
        if self._mesh is None:
            raise RuntimeError("The mesh exists once processes have started, from the `setup` hooks on.")
        return self._mesh

    def set_world_ranks(self) -> None:
        """Tells Lightning this process's rank."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self.global_rank != 0:
            # Lightning 2.6.6 asks torch 2.13 in a way that torch will drop; rank 0 says so once.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        expected = self.num_nodes * self.num_processes
        if dist.is_initialized() and dist.get_world_size() != expected:
            raise MisconfigurationException(
                f"torch.distributed already runs with {dist.get_world_size()} ranks, this Trainer wants {expected}. Use"
                f" devices x num_nodes = {dist.get_world_size()}, or call torch.distributed.destroy_process_group() first."
            )
        device = self.root_device
        if self._ranks is None:
            raise RuntimeError("`setup_environment` needs a Trainer, which configures the launcher.")
        self._ranks.connect(
            self.process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        context, problems = self._run_context(self.lightning_module)
        raise_problems(problems)
        if self._mesh is None:
            self._mesh = ParallelMesh.create(context.sizes, device.type, self._timeout)
            # The mesh alone has no word of experts, which take no ranks of their own, nor of what a stage of ZeRO shards.
            rank_zero_info(f"{self!r}: {self._mesh.describe()}")
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._mesh.device_mesh  # for `configure_model`, as Lightning documents
            deal_rows_once(self.lightning_module.trainer)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.size(*DATA_AXES), "rank": self.mesh.rank(*DATA_AXES)}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        predicting = self.connected_module.trainer.state.stage == RunningStage.PREDICTING
        loader, uneven = even_loader(dataloader, self.mesh, self.root_device, predicting=predicting)
        self.uneven_prediction |= predicting and uneven
        return loader

    # Setup of the module

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            self.precision_plugin.settle_states(optimizer)

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            device = self.root_device
            self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Values of meta tensors are made in `setup`, sharded.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self._watching.close()
        self._watching.enter_context(self._own_backwards.watched())
        fitting = trainer.state.fn == TrainerFn.FITTING
        module = self.connected_module
        if self._setup_module is not module:
            self._parallelize(module, fitting)
        if fitting:
            if self._summaries is not None:
                self._summaries.hand_out(_callbacks(trainer))
            self._reset_optimizers()
            with ExitStack() as contexts:
                for applied in self.parallelized:
                    contexts.enter_context(applied.optimizer_context())
                self.setup_optimizers(trainer)
            raise_problems([p for applied in self.parallelized for p in applied.optimizer_problems(self.optimizers)])
        self.setup_precision_plugin()
        scheduling = self._scheduling
        self._post = scheduling.post_validation(self) if fitting and scheduling is not None else None
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        if self.world_size > 1 and self.logs is None:
            self.logs = attach_logs(trainer, self.mesh, self.root_device, self._timeout)
        if self.logs is not None:
            self.logs.without_waiting = self._post is not None

    def _parallelize(self, module: pl.LightningModule, fitting: bool) -> None:
        problems = []
        if contains_sharded(module) or any(isinstance(child, Absent) for child in module.modules()):
            problems.append(
                Problem(
                    "The module is already sharded, or cut into stages, by another Trainer or by its own code.",
                    "Go on with the same Trainer, or make a new module (its weights can come from a checkpoint).",
                )
            )
        if fitting and not any(True for _ in module.parameters()):
            problems.append(
                Problem(
                    f"{type(module).__name__} has no parameters, so there is nothing to train.",
                    "Make its layers in __init__ or configure_model and assign them to self.",
                )
            )
        context, more = self._run_context(module)
        problems += more
        for plugin in self.plugins:
            problems += plugin.validate(context)
        raise_problems(problems)
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        precision = self.precision_plugin
        self.model = precision.convert_module(module)
        self.model_to_device()
        synchronize_values(module)
        plan = find_plan(module, self._plan)
        for applied in self.parallelized:
            applied.close()
        restore(module)  # what another Trainer's strategy may have left
        # Where ranks share a batch, each may hold a part of the module; elsewhere what Lightning finds is the whole one.
        self._summaries = (
            WholeSummaries(module, _callbacks(module.trainer)) if self.mesh.replica_group is not None else None
        )
        precision.cast_activations(module, [module.get_submodule(name) for name in plan.block_names(module)])
        unasked = [plugin.surveyed(module, plan) for plugin in self._unasked if plugin.has_work(module)]
        plugins = [*(plugin.surveyed(module, plan) for plugin in self.plugins), *unasked]
        plugins.sort(key=lambda plugin: plugin.order)
        self.parallelized = [plugin.parallelize(module, plan, self.mesh, precision.dtypes) for plugin in plugins]
        self._asked = [
            at_work for plugin, at_work in zip(plugins, self.parallelized, strict=True) if plugin not in unasked
        ]
        for applied in reversed(self.parallelized):
            applied.all_at_work(self.parallelized)
        if meta_tensors(module):
            materialize(module, self.root_device, forms=self.forms.by_name)
        self._setup_module = module
        point_metrics_to(module, self.mesh.data_group)

    def _reset_optimizers(self) -> None:
        self._optimizers, self._lightning_optimizers, self.lr_scheduler_configs = [], [], []

    def shares_of_work(self) -> dict[nn.Module, float]:
        """Modules of which other ranks do the same operations, or parts of them; see `Parallelized.shares_of_work`."""
        shares: dict[nn.Module, float] = {}
        for applied in reversed(self.parallelized):
            shares.update(applied.shares_of_work())
        return shares

    # The end

    @override
    def teardown(self) -> None:
        if self._post is not None:
            self._post.drop()
        self._evaluation.close()
        self._schedules.close()
        self._watching.close()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        if self._ranks is not None:
            self._ranks.finish()

    def describe(self) -> str:
        """What the strategy does, for people: the mesh, the plugins, and what each axis has made of the module.

        The mesh is known from the `setup` hooks on, and the axes are at work once the strategy has been set up, as in `on_fit_start`; before
        that their places say so. No communication: each rank may call it by itself, and describes itself.
        """
        lines = [f"Mesh: {self._mesh.describe() if self._mesh is not None else 'none yet, processes have not started'}"]
        applied: Sequence[Parallelized | None] = self._asked or [None] * len(self.plugins)
        for plugin, at_work in zip(self.plugins, applied, strict=True):
            lines += ["", f"{plugin.axis}: {plugin.short()}"]
            if at_work is None:
                lines[-1] += ", not at work yet"
            elif report := at_work.describe():
                lines += ["", report]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FiveD({', '.join(plugin.short() for plugin in self.plugins)})"


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return getattr(trainer, "callbacks", [])
