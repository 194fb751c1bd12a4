"""Layers with attention directly on a LightningModule: positions and the mask are made at the level of the user."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modules import LENGTH, Block, TinyLM


class Attending(Block):
    """A block with causal attention, of this file or of torch.

    Attributes:
        seen: Numbers of tokens it was called with.
    """

    def __init__(self, of_torch: bool, width: int = 8, heads: int = 2) -> None:
        super().__init__(width)
        self.heads = heads
        self.seen: set[int] = set()
        if of_torch:
            self.layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, bias=False)
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.shape[1])
        if hasattr(self, "layer"):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
            return super().forward(self.layer(x, mask, is_causal=True))
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + y.transpose(1, 2).flatten(2))


def with_attention(kind: Callable[..., TinyLM], **arguments: Any) -> TinyLM:
    """A module of this kind with blocks that attend and positions that are learned."""

    class Positioned(kind):  # type: ignore[valid-type,misc]
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            for layer in self.layers:
                x = layer(x)
            logits: Tensor = self.head(x)
            return logits

    module: TinyLM = Positioned(**arguments)
    torch.manual_seed(5)
    module.positions = nn.Embedding(2 * LENGTH, 8)
    module.layers = nn.ModuleList(Attending(of_torch) for of_torch in (False, True, False))
    return module
