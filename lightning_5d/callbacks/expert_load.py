"""How evenly routers use the experts of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_5d.absent import Absent
from lightning_5d.expert_parallel.load import ExpertLoads, count_by_hooks
from lightning_5d.expert_parallel.load_chart import draw_loads
from lightning_5d.expert_parallel.load_history import Load, LoadHistory
from lightning_5d.names import class_name
from lightning_5d.strategy import FiveD

BIASES = ("expert_bias", "e_score_correction_bias")
"""What routers call what they add to choose by: the project's own, and Hugging Face's."""


class ExpertLoad(L.Callback):
    """Logs how many tokens each expert of each MoE layer gets, and draws it as heat maps.

    Counted are the choices of all routers for the tokens of training steps, over all ranks and microbatches, each token once; not those of
    validation. One collective brings the numbers of all layers to every rank, also of layers on other stages of a pipeline.

    | name | what |
    |---|---|
    | `expert_load/imbalance`, `expert_load/imbalance_worst` | tokens of the busiest expert over the mean (1 is balanced): mean and maximum over layers |
    | `expert_load/LAYER/imbalance` | the same of one layer |
    | `expert_load/dropped`, `expert_load/dropped_worst` | share of choices that were left out as experts were full: of all, and of the worst layer |
    | `expert_load/bias_spread` | largest less smallest bias of a router, maximum over layers; where routers have one |

    Files, on rank 0: ``expert_load.csv`` (a line per layer and step), ``expert_load.json`` (every expert's tokens, dropped ones and
    bias) and ``expert_load.png``. After `columns` readings neighbours are put together, so that a long run takes no more memory.

    Works under `FiveD`, and else with experts as Hugging Face has them or this package (`experts(hidden, index, weights)`), under one
    device and data-parallel strategies.

    Args:
        every_n_steps: Optimizer steps that one reading, and what is logged of it, covers. A reading waits for an accelerator.
        chart: Whether to draw.
        dirpath: For the files; ``experts`` in the Trainer's log folder if ``None``.
        write_every_n_steps: Write files also after each so many steps, not only at the end; ``None`` for the end alone.
        columns: How many points in time are kept, an even number.
        title: Of the chart; the model and the strategy if ``None``.

    Raises:
        MisconfigurationException: If a setting does not work; when training begins, if the model has no experts.
    """

    leaves_gradients_alone = True

    def __init__(
        self,
        every_n_steps: int = 1,
        *,
        chart: bool = True,
        dirpath: str | Path | None = None,
        write_every_n_steps: int | None = None,
        columns: int = 200,
        title: str | None = None,
    ) -> None:
        bounds = {
            "every_n_steps": (every_n_steps, 1),
            "write_every_n_steps": (write_every_n_steps, 1),
            "columns": (columns, 2),
        }
        wrong = [
            f"{name}={value!r} must be a whole number of at least {least}."
            for name, (value, least) in bounds.items()
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least)
        ]
        if wrong:
            raise MisconfigurationException("ExpertLoad: " + " ".join(wrong))
        self.every_n_steps, self.write_every_n_steps = every_n_steps, write_every_n_steps
        self.chart, self.title = chart, title
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.columns = columns + columns % 2
        self.history: LoadHistory | None = None
        self.files: list[Path] = []
        self._restored: dict[str, Any] | None = None
        self._loads: ExpertLoads | None = None
        self._handles: list[RemovableHandle] = []
        self._biases: dict[str, tuple[nn.Module, str]] = {}
        self._read_at = self._written_at = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loads so far."""
        return {} if self.history is None else self.history.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self._restored = state_dict or None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a model without experts, if it is built already."""
        if stage == "fit" and any(True for _ in pl_module.parameters()):
            _layers_of(pl_module)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the experts."""
        self._end()
        self._loads = _counted_by_axis(trainer)
        if self._loads is None:
            found = _layers_of(pl_module)
            self._loads = ExpertLoads.of(found)
            self._handles = count_by_hooks(self._loads, found)
        self._biases = {
            name: bias
            for name, layer in self._loads.items()
            if (bias := bias_of(pl_module, name, layer.experts)) is not None
        }
        self.history = self._history({name: layer.experts for name, layer in self._loads.items()})
        self._read_at = self._written_at = trainer.global_step
        if self.dirpath is None:
            self.dirpath = Path(trainer.log_dir or trainer.default_root_dir) / "experts"
        self.title = self.title or f"{class_name(pl_module)}, {type(trainer.strategy).__name__}"

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """What runs from here on is training."""
        if self._loads is not None:
            self._loads.counting = True

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the loads, if steps are over, and log and write them if it is time."""
        if self._loads is None or self.history is None:
            return
        self._loads.counting = False
        if trainer.global_step - self._read_at < self.every_n_steps:
            return
        metrics = self._read(trainer)
        own_pace = self.every_n_steps > 1  # else a reading may never fall on a step at which the Trainer logs
        pl_module.log_dict(metrics, logger=bool(trainer.loggers) and not own_pace, on_step=True, on_epoch=False)
        if own_pace:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step - 1)  # Lightning's own are counted from 0
        if self.write_every_n_steps and trainer.global_step - self._written_at >= self.write_every_n_steps:
            self._write(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what is left, write, and say what came out."""
        if self._loads is None or self.history is None:
            return
        if trainer.global_step > self._read_at:
            self._read(trainer)
        self._end()
        self._write(trainer)
        if self.history.columns:
            rank_zero_info(self.summary())

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Count no further, and keep what there is; other ranks may be in another place, so nobody is waited for."""
        if self._loads is not None:
            self._end()
            self._write(trainer)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let go of the module."""
        self._end()

    def summary(self) -> str:
        """The imbalance at first and at last, and the worst layer."""
        if self.history is None or not self.history.columns:
            return "Experts: nothing has been read yet."
        first, last = (_mean(self.history.columns[place].imbalance.values()) for place in (0, -1))
        worst, value = max(
            self.history.columns[-1].imbalance.items(), key=lambda item: -1.0 if math.isnan(item[1]) else item[1]
        )
        return (
            f"Experts: the busiest has {last:.2f} times the mean (at first {first:.2f}); worst in {worst}, {value:.2f}."
        )

    def _history(self, layers: Mapping[str, int]) -> LoadHistory:
        state, self._restored = self._restored, None
        if state is not None:
            if state["layers"] == dict(layers):
                return LoadHistory.from_state(state, self.columns)
            rank_zero_warn("ExpertLoad: the checkpoint is of a model with other experts; their loads begin anew.")
        return LoadHistory(layers, self.columns)

    def _end(self) -> None:
        if self._loads is not None:
            self._loads.counting = False
        for handle in self._handles:
            handle.remove()
        self._handles, self._loads, self._biases = [], None, {}

    def _read(self, trainer: L.Trainer) -> dict[str, float]:
        """Loads of all ranks since the last reading, put into the history, and what to log of them; every rank calls it."""
        if self._loads is None or self.history is None:
            return {}
        loads = self._together(self._loads, trainer)
        self.history.add(self._read_at + 1, trainer.global_step, loads)
        self._read_at = trainer.global_step
        return metrics_of(loads)

    def _together(self, loads: ExpertLoads, trainer: L.Trainer) -> dict[str, Load]:
        device = trainer.strategy.root_device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums_2T = loads.take(device).to(dtype)
        if self._handles and trainer.world_size > 1:
            # Ranks with the same batch, under other strategies: each counts a share of it.
            data_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
            sums_2T *= data_ranks / trainer.world_size
        # How many ranks have a layer's bias, and what they have together: all have the same.
        holders_L = torch.tensor([float(name in self._biases) for name in loads], dtype=dtype, device=device)
        biases = [self._bias(name, layer.experts).to(device, dtype) for name, layer in loads.items()]
        vector = torch.cat([*sums_2T, *biases, holders_L])
        if trainer.world_size > 1 and dist.is_initialized():
            dist.all_reduce(vector)
        vector = vector.cpu().double()
        tokens, dropped, bias, holders = torch.split(vector, [loads.total] * 3 + [len(loads)])
        sizes = [layer.experts for layer in loads.values()]
        per_layer = zip(loads, *(torch.split(each, sizes) for each in (tokens, dropped, bias)), holders, strict=True)
        return {name: Load(t_E, d_E, torch.where(h > 0, b_E / h, math.nan)) for name, t_E, d_E, b_E, h in per_layer}

    def _bias(self, name: str, experts: int) -> Tensor:
        if name not in self._biases:
            return torch.zeros(experts)
        owner, attribute = self._biases[name]
        bias: Tensor = getattr(owner, attribute).detach()
        return bias.full_tensor() if isinstance(bias, DTensor) else bias

    def _write(self, trainer: L.Trainer) -> None:
        self._written_at = trainer.global_step
        if not trainer.is_global_zero or self.history is None or not self.history.columns or self.dirpath is None:
            return
        self.files = self.history.write(self.dirpath)
        if self.chart:
            picture = self.dirpath / "expert_load.png"
            draw_loads(self.history, self.title or "Load of experts").savefig(picture, dpi=110)
            self.files.append(picture)


def metrics_of(loads: Mapping[str, Load]) -> dict[str, float]:
    """What is logged of one reading; layers that no token has come to are left out."""
    used = {name: load for name, load in loads.items() if load.tokens_E.sum() > 0}
    if not used:
        return {}
    imbalance = {name: load.imbalance for name, load in used.items()}
    tokens = sum(float(load.tokens_E.sum()) for load in used.values())
    dropped = sum(float(load.dropped_E.sum()) for load in used.values())
    found = {
        "expert_load/imbalance": _mean(imbalance.values()),
        "expert_load/imbalance_worst": max(imbalance.values()),
        "expert_load/dropped": dropped / tokens,
        "expert_load/dropped_worst": max(load.dropped for load in used.values()),
    }
    spreads = [spread for load in used.values() if not math.isnan(spread := load.bias_spread)]
    if spreads:
        found["expert_load/bias_spread"] = max(spreads)
    return found | {f"expert_load/{name}/imbalance": value for name, value in imbalance.items()}


def bias_of(module: nn.Module, experts: str, count: int) -> tuple[nn.Module, str] | None:
    """What the router of a layer adds to choose by: the module that has it, and its name there; ``None`` if there is none on this rank.

    Args:
        module: The whole module.
        experts: The name of the layer's experts, beside which its router is.
        count: How many they are.
    """
    try:
        block = module.get_submodule(experts.rpartition(".")[0])
    except AttributeError:
        return None
    if isinstance(block, Absent):
        return None
    for owner in block.modules():
        for name, tensor in chain(owner.named_buffers(recurse=False), owner.named_parameters(recurse=False)):
            if name in BIASES and tensor.shape == (count,):
                return owner, name
    return None


def _counted_by_axis(trainer: L.Trainer) -> ExpertLoads | None:
    """The loads that an axis of `FiveD` counts; ``None`` under other strategies."""
    if not isinstance(trainer.strategy, FiveD):
        return None
    for applied in trainer.strategy.parallelized:
        loads = getattr(applied, "loads", None)
        if isinstance(loads, ExpertLoads) and loads:
            return loads
    raise _no_experts(trainer.lightning_module)


def _layers_of(module: nn.Module) -> Any:
    from lightning_5d.expert_parallel.survey import found_experts

    found = found_experts(module)
    if not found:
        raise _no_experts(module)
    return found


def _no_experts(module: nn.Module) -> MisconfigurationException:
    return MisconfigurationException(
        f"ExpertLoad: {type(module).__name__} has no experts whose tokens could be counted. Leave the callback out (callbacks.experts=null),"
        " or train a model with MoE layers, such as model=moe_tiny, Mixtral or Qwen3-MoE."
    )


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
