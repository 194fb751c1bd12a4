"""What blocks and the modules around them cost, measured: the user's step on one microbatch in one process."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_5d.pipeline_parallel.stage.costs import StageCosts
from lightning_5d.pipeline_parallel.stage.layout import dissect
from lightning_5d.pipeline_parallel.stage.outline import tensors_of
from lightning_5d.plan import ParallelPlan, find_plan


def measure_costs(
    module: pl.LightningModule, batch: Any, *, plan: ParallelPlan | None = None, repeats: int = 5
) -> StageCosts:
    """Times what one microbatch costs in each block, before them and after them, forward and backward together.

    The whole module has to fit into one process, or a smaller one of the same blocks: `StageCosts` can be made of its numbers.

    ```python
    costs = measure_costs(module.cuda(), microbatch)
    Trainer(strategy=FiveD(PipelineParallel(4, costs=costs)))
    ```

    Args:
        module: The LightningModule, on the device that is to be measured. Gradients, buffers and modes are afterwards what they were.
        batch: One microbatch, on that device, as `training_step` gets it.
        plan: Where the module may be cut; found by itself if ``None``.
        repeats: How often it is measured, after one run that is not; the median counts.

    Returns:
        Seconds.

    Raises:
        ValueError: If the module has no blocks, the step does not run them once each, in order, or its loss needs no gradient.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; use 1 or more.")
    anatomy = dissect(module, find_plan(module, plan))
    if not anatomy.blocks:
        raise ValueError(f"{type(module).__name__} has no list of blocks, so there is nothing to measure. Give a plan.")
    blocks = [module.get_submodule(name) for name in anatomy.blocks]
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    runs = []
    with _as_before(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        for repeat in range(repeats + 1):
            module.zero_grad()
            seconds = _run(module, blocks, batch, device)
            if repeat:
                runs.append(seconds)
    before, *inside, after = [statistics.median(each) for each in zip(*runs, strict=True)]
    return StageCosts(dict(zip(anatomy.blocks, inside, strict=True)), before, after)


def _run(module: pl.LightningModule, blocks: Sequence[nn.Module], batch: Any, device: torch.device) -> list[float]:
    """Seconds before the blocks, in each, and after them."""
    entered: list[tuple[int, float]] = []
    arrived: dict[
        int, float
    ] = {}  # gradients of what goes into each block; of what the last returns, under its number + 1
    forward_end = 0.0

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def arrives(index: int, gradient: Tensor) -> None:
        arrived.setdefault(
            index, now()
        )  # that of the hidden state; what all blocks get, such as positions, comes later

    def entering(index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append((index, now()))
        for tensor in tensors_of((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(partial(arrives, index))  # type: ignore[no-untyped-call]

    def leaving(_: nn.Module, args: Any, output: Any) -> None:
        nonlocal forward_end
        forward_end = now()
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(arrives, len(blocks)))  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            hook = block.register_forward_pre_hook(partial(entering, index), with_kwargs=True)
            stack.callback(hook.remove)
        stack.callback(blocks[-1].register_forward_hook(leaving).remove)
        start = now()
        output = module.training_step(batch, 0)
        finish = now()
    if [index for index, _ in entered] != list(range(len(blocks))):
        raise ValueError(
            f"training_step ran blocks {[index for index, _ in entered]}, not {list(range(len(blocks)))}: a module that is cut"
            " into stages runs each once, in order."
        )
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError("training_step returned no loss that needs gradients.")
    back = now()
    torch.autograd.backward(loss)
    end = now()
    forwards = [start, *(at for _, at in entered), forward_end, finish]
    # What is frozen has no backward: there the gradient does not arrive.
    backwards = [back]
    for index in range(len(blocks), -1, -1):
        backwards.append(arrived.get(index, end))
    backwards.append(end)
    steps = zip(_differences(forwards), reversed(_differences(backwards)), strict=True)
    return [forward + backward for forward, backward in steps]


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


@contextmanager
def _as_before(module: nn.Module) -> Generator[None, None, None]:
    """Gradients, buffers, modes and random numbers are what they were, when it is left."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    modes = [(inner, inner.training) for inner in module.modules()]
    module.train()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for inner, training in modes:
            inner.training = training
