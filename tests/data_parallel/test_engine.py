"""What a training loop may do to an engine besides the ordinary step."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_5d.data_parallel import Engine, ShardOptions, shard
from tests.data_parallel.training import assert_equal_runs, inputs, make, mesh_engine, on_ranks, one_process, whole

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()}


def _assert_close(got, right, tolerance: float = 1e-5) -> None:
    assert got.keys() == right.keys()
    for name, value in right.items():
        if value is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def _two_backwards(rank: int, stage: int) -> dict[str, torch.Tensor | None]:
    module = make("Net")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    engine.begin(last=True)
    out = module(inputs(0, 0, rank))
    out.pow(2).mean().backward(retain_graph=True)
    out.abs().mean().backward()
    engine.wait()
    gradients = _gradients(module)
    engine.close()
    return gradients


@STAGES
def test_two_backwards_of_one_forward_add_up(ranks, stage):
    module = make("Net")
    for rank in range(2):
        out = module(inputs(0, 0, rank))
        ((out.pow(2).mean() + out.abs().mean()) / 2).backward()
    for got in ranks(2, _two_backwards, stage, timeout=40):
        _assert_close(got, _gradients(module))


def _windows_without_clearing(rank: int, stage: int) -> dict[str, torch.Tensor | None]:
    module = make("Net")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    for window in range(2):  # a user who steps every second window
        engine.begin(last=True)
        module.loss(inputs(window, 0, rank), rank).backward()
        engine.wait()
        engine.wait()  # more often than needed is harmless
    gradients = _gradients(module)
    engine.close()
    return gradients


@STAGES
def test_gradients_that_are_not_cleared_add_up(ranks, stage):
    module = make("Net")
    for window in range(2):
        for rank in range(2):
            (module.loss(inputs(window, 0, rank), rank) / 2).backward()
    for got in ranks(2, _windows_without_clearing, stage, timeout=40):
        _assert_close(got, _gradients(module))


def _changed_between(rank: int, stage: int) -> list[float]:
    """Values after the parameters were changed behind the engine's back, in training and in validation."""
    module = make("Net")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    parameters, values = list(module.parameters()), []
    for change in ("none", "after validation", "after a forward without backward"):
        if change == "after a forward without backward":
            module(inputs(0, 0, rank))
        if change != "none":
            with torch.no_grad():
                for p in parameters:  # as an optimizer or a moving average holds them
                    p.mul_(0.5)
        with torch.no_grad():
            values.append(module(inputs(0, 0, 0)).abs().sum().item())
        engine.begin(last=True)
        module.loss(inputs(0, 0, rank), rank).backward()
        engine.wait()
        module.zero_grad()
        with torch.no_grad():
            values.append(module(inputs(0, 0, 0)).abs().sum().item())
    engine.close()
    return values


@STAGES
def test_a_forward_never_uses_stale_parameters(ranks, stage):
    module, expected = make("Net"), []
    for change in range(3):
        if change:
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(0.5)
        expected += [module(inputs(0, 0, 0)).abs().sum().item()] * 2
    for got in ranks(2, _changed_between, stage, timeout=40):
        assert got == pytest.approx(expected, rel=1e-5)


def _outside(rank: int, stage: int) -> tuple[float, dict[str, torch.Tensor | None]]:
    module = make("Nested")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    with torch.no_grad():  # before the root ever ran, on submodules of the root and on a block
        value = module.model.encoder(module.inp(inputs(0, 0, 0))).sum().item()
    engine.begin(last=True)
    module.out(module.model.encoder(module.inp(inputs(0, 0, rank)))).pow(2).mean().backward()
    engine.wait()
    gradients = _gradients(module)
    engine.close()
    return value, gradients


@STAGES
def test_submodules_can_be_called_and_trained_outside_the_root(ranks, stage):
    module = make("Nested")
    right = module.model.encoder(module.inp(inputs(0, 0, 0))).sum().item()
    for rank in range(2):
        (module.out(module.model.encoder(module.inp(inputs(0, 0, rank)))).pow(2).mean() / 2).backward()
    for value, gradients in ranks(2, _outside, stage, timeout=40):
        assert value == pytest.approx(right, rel=1e-5)
        _assert_close(gradients, _gradients(module))


def _thawed(rank: int, stage: int) -> list[dict[str, torch.Tensor | None]]:
    module = make("Frozen")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    seen = []
    for step in range(2):
        if step:
            module.requires_grad_(True)
        engine.begin(last=True)
        module.loss(inputs(step, 0, rank), rank).backward()
        engine.wait()
        seen.append(_gradients(module))
        module.zero_grad()
    engine.close()
    return seen


@STAGES
def test_parameters_can_be_unfrozen_between_steps(ranks, stage):
    module, expected = make("Frozen"), []
    for step in range(2):
        if step:
            module.requires_grad_(True)
        for rank in range(2):
            (module.loss(inputs(step, 0, rank), rank) / 2).backward()
        expected.append(_gradients(module))
        module.zero_grad()
    for got in ranks(2, _thawed, stage, timeout=40):
        for mine, right in zip(got, expected, strict=True):
            _assert_close(mine, right)


def _idle_rank(rank: int, stage: int) -> dict[str, torch.Tensor | None]:
    """Rank 1 has no loss in this step but comes to `wait`, as a step that returned None would."""
    module = make("Net")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    engine.begin(last=True)
    loss = module.loss(inputs(0, 0, rank), rank)
    if rank == 0:
        loss.backward()
    engine.wait()
    gradients = _gradients(module)
    engine.close()
    return gradients


@STAGES
def test_a_rank_without_backward_counts_as_zero(ranks, stage):
    module = make("Net")
    (module.loss(inputs(0, 0, 0), 0) / 2).backward()
    for got in ranks(2, _idle_rank, stage, timeout=40):
        _assert_close(got, _gradients(module))


def _mixed(rank: int, stage: int, size: int, reduce_dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    module = make("Net")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    engine = mesh_engine(module, size, 1, ShardOptions(stage=stage, mp_policy=policy))
    seen = []
    module.blocks[1].up.register_forward_hook(lambda m, i, o: seen.append((o.dtype, m.weight.dtype)))
    for microbatch in range(2):
        engine.begin(last=microbatch == 1)
        (module.loss(inputs(0, microbatch, rank), rank) / 2).backward()
    engine.wait()
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in module.parameters())
    gradients = _gradients(module)
    engine.close()
    return gradients


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2])
@STAGES
def test_bf16_compute_keeps_fp32_masters_and_gradients(ranks, stage, size, reduce_dtype):
    module = make("Net")
    for microbatch in range(2):
        for rank in range(size):
            (module.loss(inputs(0, microbatch, rank), rank) / (2 * size)).backward()
    for got in ranks(size, _mixed, stage, size, reduce_dtype, timeout=40):
        _assert_close(got, _gradients(module), tolerance=3e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_trains_like_one_process(ranks, stage):
    options = ShardOptions(stage=stage, offload="optimizer+parameters")
    got = ranks(2, on_ranks, "Net", 2, options, 1, 2, timeout=40)
    assert_equal_runs(got, one_process("Net", 2, 2))


def _fused(rank: int, stage: int, name: str) -> dict[str, torch.Tensor]:
    module = make(name)
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        engine.begin(last=True)
        module.loss(inputs(step, 0, rank), rank).backward()
        engine.wait()
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: whole(p) for n, p in module.named_parameters()}
    engine.close()
    return parameters


@pytest.mark.parametrize("name", ["Net", "Scalar", "Frozen", "TwoDtypes"])
@STAGES
def test_fused_adamw_works(ranks, stage, name):
    expected = one_process(name, 2, steps=2).parameters
    for got in ranks(2, _fused, stage, name, timeout=40):
        _assert_close(got, expected)


def _alone(rank: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    module = make("Net")
    before = [id(p) for p in module.parameters()]
    engine = shard(module, list(module.blocks), init_device_mesh("cpu", (1,)), ShardOptions(stage=3))
    return type(engine) is Engine and before == [id(p) for p in module.parameters()] and type(module).__name__ == "Net"


def test_one_rank_in_full_precision_is_left_alone(ranks):
    assert ranks(1, _alone, timeout=30) == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "choose 0, 1, 2 or 3"),
        ({"offload": "disk"}, "'none' or 'optimizer"),
        ({"stage": 0, "offload": "optimizer+parameters"}, "choose stage 1, 2 or 3"),
    ],
)
def test_impossible_options_say_what_is_possible(options, message):
    with pytest.raises(ValueError, match=message):
        ShardOptions(**options)
