"""The context axis with every other axis, up to sixteen ranks."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d import ContextParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from lightning_5d.models.decoder import Attention
from lightning_5d.pipeline_parallel import SCHEDULES
from tests.context_parallel.test_training import METHODS, uneven
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, compare, decoder, fit


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("method", ["ring zigzag", "ulysses", "all_gather zigzag"])
def test_layers_and_sequences_are_cut(ranks: RankPool, method: str, sequence: bool) -> None:
    plugins = ContextParallel(2, **METHODS[method]), TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, decoder(), *plugins, world=4, data=partial(uneven, tokens=13))


class Centred(Attention):
    """A mean over the features of all heads, of which each tensor rank has a part."""

    def forward(self, x_BTD: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (
            layer(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)
        return self.o_proj(out_BTD - out_BTD.mean(-1, keepdim=True))


def _centred() -> LanguageModel:
    module = decoder()()
    for layer in module.decoder.layers:
        layer.self_attn.__class__ = Centred
    return module


def test_code_behind_attention_that_needs_all_features_is_refused(ranks: RankPool) -> None:
    strategy = partial(FiveD, ContextParallel(2), TensorParallel(2))
    with pytest.raises(RankError, match="adds up, compares or normalises over 16 features or heads, of which it has 8"):
        ranks(4, partial(fit, module=_centred, data=uneven, strategy=strategy, devices=4), **SEPARATE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(ranks: RankPool, name: str) -> None:
    chunks: dict[str, Any] = {"chunks": 2} if SCHEDULES[name].chunks is None else {}
    pipeline = PipelineParallel(2, schedule=name, microbatches=4, **chunks)
    compare(ranks, decoder(num_layers=4), pipeline, ContextParallel(2), world=4, tokens=8)


@pytest.mark.parametrize(("method", "schedule"), [("ulysses", "zb_v"), ("all_gather zigzag", "interleaved_1f1b")])
def test_methods_behind_stages(ranks: RankPool, method: str, schedule: str) -> None:
    chunks: dict[str, Any] = {"chunks": 2} if SCHEDULES[schedule].chunks is None else {}
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=2, **chunks)
    plugins = pipeline, ContextParallel(2, **METHODS[method]), ZeRO(stage=2)
    # Rounding of single weights is near the bound in fp32.
    precision: dict[str, Any] = {"precision": "64-true", "tolerance": 1e-9}
    compare(ranks, decoder(num_layers=4), *plugins, world=8, tokens=7, accumulate_grad_batches=2, **precision)


def test_four_axes(ranks: RankPool) -> None:
    plugins = (
        PipelineParallel(2, microbatches=2),
        TensorParallel(2, sequence_parallel=True),
        ContextParallel(2),
        ZeRO(stage=3),
    )
    compare(ranks, decoder(num_layers=3), *plugins, world=16, tokens=8)


def test_tied_embeddings_on_the_first_and_last_stage(ranks: RankPool) -> None:
    plugins = PipelineParallel(2, microbatches=4), ContextParallel(2)
    compare(ranks, decoder(num_layers=3, tie_embeddings=True), *plugins, world=4, tokens=8)


class Varying(Rows):
    """Rows of 7 and of 8 tokens in turn, four of each."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {name: value[: 7 + index // 4 % 2] for name, value in row.items()}


def _varying() -> Dealt:
    return Dealt(Varying(16, 8), 4)


@pytest.mark.parametrize(("schedule", "checkpointing"), [("1f1b", None), ("zb_v", "full"), ("zb_h1", "selective")])
def test_stages_know_lengths_that_the_ranks_do_not_divide(ranks: RankPool, schedule: str, checkpointing: Any) -> None:
    plugins = PipelineParallel(2, schedule=schedule, microbatches=4), ContextParallel(2)
    strategy = {"activation_checkpointing": checkpointing}
    compare(ranks, decoder(num_layers=4), *plugins, world=4, data=_varying, strategy=strategy)


@pytest.mark.parametrize("precision", ["64-true"])
@pytest.mark.parametrize("method", METHODS)
def test_double_precision(ranks: RankPool, method: str, precision: Any) -> None:
    plugins = ContextParallel(2, **METHODS[method]), ZeRO(stage=1)
    compare(ranks, decoder(), *plugins, world=4, tokens=8, precision=precision, tolerance=1e-10)


def test_sixteen_ranks_of_one_sequence(ranks: RankPool) -> None:
    # In fp32, sums of sixteen parts are rounded more often than those of one process.
    data = partial(uneven, tokens=32)
    compare(ranks, decoder(), ContextParallel(16), world=16, data=data, precision="64-true", tolerance=1e-10)


def test_a_mixture_with_cut_layers(ranks: RankPool) -> None:
    plugins = ContextParallel(4, ulysses=2), TensorParallel(2)
    compare(ranks, decoder(num_kv_heads=4), *plugins, world=8, data=uneven)


def test_gradients_of_several_batches_that_all_differ(ranks: RankPool) -> None:
    torch.manual_seed(0)
    compare(ranks, decoder(), ContextParallel(2), world=2, data=uneven, accumulate_grad_batches=4)
