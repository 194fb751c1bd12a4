"""An ordinary decoder in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    batch: int
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 4096
    tokens: int = 512


SIZES = {"small": Size(layers=8, width=256, batch=4), "medium": Size(layers=12, width=512, batch=1)}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.depth = size.heads, size.kv_heads, size.width // size.heads
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, size.kv_heads * self.depth, bias=False)
        self.v = nn.Linear(size.width, size.kv_heads * self.depth, bias=False)
        self.o = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q_BNTH = self.q(x_BTD).view(b, t, self.heads, self.depth).transpose(1, 2)
        k_BGTH = self.k(x_BTD).view(b, t, self.kv_heads, self.depth).transpose(1, 2)
        v_BGTH = self.v(x_BTD).view(b, t, self.kv_heads, self.depth).transpose(1, 2)
        q_BNTH, k_BGTH = _rotate(q_BNTH, cos_TH, sin_TH), _rotate(k_BGTH, cos_TH, sin_TH)
        y_BNTH = self.mix(q_BNTH, k_BGTH, v_BGTH)
        return self.o(y_BNTH.transpose(1, 2).reshape(b, t, -1))

    def mix(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BNTH, k_BGTH, v_BGTH, is_causal=True, enable_gqa=True)


def _rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    left, right = x_BNTH.chunk(2, -1)
    return x_BNTH * cos_TH + torch.cat((-right, left), -1) * sin_TH


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = 8 * size.width // 3 // 64 * 64
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.gate = nn.Linear(size.width, hidden, bias=False)
        self.up = nn.Linear(size.width, hidden, bias=False)
        self.down = nn.Linear(hidden, size.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TH, sin_TH)
        y_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))


class Decoder(nn.Module):
    """``forward(tokens, targets)`` returns the mean cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        depth = size.width // size.heads
        angle_TH = torch.outer(torch.arange(size.tokens), 10000.0 ** -(torch.arange(0, depth, 2) / depth)).repeat(1, 2)
        self.register_buffer("cos", angle_TH.cos(), persistent=False)
        self.register_buffer("sin", angle_TH.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = self.logits(tokens_BT, self.cos, self.sin)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def logits(self, tokens_BT: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TH, sin_TH)
        return self.head(self.norm(x_BTD))


class PositionedDecoder(Decoder):
    """The same weights; ``forward(tokens, position_ids)`` returns logits, of any positions below the size's tokens, (1, T)."""

    def forward(self, tokens_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        places = slice(tokens_BT.shape[1]) if position_ids is None else position_ids[0]
        return self.logits(tokens_BT, self.cos[places], self.sin[places])
