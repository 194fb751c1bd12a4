"""A weight for ranks that have none to train."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn


class Placeholder(nn.Module):
    """Holds one parameter without elements, so that an optimizer of a stage without trainable weights has something to hold.

    Checkpoints neither have it nor miss it.

    Args:
        device: Where the parameter is.
    """

    name: ClassVar[str] = "stage_without_weights"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, device=device))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        return
