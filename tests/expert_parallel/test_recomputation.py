"""Layers with experts whose forwards backward runs again."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_5d import ExpertParallel, FiveD, ParallelPlan, PipelineParallel, ZeRO
from lightning_5d.activation_checkpointing import ActivationCheckpointing, Checkpointed
from lightning_5d.expert_parallel import dispatch, experts
from lightning_5d.models import LanguageModel
from lightning_5d.models.decoder import DecoderBlock
from lightning_5d.parallelism import Parallelized
from tests.expert_parallel.in_stages import compare_settings, sparse
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, fit

MICROBATCHES = 4


class Checkpointing(DecoderBlock):
    """A block whose author has it run again."""

    def forward(self, *args: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False)


def _checkpointing() -> LanguageModel:
    module: LanguageModel = sparse()()
    for layer in module.decoder.layers:
        layer.__class__ = Checkpointing
    return module


def _strategy(stage: int, schedule: str, checkpointing: Any = None) -> Any:
    pipeline = PipelineParallel(
        2, schedule=schedule, microbatches=MICROBATCHES, **({"chunks": 2} if schedule == "interleaved_1f1b" else {})
    )
    return partial(FiveD, pipeline, ExpertParallel(2), ZeRO(stage=stage), activation_checkpointing=checkpointing)


def test_every_mode_sends_in_one_order_and_counts_once(ranks: RankPool) -> None:
    strategies = {
        "full": _strategy(2, "zb_v", "full"),
        "selective": _strategy(2, "interleaved_1f1b", "selective"),
        "half": _strategy(1, "zb_h1", 0.5),
        "experts": _strategy(3, "1f1b", ActivationCheckpointing(modules=("*.experts",))),
    }
    compare_settings(ranks, 4, sparse(), strategies, microbatches=MICROBATCHES)


def _counted(rank: int, modes: list[str | None]) -> list[tuple[Any, dict[str, int]]]:
    """What runs with experts alone computed again give, and how often they multiply and send."""
    found = []
    for mode in modes:
        counts = {"products": 0, "sent": 0}

        def counting(name: str, call: Any, counts: dict[str, int] = counts) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                counts[name] += 1
                return call(*args, **kwargs)

            return counted

        options = None if mode is None else ActivationCheckpointing(mode, modules=("*.experts",))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "grouped_linear", counting("products", experts.grouped_linear))
            patch.setattr(dispatch._Crossing, "start", counting("sent", dispatch._Crossing.start))
            strategy = partial(FiveD, ExpertParallel(2), activation_checkpointing=options)
            data = partial(Dealt, Rows(8, 6), 4)
            run = fit(rank, mixture(shared=1), data, strategy, devices=2, limit_val_batches=0)
        found.append((run["parameters"], counts))
    return found


def test_experts_alone_are_computed_again_and_nothing_is_sent_again(ranks: RankPool) -> None:
    for (values, once), (again, counts) in ranks(2, _counted, [None, "full"], **SEPARATE):
        assert once["sent"] == counts["sent"] > 0
        assert 2 * once["products"] == counts["products"] > 0
        assert all(torch.equal(values[name], again[name]) for name in values)


def test_shards_of_experts_are_gathered_inside_of_blocks_that_run_again(ranks: RankPool) -> None:
    strategies = {
        f"{mode} {stage}": partial(FiveD, ExpertParallel(2), ZeRO(stage=stage), activation_checkpointing=mode)
        for mode, stage in (("full", 3), ("selective", 1), ("selective", 3), (0.5, 3))
    }
    compare_settings(ranks, 4, sparse(), strategies, microbatches=1)


def test_what_users_run_again_themselves(ranks: RankPool) -> None:
    compare_settings(ranks, 4, _checkpointing, {"zb_v": _strategy(3, "zb_v")}, microbatches=MICROBATCHES)


class AllToAll(torch.autograd.Function):
    """Half of the rows for the other rank."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        AllToAll.calls.append("again" if torch._C._current_graph_task_id() != -1 else "forward")
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = torch.empty_like(grad)
        AllToAll.calls.append("backward")
        dist.all_to_all_single(out, grad.contiguous())
        return out


class Uneven(nn.Module):
    """Saves more on one rank than on the other."""

    def forward(self, x: Tensor) -> Tensor:
        copies = 8 if dist.get_rank() else 1
        return x.expand(copies, *x.shape).sin().cos().sum(0)


class Meeting(nn.Module):
    """Waits for the others."""

    def forward(self, x: Tensor) -> Tensor:
        return AllToAll.apply(x.sin().cos()).sin().cos()


class Together(Parallelized):
    """Says that both ranks wait for each other."""

    def recomputing_together(self) -> Any:
        return dist.group.WORLD


def _uneven(rank: int, share: float) -> list[str]:
    root = nn.ModuleDict({"blocks": nn.ModuleList([Uneven(), Meeting()])})
    options = ActivationCheckpointing(mode="budget", memory_budget=share, modules=("blocks.*",))
    checkpointed = Checkpointed(root, options, ParallelPlan())
    checkpointed.all_at_work([checkpointed, Together()])
    AllToAll.calls.clear()
    x = torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        y = x
        for block in root["blocks"]:
            y = block(y)
        y.sum().backward()
    return list(AllToAll.calls)


def test_ranks_that_wait_for_each_other_keep_alike_under_a_budget(ranks: RankPool) -> None:
    first, second = ranks(2, partial(_uneven, share=0.5), backend="gloo", timeout=20.0)
    assert first == second
