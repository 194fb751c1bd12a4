"""The same few optimizer steps on one process and on the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_5d.data_parallel import Engine, ShardOptions, shard
from tests.data_parallel import odd_modules


@dataclass
class Run:
    """What a run leaves: for each step the gradients (None where there is none), in the end the parameters."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    calls: list[dict[str, int]] = field(default_factory=list)
    volumes: list[int] = field(default_factory=list)


def inputs(step: int, microbatch: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank))


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module: nn.Module = getattr(odd_modules, name)()
    return module


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def one_process(name: str, ranks: int, accumulation: int = 1, steps: int = 3) -> Run:
    """The reference: all ranks' microbatches in one process."""
    torch.set_num_threads(1)
    module, run = make(name), Run()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(accumulation):
            for rank in range(ranks):
                loss = module.loss(inputs(step, microbatch, rank), rank) / (accumulation * ranks)
                loss.backward()
                total += loss.item()
        run.losses.append(total)
        run.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
        optimizer.step()
    run.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return run


def mesh_engine(module: nn.Module, ranks: int, replicate: int, options: ShardOptions) -> Engine:
    if replicate == 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    else:
        mesh = init_device_mesh("cpu", (replicate, ranks // replicate), mesh_dim_names=("dp_replicate", "dp_shard"))
    return shard(module, module.parallel_blocks(), mesh, options)


def on_ranks(
    rank: int,
    name: str,
    ranks: int,
    options: ShardOptions,
    replicate: int = 1,
    accumulation: int = 1,
    steps: int = 3,
    validate: bool = True,
) -> Run:
    """The same on the ranks, each with its own microbatches and another seed."""
    torch.set_num_threads(1)
    module, run = make(name, seed=0 if rank == 0 else 100 + rank), Run()
    engine = mesh_engine(module, ranks, replicate, options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if validate:  # a sanity check before training, as Lightning's, in inference mode
        with torch.inference_mode():
            module.loss(inputs(0, 0, rank), rank)
    for step in range(steps):
        engine.traffic.reset()
        total = 0.0
        for microbatch in range(accumulation):
            engine.begin(last=microbatch == accumulation - 1)
            loss = module.loss(inputs(step, microbatch, rank), rank) / accumulation
            if microbatch == 0:
                optimizer.zero_grad()  # Lightning's closure clears gradients between forward and backward
            loss.backward()
            total += loss.item()
        engine.wait()
        run.losses.append(total)
        run.calls.append(dict(engine.traffic.calls))
        run.volumes.append(engine.traffic.volume)
        run.gradients.append({n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()})
        optimizer.step()
        if validate:
            with torch.no_grad():
                module.loss(inputs(step, 0, rank), rank)
    run.parameters = {n: whole(p) for n, p in module.named_parameters()}
    with engine.unsharded():
        for n, p in module.named_parameters():
            assert torch.equal(p.detach(), run.parameters[n]), n
            assert not isinstance(p, DTensor)
    engine.close()
    return run


Layout = tuple[ShardOptions, int, int]
"""Options, replicas, accumulation."""


def on_ranks_each(rank: int, name: str, ranks: int, layouts: list[Layout]) -> list[Run]:
    """`on_ranks` for several layouts in one world: starting one takes longer than these runs."""
    return [
        on_ranks(rank, name, ranks, options, replicate, accumulation) for options, replicate, accumulation in layouts
    ]


def assert_equal_runs(got: list[Run], expected: Run, tolerance: float = 1e-5) -> None:
    means = [sum(losses) / len(got) for losses in zip(*(run.losses for run in got), strict=True)]
    assert means == [pytest_approx(loss, tolerance) for loss in expected.losses]
    for run in got:
        for step, (gradients, right) in enumerate(zip(run.gradients, expected.gradients, strict=True)):
            assert gradients.keys() == right.keys()
            for name, gradient in right.items():
                where = f"gradient of {name} in step {step}"
                if gradient is None or gradients[name] is None:
                    assert gradient is None, f"{where}: none, but one process has one"
                    assert gradients[name] is None, f"{where}: one process has none"
                    continue
                torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance, msg=_say(where))
        for name, value in expected.parameters.items():
            torch.testing.assert_close(
                run.parameters[name], value, rtol=tolerance, atol=tolerance, msg=_say(f"parameter {name}")
            )


def _say(where: str):
    return lambda text: f"{where}: {text}"


def pytest_approx(value: float, tolerance: float):
    import pytest

    return pytest.approx(value, rel=tolerance, abs=tolerance)
