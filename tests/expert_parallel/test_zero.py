"""ZeRO spreads experts over the ranks that hold the same ones, and trains like one process."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_5d import ExpertParallel, PipelineParallel, ZeRO
from lightning_5d.data_parallel import ShardOptions
from tests.data_parallel.training import assert_equal_runs, inputs
from tests.expert_parallel.mixture import Experts, Layout, engine_of, half, make, mesh_of, on_ranks_each, one_process
from tests.expert_parallel.test_training import mixture
from tests.tensor_parallel.parity import compare


def _compare(ranks, layouts: list[Layout], tolerance: float = 1e-5) -> None:
    got = ranks(layouts[0].world, on_ranks_each, layouts, timeout=45)
    expected = {}
    for layout, runs in zip(layouts, zip(*got, strict=True), strict=True):
        key = layout.count, layout.mode, layout.accumulation, layout.optimizer
        if key not in expected:
            expected[key] = one_process(layout)
        try:
            assert_equal_runs(list(runs), expected[key], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


def test_every_stage_equals_one_process(ranks):
    """Ranks two and two with the same experts, in replicas, along context ranks, or alone with theirs; all hold some of all layers."""
    four, replicas, context = (1, 1, 4, 1, 1), (1, 2, 2, 1, 1), (1, 1, 2, 2, 1)
    layouts = [Layout(ShardOptions(stage), 2, accumulation=2) for stage in range(4)]
    for stage, ep, sizes in [
        (0, 2, replicas),
        (0, 4, four),
        (1, 4, four),
        (1, 2, replicas),
        (2, 1, replicas),
        (3, 2, replicas),
        (3, 2, context),
        (3, 4, four),
    ]:
        layouts.append(Layout(ShardOptions(stage), ep, sizes, optimizer="SGD"))
    _compare(ranks, layouts)


def test_two_ranks_with_half_of_the_experts_each_equal_one_process(ranks):
    _compare(ranks, [Layout(ShardOptions(stage), 2, (1, 1, 2, 1, 1), accumulation=2) for stage in range(4)])


def test_frozen_and_skipped_layers_hold_up_nobody(ranks):
    modes = ["experts frozen", "one layer trained", "halves", "skipped"]
    layouts = [Layout(ShardOptions(3), 2, mode=mode, accumulation=2) for mode in modes]
    _compare(ranks, [*layouts, *(Layout(ShardOptions(stage), 2, mode="skipped") for stage in (0, 1))])


def test_uneven_offloaded_and_messaging_ranks_train_alike(ranks):
    layouts = [
        Layout(ShardOptions(3, offload="optimizer+parameters"), 2),
        Layout(ShardOptions(3, shared_memory=False), 2, mode="skipped"),
        # Three experts on two ranks, and one on two: weights are cut where that is even, if it is anywhere.
        *(Layout(ShardOptions(stage), 2, count=6) for stage in (0, 3)),
        *(Layout(ShardOptions(stage), 2, count=2) for stage in (2, 3)),
    ]
    _compare(ranks, layouts)


def _held(rank: int, layout: Layout) -> dict[str, int]:
    module = make(layout)
    engine, _ = engine_of(module, layout, mesh_of(layout.sizes))
    held = {name: parameter.to_local().numel() for name, parameter in module.blocks[1].experts.named_parameters()}
    engine.close()
    return held


def test_ranks_that_share_one_expert_hold_parts_of_it_each(ranks):
    found = ranks(4, _held, Layout(ShardOptions(1), 2, count=2), timeout=20)
    assert [each["up"] for each in found] == [15] * 4
    assert [each["down"] for each in found] == [15] * 4
    assert [each["shift"] for each in found] == [5, 5, 0, 0]  # five numbers, which two ranks do not divide


def test_half_precision_divides_as_full_precision_does(ranks):
    layouts = [
        Layout(ShardOptions(stage, half(dtype)), ep, optimizer="SGD")
        for stage, ep, dtype in [
            (0, 2, torch.float16),
            (1, 4, torch.bfloat16),
            (3, 2, torch.bfloat16),
            (2, 4, torch.float16),
        ]
    ]
    _compare(ranks, layouts, tolerance=3e-2)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_reduces_experts_after_each_microbatch(ranks, stage):
    plugins = ExpertParallel(2), PipelineParallel(2, microbatches=2), ZeRO(stage=stage, per_microbatch=True)
    compare(ranks, mixture(balance=0.0), *plugins, world=8, batch=8)


def _moves(rank: int) -> dict[str, bool]:
    """For each layer of experts whether a gradient of the rank's shard is where backward has left it; which hooks of FSDP2 ran, as well."""
    layout = Layout(ShardOptions(1), 2, (1, 1, 2, 1, 1))
    module = make(layout)
    engine, _ = engine_of(module, layout, mesh_of(layout.sizes))
    left: dict[str, int] = {}
    ran: set[str] = set()
    register = FSDPParamGroup._register_post_backward_hook

    def noted(group: FSDPParamGroup, args: Any, kwargs: Any) -> Any:
        ran.add(str(group._module_fqn))
        return register(group, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "_register_post_backward_hook", noted)
        engine.begin()
        loss = module.loss(inputs(0, 0, rank), rank)
    for name, layer in module.named_modules():
        if isinstance(layer, Experts):
            layer.up.register_post_accumulate_grad_hook(lambda up, name=name: left.update({name: up.grad.data_ptr()}))
    loss.backward()
    engine.wait()
    kept = {name: module.get_submodule(name).up.grad.to_local().data_ptr() == at for name, at in left.items()}
    engine.close()
    return {**kept, "hooks of experts": any("experts" in name for name in ran), "of others": "blocks.0" in ran}


def test_gradients_of_experts_that_a_rank_has_alone_stay_where_they_are(ranks):
    found = ranks(2, _moves, timeout=20)
    assert (
        found
        == [{"blocks.1.experts": True, "blocks.4.experts": True, "hooks of experts": False, "of others": True}] * 2
    )
