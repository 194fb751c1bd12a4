"""Modules whose weights are cut by hand, as the engine has them during a step, and layouts written by hand."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d.models import Decoder, DecoderConfig
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.layers import install
from lightning_5d.tensor_parallel.layout import Region, Sequence, TensorLayout
from lightning_5d.tensor_parallel.rows import Rows, even

SIZES = DecoderConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    tie_embeddings=False,
    initializer_std=0.3,
)


def decoder(seed: int = 0, **sizes: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**{**vars(SIZES), **sizes}))


def decoder_layout(model: Decoder, *, sequence: bool, door: str = "module", head: str = "gathered") -> TensorLayout:
    """What the tensor axis does to a decoder."""
    layers = [f"layers.{index}" for index in range(len(model.layers))]
    regions, weights = [], {"embed_tokens.weight": even(0, model.config.vocab_size)}
    for layer in layers:
        for inner, columns, row in (
            ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
            ("mlp", ("gate_proj", "up_proj"), "down_proj"),
        ):
            names = tuple(f"{layer}.{inner}.{name}" for name in columns)
            regions.append(Region(f"{layer}.{inner}", names, (f"{layer}.{inner}.{row}",), door))  # type: ignore[arg-type]
            for name in names:
                weights[f"{name}.weight"] = even(0, model.get_submodule(name).weight.shape[0])  # type: ignore[union-attr,arg-type]
            weights[f"{layer}.{inner}.{row}.weight"] = even(
                1,
                model.get_submodule(f"{layer}.{inner}.{row}").weight.shape[1],  # type: ignore[union-attr,arg-type]
            )
    weights["lm_head.weight"] = even(0, model.config.vocab_size)
    norms = {name for name, _ in model.named_parameters() if "layernorm" in name or name == "norm.weight"}
    return TensorLayout(
        regions=tuple(regions),
        embeddings=("embed_tokens",),
        gathered=("lm_head",) if head == "gathered" else (),
        heads=("lm_head",) if head == "head" else (),
        weights=weights,
        partial=frozenset(norms) if sequence else frozenset(),
        sequence=Sequence(tuple(layers), "norm") if sequence else None,
    )


def cut_weights(module: nn.Module, weights: dict[str, Rows], axis: TensorAxis) -> None:
    """Leaves this rank's part of each weight."""
    with torch.no_grad():
        for name, rows in weights.items():
            owner, _, key = name.rpartition(".")
            weight = module.get_submodule(owner).get_parameter(key)
            weight.data = rows.part(weight.data, axis.rank, axis.size).clone()


@contextmanager
def at_work(module: nn.Module, layout: TensorLayout, shared_memory: bool = True) -> Iterator[TensorAxis]:
    """A module on the tensor axis that all ranks form."""
    axis = open_axis(dist.group.WORLD, shared_memory=shared_memory)  # type: ignore[arg-type]
    cut_weights(module, dict(layout.weights), axis)
    installed = install(module, layout, axis, layout.sequence is not None)
    try:
        yield axis
    finally:
        installed.close()
        axis.close()


def worst_gradient(
    module: nn.Module, reference: nn.Module, layout: TensorLayout, axis: TensorAxis, frozen: Iterable[str] = ()
) -> float:
    """The largest difference of a gradient from its part of the whole one, relative to the whole one's largest value.

    Gradients a million times smaller than those of other weights are rounding: of one token, attention has no gradient.
    """
    worst = 0.0
    whole = dict(reference.named_parameters())
    largest = max(weight.grad.abs().max() for weight in whole.values() if weight.grad is not None)
    for name, parameter in module.named_parameters():
        if name in frozen:
            assert parameter.grad is None
            continue
        expected = whole[name].grad
        assert expected is not None, name
        assert parameter.grad is not None, name
        got = parameter.grad
        if name in layout.partial:
            got = got.clone()
            dist.all_reduce(got)
        rows = layout.weights.get(name)
        part = expected if rows is None else rows.part(expected, axis.rank, axis.size)
        assert got.shape == part.shape, (name, got.shape, part.shape)
        worst = max(worst, difference(got, part, expected.abs().max().clamp(min=1e-6 * largest)))
    return worst


def difference(got: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference, relative to the largest value."""
    largest = (expected if scale is None else scale).detach().abs().max()
    return float((got.detach().double() - expected.detach().double()).abs().max() / largest.clamp(min=1e-12))
