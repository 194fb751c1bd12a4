"""Where tokens are in the whole sequence, for modules inside doors that would else count their own."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.inside import Inside

_FROM_IDS = "create_position_ids_from_input_ids"


@dataclass(frozen=True)
class Counting:
    """How a module counts positions where it is given none.

    Attributes:
        kind: ``"tokens"``: 0 to S - 1. ``"not padding"``: only tokens that are not padding count, from `padding` + 1 on, as in RoBERTa.
            ``"seen"``: only tokens that the mask shows, as in OPT.
        padding: The number of the padding token.
    """

    kind: Literal["tokens", "not padding", "seen"] = "tokens"
    padding: int = 0

    @classmethod
    def of(cls, name: str, module: nn.Module) -> Counting:
        """What a module does.

        Raises:
            MisconfigurationException: If something in it counts by itself and takes no positions.
        """
        for inner_name, inner in module.named_modules():
            kind = type(inner)
            if not kind.__module__.startswith("transformers.") or "Embedding" not in kind.__name__:
                continue
            taken = inspect.signature(kind.forward).parameters
            from_ids = hasattr(kind, _FROM_IDS) or (
                hasattr(sys.modules.get(kind.__module__), _FROM_IDS) and hasattr(inner, "padding_idx")
            )
            if from_ids and "position_ids" not in taken and ("input_ids" in taken or hasattr(kind, _FROM_IDS)):
                raise MisconfigurationException(
                    f"{name}.{inner_name} ({kind.__name__}) counts the positions of the tokens it gets, and takes none. Under ContextParallel each"
                    " rank has a part of them. Use a model whose forward takes position_ids."
                )
            if from_ids and "position_ids" in taken:
                return cls("not padding", int(inner.padding_idx))
            if "attention_mask" in taken and "position_ids" in taken:
                return cls("seen")
        return cls()

    def positions(self, inside: Inside, named: dict[str, Any], device: torch.device) -> Tensor:
        """The positions of this rank's tokens, (1, s) or (B, s).

        Args:
            inside: The open door.
            named: The module's arguments, local.
            device: Where they are to be.
        """
        sequence = inside.sequence
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        if self.kind == "not padding" and isinstance(ids, Tensor):
            counted = inside.gather(ids, 1).ne(self.padding).long()
            return sequence.part(counted.cumsum(1) * counted + self.padding, 1, fill=self.padding)
        if self.kind == "seen" and isinstance(mask, Tensor):
            counted = inside.gather(mask, 1).long()
            return sequence.part(counted.cumsum(1) * counted - 1, 1)
        # Padding gets the last token's position: a table of positions may end there.
        positions = sequence.positions(device).clamp(max=sequence.cut.length - 1)
        return positions + self.padding + 1 if self.kind == "not padding" else positions


def documents_of(position_ids: Tensor) -> Tensor | None:
    """Which document each token is of where positions (B, S) do not go on by one; ``None`` if all go on.

    As `transformers.masking_utils.find_packed_sequence_indices` reads them (checked with transformers 5.24).
    """
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    documents = (steps != 1).cumsum(-1)
    return documents if bool((documents[:, -1] != 0).any()) else None
