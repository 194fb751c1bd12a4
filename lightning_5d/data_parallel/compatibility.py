"""What data parallelism cannot train with the right numbers: found before training, never silently wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_5d.parallelism import Problem

# Checked with torch 2.13 against one process: every other class of `torch.optim` gives the same numbers on shards.
_WHOLE_TENSOR = {
    "LBFGS": "works on all gradients as one vector",
    "Muon": "orthogonalizes whole matrices",
    "Adafactor": "takes means over rows and columns of whole matrices",
    "Rprop": "writes to gradients by a mask, which torch cannot do to a sharded tensor",
}
_FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)


def sharded_optimizer_problems(optimizers: Iterable[Optimizer], stage: int) -> list[Problem]:
    """Optimizers that need more of a tensor than the shard a rank holds, or kernels that do not know shards."""
    problems = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if needs_whole_tensors(optimizer) is not None and stage > 0:
            what = f"{name} {needs_whole_tensors(optimizer)}, and ZeRO stage {stage} spreads them over the data ranks."
            problems.append(Problem(what, "Use ZeRO(stage=0), or another optimizer."))
        elif any(group.get("fused") for group in optimizer.param_groups) and not isinstance(
            optimizer, _FUSED_ON_SHARDS
        ):
            made = f"sharded tensors, which ZeRO stage {stage} makes"
            if stage == 0:
                made = "distributed tensors, which mixed precision and the tensor axis make of weights at any stage"
            what = f"{name}(fused=True) has no kernel for {made}."
            instead = "Leave fused out, or use ZeRO(stage=0)" if stage else "Leave fused out"
            problems.append(Problem(what, f"{instead}; Adam and AdamW may be fused."))
    return problems


def needs_whole_tensors(optimizer: Optimizer) -> str | None:
    """What an optimizer does with whole tensors, in words; ``None`` if parts of them do as well."""
    kinds = (kind.__name__ for kind in type(optimizer).__mro__)
    return next((_WHOLE_TENSOR[name] for name in kinds if name in _WHOLE_TENSOR), None)


def module_problems(
    module: nn.Module,
    stage: int,
    ranks: int,
    callbacks: Sequence[Callback] = (),
    *,
    cast: bool = False,
    tensor: int = 1,
) -> list[Problem]:
    """Parts of a module that would train to other numbers than in one process, or not at all.

    Args:
        module: The user's module, not yet sharded.
        stage: The ZeRO stage.
        ranks: Number of data ranks.
        callbacks: The Trainer's.
        cast: Whether modules compute from 16-bit copies of the weights.
        tensor: Ranks of the tensor axis.
    """
    problems = []
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        fix = "Run the module once on a small batch in `setup` or `configure_model`, or give its layers their sizes."
        problems.append(Problem(f"Parameters of lazy modules have no shape yet: {listed(lazy)}.", fix))
    if ranks == 1 and not cast and tensor == 1:
        return problems
    for name, child in module.named_modules():
        if not isinstance(child, nn.Embedding | nn.EmbeddingBag):
            continue
        if child.sparse:
            problems.append(Problem(f"{name} makes sparse gradients, which are not reduced.", "Use sparse=False."))
        if child.max_norm is not None and ranks > 1:
            what = f"{name} has max_norm={child.max_norm}: its forward changes the weight by each rank's own batch."
            fix = "Normalize the rows in forward, or limit the weight in `on_train_batch_end`, the same on all ranks."
            problems.append(Problem(what, fix))
    if stage > 0 or cast or tensor > 1:
        why = f"ZeRO stage {stage} shards them" if stage > 0 else "mixed precision puts copies in their place"
        instead = "FiveDPrecision(..., autocast=True) and ZeRO(stage=0)" if cast else "ZeRO(stage=0)"
        if tensor > 1:
            why = f"TensorParallel({tensor}) puts each rank's part in their place"
            instead = f"{instead} without TensorParallel"
        hooked = list(hooked_parameters(module))
        if hooked:
            what = f"Hooks on these parameters would be lost when {why}: {listed(hooked)}."
            fix = f"Change gradients in `on_before_optimizer_step`, or use {instead}."
            problems.append(Problem(what, fix))
        for callback in callbacks:
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                what = f"{type(callback).__name__} averages whole parameters, and {why}."
                problems.append(Problem(what, f"Use {instead} with it."))
    return problems


def hooked_parameters(module: nn.Module) -> Iterator[str]:
    """Names of parameters with hooks on their gradients, which are lost when others take their place."""
    for name, parameter in module.named_parameters():
        # Checked with torch 2.13: where tensors keep hooks of `register_hook` and of the accumulated gradient.
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield name


def listed(names: Sequence[str]) -> str:
    """Names for a person, the first of many."""
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
