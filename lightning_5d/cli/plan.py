"""`fived plan show`: what the tensor and expert axes would make of a configured model, and a context axis of its sequences, without starting ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lightning_5d.context_parallel.context import ContextParallel
    from lightning_5d.plan import ParallelPlan
    from lightning_5d.strategy import FiveD


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fived plan` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="what becomes of each module on the tensor axis, of sequences on the context axis, of experts on the expert axis",
    )
    show.add_argument("--tensor", type=int, metavar="N", help="ranks of the axis (default: the configured strategy's)")
    show.add_argument(
        "--length", type=int, metavar="S", help="tokens of a sequence (default: those of the configured data)"
    )
    show.add_argument("--sequence-parallel", action="store_true", help="cut the sequence as well")
    show.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="what `fived train` takes, as recipe=NAME, model=NAME"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Prints the table, or what is wrong, and returns the exit status."""
    from hydra.errors import HydraException
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = _composed(arguments.overrides)
        axes = _settings(config, arguments)
        model = _model(config)
        text, status = "", 0
        if axes.tensor is not None:
            text, status = _shown(model, axes.plan, axes.tensor, axes.sequence_parallel)
        if axes.context is not None and not status:
            length = arguments.length or int(config.data.sequence_length)
            text = "\n\n".join(filter(None, [text, _sequences(axes.context, length, model, axes.tensor or 1)]))
        if axes.experts is not None and not status:
            text = "\n\n".join(filter(None, [text, _experts(axes.experts, config, model)]))
    except (
        ValueError,
        TypeError,
        ImportError,
        MisconfigurationException,
        HydraException,
        OmegaConfBaseException,
    ) as error:
        print(error, file=sys.stderr)
        return 1
    print(text, file=sys.stderr if status else sys.stdout)
    return status


def _shown(module: nn.Module, given: ParallelPlan | None, size: int, sequence_parallel: bool) -> tuple[str, int]:
    from lightning_5d.plan import find_plan
    from lightning_5d.tensor_parallel.plan import layout_of
    from lightning_5d.tensor_parallel.problems import generic
    from lightning_5d.tensor_parallel.report import describe_layout

    plan = find_plan(module, given)
    layout, problems = layout_of(module, plan, size, sequence_parallel)
    if problems:
        return "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1)), 1
    blocks = plan.block_names(module)
    lists = ", ".join(dict.fromkeys(map(generic, blocks)))
    head = [
        f"Styles:  {plan.tensor_source}",
        f"Blocks:  {len(blocks)} of {lists} ({plan.source})" if blocks else "Blocks:  none",
    ]
    return "\n".join([*head, "", describe_layout(layout, size)]), 0


def _composed(overrides: Sequence[str]) -> DictConfig:
    from hydra import compose, initialize_config_dir

    from lightning_5d.cli.configured import configuration_folder

    with initialize_config_dir(config_dir=str(configuration_folder()), version_base="1.3"):
        return compose("train", list(overrides))


@dataclass(frozen=True)
class _Axes:
    """What is to be shown: ranks of the tensor axis, whether it cuts the sequence, the plan, the context plugin, a strategy with an expert axis."""

    tensor: int | None
    sequence_parallel: bool
    plan: ParallelPlan | None
    context: ContextParallel | None
    experts: FiveD | None


def _settings(config: DictConfig, arguments: argparse.Namespace) -> _Axes:
    from lightning_5d.cli.build import build
    from lightning_5d.plan import ParallelPlan
    from lightning_5d.strategy import FiveD

    strategy = config.strategy if isinstance(config.strategy, str) else build(config.strategy)
    plugins: Sequence[Any] = strategy.plugins if isinstance(strategy, FiveD) else ()
    plan = strategy.plan if isinstance(strategy, FiveD) else None
    tensor = next((plugin for plugin in plugins if plugin.axis == "tensor"), None)
    context = next((plugin for plugin in plugins if plugin.axis == "context"), None)
    styles = getattr(tensor, "plan", None)
    if styles:
        plan = replace(plan or ParallelPlan(), tensor=styles)
    size = getattr(tensor, "size", None) if arguments.tensor is None else arguments.tensor
    experts = strategy if isinstance(strategy, FiveD) and any(plugin.axis == "expert" for plugin in plugins) else None
    if size is None and context is None and experts is None:
        raise ValueError(
            "The configured strategy has no tensor axis; give --tensor N, the number of its ranks. (Nor a context axis: strategy=context; nor an"
            " expert axis: strategy=expert.)"
        )
    if size is not None and size < 1:
        raise ValueError(f"--tensor {size} is not at least 1.")
    if arguments.length is not None and arguments.length < 1:
        raise ValueError(f"--length {arguments.length} is not at least 1.")
    sequence_parallel = arguments.sequence_parallel or bool(getattr(tensor, "sequence_parallel", False))
    return _Axes(size, sequence_parallel, plan, context, experts)


def _experts(strategy: FiveD, config: DictConfig, model: nn.Module) -> str:
    """Which ranks hold which experts. Raises what is wrong with that."""
    from lightning_5d.expert_parallel.expert import ExpertParallel
    from lightning_5d.expert_parallel.report import ExpertPlaces, describe_experts
    from lightning_5d.expert_parallel.survey import found_experts
    from lightning_5d.mesh import resolve_sizes
    from lightning_5d.parallelism import RunContext, raise_problems

    plugin = next(plugin for plugin in strategy.plugins if isinstance(plugin, ExpertParallel))
    nodes = int(config.trainer.num_nodes)
    world = int(config.trainer.devices) * nodes
    sizes, problems = resolve_sizes(world, strategy.plugins)
    raise_problems(problems)
    precision = str(config.trainer.precision)
    raise_problems(plugin.validate(RunContext(world, nodes, "cpu", precision, sizes, module=model)))
    ranks = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    places = ExpertPlaces(plugin.size, ranks // (plugin.size * plugin.tensor), plugin.tensor, sizes["dp_replicate"])
    zero = next((plugin for plugin in strategy.plugins if plugin.axis == "data"), None)
    sharded = getattr(zero, "stage", 0) == 3
    return describe_experts(found_experts(model), places, places.same if sharded else None)


def _sequences(context: ContextParallel, length: int, model: nn.Module, tensor: int) -> str:
    """What the context axis makes of sequences; what it sends where the heads are known. Raises what is wrong with it."""
    from lightning_5d.context_parallel.compatibility import module_problems
    from lightning_5d.context_parallel.lengths import check_length
    from lightning_5d.context_parallel.report import AttentionShape, describe_context
    from lightning_5d.models import LanguageModel
    from lightning_5d.parallelism import raise_problems

    raise_problems(module_problems(model, context, tensor) if context.size > 1 else [])
    check_length(context.cut(length), "A sequence", pad=context.pad)
    shape = None
    if isinstance(model, LanguageModel):
        config = model.decoder.config
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_size)
    return describe_context(context.method, context.cut(length), shape)


def _model(config: DictConfig) -> nn.Module:
    """The configured model, without memory for its weights where it can be built so."""
    import lightning.pytorch as pl

    from lightning_5d.cli.build import build

    model: nn.Module
    try:
        with torch.device("meta"):
            model = build(config.model)
    except (NotImplementedError, RuntimeError):
        # It computes with values while it is built.
        model = build(config.model)
    if isinstance(model, pl.LightningModule) and not any(True for _ in model.parameters()):
        with torch.device("meta"):
            model.configure_model()
    return model
