"""Bytes that the decoder's blocks save for backward: the formula that a memory estimate starts from.

Per token of one block, in elements; h hidden size, k width of all key (or value) heads, f intermediate size, N query heads:

| | kept | elements |
|---|---|---|
| nothing recomputed | block input, its norm, q, attention output, second norm's input and output: 6h; k and v: 2k; gate, up, silu(gate), product: 4f; log-sum-exp: N; the norms' factors: 2; a norm in parts: 2h | 6h + 2k + 4f + N + 2 (+ 2h) |
| selective | block input, q, attention output, o: 4h; k and v: 2k; gate, up: 2f; log-sum-exp: N | 4h + 2k + 2f + N |
| full | block input | h |

With experts in place of the feed-forward layer, 4f and 2f are replaced; E experts of width i, K of them for each token, s shared ones:

| | kept | elements |
|---|---|---|
| nothing recomputed | rows and results of each choice: 2hK; its gate, up, silu(gate), product: 4iK; of shared experts: 4is (and with a gate h + 1) | 2hK + 4iK + 4is |
| selective | results of each choice: hK; its gate, up: 2iK; of shared experts: 2is (and with a gate h + 1) | hK + 2iK + 2is |

Beside them the router keeps scores and weights, E + 2K + 1 float32 (selective: logits, E; in 16 bits its input too, h float32), and the choice, K integers of 8 bytes.
In any mode the way to the experts and back is kept: 3K + 1 such integers. That is for as many rows as tokens have choices; where experts are
on other ranks a rank has the rows that arrive, more or less of them. What losses of experts keep, a few E, is left out.

Where RMSNorm is one kernel it saves its input; where torch takes it apart, as on CPU, each also saves its input divided by the
root mean square. The log-sum-exp and the norms' factors are float32 under any precision. (In the notation of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, section 4, whose GPT block has other parts.)
"""

from __future__ import annotations

from typing import Literal

from lightning_5d.models.decoder import DecoderConfig

Recomputed = Literal["none", "selective", "full"]


def block_activation_bytes(
    config: DecoderConfig,
    batch: int,
    tokens: int,
    itemsize: int = 4,
    recomputed: Recomputed = "none",
    *,
    fused_norm: bool = False,
    sparse: bool | None = None,
) -> int:
    """Bytes that one `DecoderBlock` keeps between its forward and its backward.

    Args:
        config: Sizes of the decoder.
        batch: Sequences in a microbatch.
        tokens: Tokens in a sequence.
        itemsize: Bytes of an element of the compute dtype.
        recomputed: The mode of activation checkpointing.
        fused_norm: Whether RMSNorm is one kernel, as on CUDA.
        sparse: Whether the block has experts; if ``None``, whether the config has some.

    Raises:
        ValueError: For another mode.
    """
    h, f, heads = config.hidden_size, config.intermediate_size, config.num_heads
    k = config.num_kv_heads * config.head_size
    integers = 0
    if recomputed == "full":
        elements, floats = h, 0
    elif recomputed == "selective":
        elements, floats = 4 * h + 2 * k + 2 * f, heads
    elif recomputed == "none":
        elements, floats = (6 if fused_norm else 8) * h + 2 * k + 4 * f, heads + 2
    else:
        raise ValueError(f"recomputed={recomputed!r} is none of 'none', 'selective' and 'full'.")
    moe = config.moe
    if moe is not None and sparse is not False:
        inner, gated = moe.intermediate_size, (h + 1 if moe.shared_gate else 0)
        integers = 3 * moe.top_k + 1
        if recomputed == "selective":
            elements += moe.top_k * (h + 2 * inner) + 2 * inner * moe.shared + gated - 2 * f
            floats += moe.experts
        elif recomputed == "none":
            elements += moe.top_k * (2 * h + 4 * inner) + 4 * inner * moe.shared + gated - 4 * f
            floats += moe.experts + 2 * moe.top_k + 1 + (h if itemsize < 4 else 0)
            integers += moe.top_k
    return batch * tokens * (elements * itemsize + floats * 4 + integers * 8)
