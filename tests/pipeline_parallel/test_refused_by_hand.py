"""Norms and clipping by hand that a pipeline cannot make right end in one error that says so; what is not its own is left alone."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from lightning_5d import FiveD, PipelineParallel
from lightning_5d.launch import waiting
from tests.modules import TinyLM, loader
from tests.pipeline_parallel.recorded import rows
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 60.0}


class Plain(TinyLM):
    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=4, tied=tied)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.by_hand()

    def by_hand(self) -> None:
        raise NotImplementedError


class Lists(Plain):
    def by_hand(self) -> None:
        for parameter in self.parameters():
            clip_grad_norm_([parameter], 1.0)


class Separate(Plain):
    """Modules inside differ from rank to rank."""

    def by_hand(self) -> None:
        for module in self.modules():
            if own := list(module.parameters(recurse=False)):
                clip_grad_norm_(own, 1.0)


class OneOfTwoNames(Plain):
    def by_hand(self) -> None:
        clip_grad_norm_([parameter for name, parameter in self.named_parameters() if "embed" not in name], 1.0)


class ValuesOfOneName(Plain):
    def by_hand(self) -> None:
        clip_grad_value_(self.head.parameters(), 1.0)


class Weights(Plain):
    def by_hand(self) -> None:
        get_total_norm(list(self.parameters()))


class Early(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.early = list(self.parameters())

    def by_hand(self) -> None:
        clip_grad_norm_(self.early, 1.0)


class OtherBounds(Plain):
    def by_hand(self) -> None:
        clip_grad_norm_(self.parameters(), 1.0 + self.global_rank)


class Infinite(Plain):
    def by_hand(self) -> None:
        if self.head.weight.grad is not None:
            self.head.weight.grad.fill_(float("inf"))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank:
            self.by_hand()
        clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


class Windowed(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_after_backward(self) -> None:
        clip_grad_norm_(self.parameters(), 1.0)


def _fit(rank: int, module: Any, **arguments: Any) -> Any:
    trainer = quiet(
        strategy=FiveD(PipelineParallel(2, microbatches=4, split="blocks")),
        devices=2,
        use_distributed_sampler=False,
        **arguments,
    )
    made = module()
    trainer.fit(made, loader(16, 8))
    return getattr(made, "found", None)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Lists, "embed.weight at place 0; layers.2.norm.weight at place 1.*cannot be seen that they belong together"),
        (Separate, "cannot be seen that they belong together: layers"),
        (partial(OneOfTwoNames, tied=True), "rank 1 gave embed.weight, which rank 0 holds too and did not give"),
        (partial(ValuesOfOneName, tied=True), "share embed.weight, and the gradient would change on some of them only"),
        (Weights, "no gradients of the module's parameters"),
        (Early, "no parameters of the module on this rank"),
        (OtherBounds, r"rank 0 is at clip_grad_norm_\(max_norm=1, .*rank 1 is at clip_grad_norm_\(max_norm=2"),
        (Infinite, "gradients of all stages is non-finite"),
    ],
)
def test_what_is_not_one_call_of_one_process_is_refused(ranks: RankPool, module: Any, words: str) -> None:
    with pytest.raises(RankError, match=words):
        ranks(2, _fit, module, **TRAINER)


def test_shared_gradients_are_not_clipped_before_they_are_added_up(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="comes before the last microbatch of an optimizer step"):
        ranks(2, _fit, partial(Windowed, tied=True), accumulate_grad_batches=2, **TRAINER)


class Alone(Plain):
    def by_hand(self) -> None:
        if self.trainer.is_global_zero:
            clip_grad_norm_(self.parameters(), 1.0)


def _fit_alone(rank: int) -> None:
    waiting.WAIT_SECONDS = 3.0
    _fit(rank, Alone)


def test_a_rank_that_clips_alone_does_not_wait_for_ever(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)stood still for 3 s:.*rank 0: train, epoch 0, .*\(by_hand\)"):
        ranks(2, _fit_alone, **TRAINER)


class Beside(Plain):
    """Trains something that is not in the module, another on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.beside = [nn.Linear(3, 2)]

    def by_hand(self) -> None:
        (beside,) = self.beside
        beside(torch.full((1, 3), 1.0 + self.global_rank)).sum().backward()
        self.found = float(clip_grad_norm_(beside.parameters(), 1.0)), float(clip_grad_norm_(beside.bias, 0.1))
        beside.zero_grad()


def test_parameters_of_others_are_each_ranks_own(ranks: RankPool) -> None:
    found = ranks(2, _fit, Beside, **TRAINER)
    # The gradient of each of two rows is the input, that of each bias 1.
    for factor, (norm, of_bias) in zip((1.0, 2.0), found, strict=True):
        whole = (2 * 3 * factor**2 + 2) ** 0.5
        assert norm == pytest.approx(whole)
        assert of_bias == pytest.approx(2**0.5 / whole, rel=1e-4)


class Evaluating(Plain):
    """Looks at its norm where an evaluation has just been."""

    def by_hand(self) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        self.found = float(get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


def _evaluating(rank: int, strategy: Any, devices: int) -> float:
    trainer = quiet(strategy=strategy(), devices=devices, use_distributed_sampler=False, val_check_interval=1)
    module = Evaluating(tied=True)
    trainer.fit(module, rows(16, 8), rows(8, 8))
    return module.found


def test_gradients_are_known_to_be_complete_at_the_end_of_a_batch(ranks: RankPool) -> None:
    strategy = partial(FiveD, PipelineParallel(2, microbatches=4, split="blocks"))
    right = _evaluating(0, lambda: "auto", 1)
    assert ranks(2, _evaluating, strategy, 2, **TRAINER) == pytest.approx([right] * 2, rel=1e-5)
