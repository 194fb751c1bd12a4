"""A small decoder-only language model in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU or a mixture of experts.

It is the reference model of the demo, the tests and the benchmarks, and knows nothing about parallelism. Modules are
named as in Hugging Face's Llama, so weights move between the two by name.

Shape suffixes: B batch, T tokens, D hidden size, N query heads, K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.expert_parallel.balance import Losses, added
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.moe import MoE
from lightning_5d.feed_forward import Projection, SwiGLU


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a `Decoder`.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the SwiGLU.
        num_layers: Number of blocks.
        num_heads: Query heads; must divide `hidden_size`.
        num_kv_heads: Key/value heads; must divide `num_heads`.
        context_length: The longest sequence `generate` looks back on. `forward` itself takes any length.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square inside RMSNorm.
        tie_embeddings: Whether the output projection is the input embedding.
        initializer_std: Standard deviation of the weights at the start.
        moe: Experts in place of the SwiGLU, as a `MoEConfig` or its fields by name; ``None`` for a dense model.
        dense_layers: With experts: how many blocks at the beginning keep their SwiGLU.

    Raises:
        ValueError: Naming every size that does not fit, with the nearest that would.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    context_length: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    initializer_std: float = 0.02
    moe: MoEConfig | None = None
    dense_layers: int = 0

    def __post_init__(self) -> None:
        problems = self._problems()
        if self.moe is not None:
            try:
                object.__setattr__(self, "moe", MoEConfig.of(self.moe))
            except ValueError as error:
                problems += [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
        if problems:
            raise ValueError("The decoder cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DecoderConfig:
        """The sizes known as `name` (see `PRESETS`), with `changes` applied.

        Raises:
            ValueError: If there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no decoder preset {name!r}; there are {', '.join(sorted(PRESETS))}.")
        return cls(**{**PRESETS[name], **changes})

    def _problems(self) -> list[str]:
        counts = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "context_length",
        )
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1." for name in counts if getattr(self, name) < 1
        ]
        if problems:
            return problems
        if self.hidden_size % (2 * self.num_heads):
            step = 2 * self.num_heads
            nearest = max(step, round(self.hidden_size / step) * step)
            problems.append(
                f"hidden_size {self.hidden_size} does not give {self.num_heads} heads of an even size "
                f"(rotary positions turn pairs); hidden_size {nearest} does."
            )
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            problems.append(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                f"one of {', '.join(map(str, divisors))} does."
            )
        if not 0 <= self.dense_layers <= self.num_layers:
            nearest = min(max(self.dense_layers, 0), self.num_layers)
            problems.append(
                f"dense_layers is {self.dense_layers}, of {self.num_layers} layers; {nearest} is the nearest."
            )
        return problems


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "moe_tiny": {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "dense_layers": 1,
            "moe": {
                "experts": 8,
                "top_k": 2,
                "intermediate_size": 128,
                "shared": 1,
                "scores": "sigmoid",
                "bias_rate": 0.001,
            },
        },
        "demo": {"hidden_size": 192, "intermediate_size": 512, "num_layers": 4, "num_heads": 6, "num_kv_heads": 2},
        "small": {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_layers": 8,
            "context_length": 512,
        },
        "medium": {
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_layers": 12,
            "context_length": 512,
        },
    }
)


class TokenEmbedding(nn.Embedding):
    """An embedding table whose weights start from a normal distribution."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=self.std)


def rotary_angles(position_ids_BT: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each of shape (B, 1, T, H), in float32 (RoFormer, arXiv:2104.09864).

    They are computed and not kept, so that a model has no buffer to lose on its way through the meta device.
    """
    exponents = torch.arange(0, head_size, 2, device=position_ids_BT.device, dtype=torch.float32) / head_size
    angles_BTh = position_ids_BT[..., None].float() * theta**-exponents
    angles_B1TH = torch.cat((angles_BTh, angles_BTh), dim=-1).unsqueeze(1)
    return angles_B1TH.cos(), angles_B1TH.sin()


def rotate(x_BNTH: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
    """Turn the pairs (i, i + H/2) of each head by the angle of their position."""
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_B1TH + torch.cat((-second, first), dim=-1) * sin_B1TH


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves `num_heads / num_kv_heads` query heads (arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        width, kv_width, std = config.hidden_size, config.num_kv_heads * config.head_size, config.initializer_std
        self.q_proj = Projection(width, width, std)
        self.k_proj = Projection(width, kv_width, std)
        self.v_proj = Projection(width, kv_width, std)
        self.o_proj = Projection(width, width, residual_std(config))

    def forward(self, x_BTD: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
        """Mix (B, T, D) over positions up to and including each one."""
        # The number of heads is read off the projections, whose widths are what counts.
        q_BNTH = self.q_proj(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k_BKTH = self.k_proj(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v_BKTH = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        cos_B1TH, sin_B1TH = cos_B1TH.to(q_BNTH.dtype), sin_B1TH.to(q_BNTH.dtype)
        q_BNTH, k_BKTH = rotate(q_BNTH, cos_B1TH, sin_B1TH), rotate(k_BKTH, cos_B1TH, sin_B1TH)
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=q_BNTH.shape[1] != k_BKTH.shape[1]
        )
        out_BTD: Tensor = self.o_proj(out_BNTH.transpose(1, 2).flatten(-2))
        return out_BTD


class DecoderBlock(nn.Module):
    """Attention, then the feed-forward layer, each normalised at its input and added to the residual stream.

    Args:
        config: Sizes.
        sparse: Whether the feed-forward layer is a mixture of experts.
    """

    def __init__(self, config: DecoderConfig, sparse: bool = False) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        std, down_std = config.initializer_std, residual_std(config)
        if sparse and config.moe is not None:
            self.mlp: nn.Module = MoE(config.hidden_size, config.moe, std, down_std)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, std, down_std)

    def forward(
        self, x_BTD: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor, losses: Losses | None = None
    ) -> Tensor | tuple[Tensor, Losses]:
        """Map the residual stream (B, T, D) to itself; and losses of experts so far, if there are any, to these and its own."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_B1TH, sin_B1TH)
        out = self.mlp(self.post_attention_layernorm(x_BTD))
        if losses is None:
            return x_BTD + out  # type: ignore[no-any-return]
        if isinstance(out, tuple):
            out, own = out
            losses = added(losses, own)
        return x_BTD + out, losses


class DecoderOutput(NamedTuple):
    """What a decoder returns whose experts have losses.

    Attributes:
        logits: (B, T, V).
        losses: Sums over its layers by name, ``"balance"`` and ``"z"``, to be added to the loss.
    """

    logits: Tensor
    losses: Losses


class Decoder(nn.Module):
    """Token ids in, logits out.

    Every module that owns parameters fills them in its own `reset_parameters`, so a decoder that was built on the meta
    device can be filled one module at a time.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size, config.initializer_std)
        sparse = (config.moe is not None and index >= config.dense_layers for index in range(config.num_layers))
        self.layers = nn.ModuleList(DecoderBlock(config, experts) for experts in sparse)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = Projection(config.hidden_size, config.vocab_size, config.initializer_std)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def parallel_plan(self) -> Mapping[str, str]:
        """Which layers may be cut over ranks, and how; the words are those of Hugging Face's `base_model_tp_plan`."""
        config = self.config
        sparse = config.num_layers - config.dense_layers if config.moe is not None else 0
        feed_forward = [
            *(["mlp"] if sparse < config.num_layers else []),
            *(["mlp.shared_experts"] if sparse and config.moe is not None and config.moe.shared else []),
        ]
        return {
            "embed_tokens": "vocabulary",
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            **{f"layers.*.{name}.gate_proj": "colwise" for name in feed_forward},
            **{f"layers.*.{name}.up_proj": "colwise" for name in feed_forward},
            **{f"layers.*.{name}.down_proj": "rowwise" for name in feed_forward},
            "lm_head": "vocabulary",
        }

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor | DecoderOutput:
        """Predict the token that follows each position.

        Args:
            input_ids: Token ids of shape (B, T).
            position_ids: Positions of shape (B, T) or (1, T); 0 to T - 1 when not given.

        Returns:
            Logits of shape (B, T, V); with them the losses of experts, where the config has some.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cos_B1TH, sin_B1TH = rotary_angles(position_ids, self.config.head_size, self.config.rope_theta)
        x_BTD = self.embed_tokens(input_ids)
        names = self.config.moe.losses if self.config.moe is not None else ()
        if not names:
            for layer in self.layers:
                x_BTD = layer(x_BTD, cos_B1TH, sin_B1TH)
            logits_BTV: Tensor = self.lm_head(self.norm(x_BTD))
            return logits_BTV
        # From block to block, so that a pipeline carries them on with the residual stream.
        losses = {name: x_BTD.new_zeros((), dtype=torch.float32) for name in names}
        for layer in self.layers:
            x_BTD, losses = layer(x_BTD, cos_B1TH, sin_B1TH, losses)
        return DecoderOutput(self.lm_head(self.norm(x_BTD)), losses)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each sequence by sampling one token after the other.

        Each token costs one forward over the last `context_length` positions; nothing is cached.

        Args:
            input_ids: The beginnings, of shape (B, T), T at least 1.
            max_new_tokens: How many tokens to add.
            temperature: Divides the logits before the softmax; 0 always takes the likeliest token.
            top_k: Sample only from this many likeliest tokens.
            generator: The source of randomness; torch's global one when not given.

        Returns:
            Beginnings and continuations, of shape (B, T + max_new_tokens).

        Raises:
            ValueError: If there is no token to begin with, or a setting is out of range.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] < 1:
            raise ValueError(f"generate needs ids of shape (batch, at least 1), not {tuple(input_ids.shape)}.")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature {temperature} must be at least 0 and top_k {top_k} at least 1 or None.")
        ids_BT = input_ids
        for _ in range(max_new_tokens):
            output = self(ids_BT[:, -self.config.context_length :])
            logits_BTV = output.logits if isinstance(output, DecoderOutput) else output
            logits_BV = logits_BTV[:, -1].float()
            next_B1 = sample_token(logits_BV, temperature, top_k, generator)
            ids_BT = torch.cat((ids_BT, next_B1), dim=1)
        return ids_BT


def sample_token(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row, of shape (B, 1), from softmax(logits / temperature) over the `top_k` likeliest."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kept_BV, index_BV = logits_BV.topk(top_k, dim=-1)
        logits_BV = torch.full_like(logits_BV, float("-inf")).scatter(-1, index_BV, kept_BV)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)


def residual_std(config: DecoderConfig) -> float:
    """Standard deviation of a layer that writes to the residual stream: smaller the more of them there are (GPT-2)."""
    return config.initializer_std / math.sqrt(2 * config.num_layers)
