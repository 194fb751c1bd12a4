"""Settings of Hugging Face models that cannot work on a part of a sequence, said before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_5d.parallelism import Problem

_ATTENTION = "sdpa"
# They look at the largest position of the batch, which differs between ranks.
_BY_LENGTH = ("dynamic", "longrope")
_NO_CP = "Take ContextParallel out of FiveD for this model."
# Mix tokens outside of attention, by kernels or loops.
_MIXERS = (
    "Mamba", "Mamba2", "FalconMamba", "Rwkv", "RecurrentGemma", "Griffin", "xLSTM", "GatedDeltaNet", "KimiDelta", "ShortConv", "Lfm2Conv",
    "Jamba", "Bamba", "Zamba", "Hyena", "RetNet", "LightningAttention", "Reformer", "FNet", "Longformer", "BigBird", "LED",
)  # fmt: skip


def hugging_face_problems(module: nn.Module) -> list[Problem]:
    """What is wrong with the Hugging Face models inside of a module; nothing about other modules.

    Args:
        module: The user's module.
    """
    problems: dict[str, Problem] = {}
    for name, inner in module.named_modules():
        if not type(inner).__module__.startswith("transformers."):
            continue
        for key, problem in _found(name, inner):
            problems.setdefault(key, problem)
    return list(problems.values())


def _found(name: str, module: nn.Module) -> Iterator[tuple[str, Problem]]:
    kind = type(module).__name__
    here = f"{name} ({kind})" if name else kind
    if hasattr(module, "relative_attention_bias") or "RelativePositionBias" in kind or hasattr(module, "rel_attn_bias"):
        yield "bias", Problem(f"{here} adds a learned bias of relative positions to its attention scores.", _NO_CP)
    mixer = next((word for word in _MIXERS if kind.startswith(word)), None)
    if mixer is not None and not hasattr(module, "config"):
        yield "mixer", Problem(f"{here} mixes tokens outside of attention, of which each rank has a part.", _NO_CP)
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "get_input_embeddings"):  # no model
        return
    implementation = getattr(config, "_attn_implementation", None)
    if implementation is not None and implementation.removeprefix("paged|") != _ATTENTION:
        supports = getattr(module, "_supports_sdpa", True)
        fix = (
            f"Build it with attn_implementation={_ATTENTION!r}."
            if supports
            else f"{kind} knows no attn_implementation={_ATTENTION!r}. {_NO_CP}"
        )
        yield (
            f"attention {implementation}",
            Problem(
                f"{here} has config._attn_implementation={implementation!r}: ContextParallel sees only calls of"
                " torch.nn.functional.scaled_dot_product_attention.",
                fix,
            ),
        )
    for rope in _ropes(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if rope in _BY_LENGTH:
            yield (
                f"rope {rope}",
                Problem(
                    f"{here} has rope_type={rope!r} in its config: it turns by the largest position of the batch, which differs between ranks"
                    " that hold different tokens.",
                    "Use rope_type 'default', 'linear', 'yarn' or 'llama3'.",
                ),
            )
    if kind.startswith(("Bloom", "Mpt")) or getattr(config, "alibi", False) is True:
        yield "alibi", Problem(f"{here} adds ALiBi to its attention scores, a bias of positions.", _NO_CP)


def _ropes(given: Any) -> Iterator[str]:
    """The kinds of rotary positions in a config: of all layers, or of each kind of them."""
    if not isinstance(given, Mapping):
        return
    kind = given.get("rope_type", given.get("type"))
    if isinstance(kind, str):
        yield kind
    for inner in given.values():
        yield from _ropes(inner)
