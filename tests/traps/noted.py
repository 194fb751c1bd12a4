"""Dropout whose masks can be compared."""

import torch
from torch import Tensor, nn


class Noted(nn.Dropout):
    """Dropout that writes its masks down."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.masks: list[tuple[bool, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        mask = super().forward(torch.ones_like(x))
        self.masks.append(tuple((mask != 0).flatten().tolist()))
        return x * mask
