"""What is given to modules inside of doors that would take their part of a sequence for the whole."""

from __future__ import annotations

from typing import Any, Self

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.arguments import Signature
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.lengths import named_tensors
from lightning_5d.context_parallel.positions import Counting, documents_of


class Adaptation:
    """What one module is given.

    - Positions in the whole sequence, if it takes ``position_ids`` and got none.
    - Of Hugging Face's models: no cache, if nobody asked for one. Whether the positions that the user gave mean documents is noted in
      `Inside.documents`.

    Args:
        name: The module's name.
        module: The module.
        signature: What it takes.
    """

    def __init__(self, name: str, module: nn.Module, signature: Signature) -> None:
        self._name, self._module, self._signature = name, module, signature
        self._counting: Counting | None = None
        self._hugging_face = is_hugging_face(module)

    @classmethod
    def of(cls, name: str, module: nn.Module, signature: Signature) -> Self | None:
        """The adaptation of a module; ``None`` if it needs none."""
        takes = signature.all_names
        return cls(name, module, signature) if "position_ids" in takes or is_hugging_face(module) else None

    def __call__(
        self, inside: Inside, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments to call it with; ``None`` for those given."""
        named = self._signature.named(args, kwargs)
        takes = self._signature.all_names
        device = self._device(named, inside)
        if device is None:
            return None
        new: dict[str, Any] = {}
        if self._hugging_face:
            new.update(self._of_hugging_face(inside, named))
        if "position_ids" in takes and named.get("position_ids") is None:
            if self._counting is None:
                self._counting = Counting.of(self._name, self._module)
            new["position_ids"] = self._counting.positions(inside, named, device)
        return self._signature.replaced(args, kwargs, new) if new else None

    def _device(self, named: dict[str, Any], inside: Inside) -> torch.device | None:
        """Where its tokens are; ``None`` if it got none of this rank's."""
        local = inside.sequence.cut.local
        for _, tensor in named_tensors(named):
            if tensor.ndim >= 2 and tensor.shape[1] == local:
                return tensor.device
        return None

    def _of_hugging_face(self, inside: Inside, named: dict[str, Any]) -> dict[str, Any]:
        takes = self._signature.all_names
        new: dict[str, Any] = {}
        self._refuse(inside, named)
        given_cache = named.get("use_cache")
        uses_cache = getattr(self._module.config, "use_cache", None) if given_cache is None else given_cache
        if "use_cache" in takes and given_cache is None:
            new["use_cache"] = False
            inside.cacheless = inside.cacheless or bool(uses_cache and not self._recomputes())
        given = named.get("position_ids")
        # With a mask or a cache Hugging Face does not look for documents; a cache is dropped while blocks are recomputed.
        looks = named.get("attention_mask") is None and not inside.cacheless and (not uses_cache or self._recomputes())
        if looks and isinstance(given, Tensor) and given.ndim == 2:
            inside.documents = documents_of(inside.gather(given, 1))
        return new

    def _recomputes(self) -> bool:
        found = any(getattr(inner, "gradient_checkpointing", False) for inner in self._module.modules())
        return found and self._module.training and torch.is_grad_enabled()

    def _refuse(self, inside: Inside, named: dict[str, Any]) -> None:
        what = f"{self._name} ({type(self._module).__name__})"
        if named.get("use_cache"):
            raise MisconfigurationException(
                f"{what} was called with use_cache=True, but each rank has {inside.sequence.cut.local} of {inside.sequence.cut.length} tokens here. Leave it"
                " out in steps."
            )
        keep = named.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 0):
            raise MisconfigurationException(
                f"{what} was called with logits_to_keep={keep!r}, but each rank has {inside.sequence.cut.local} of {inside.sequence.cut.length} tokens here."
                " Take all logits and pick some in training_step, where sequences are whole."
            )
        encodes = getattr(self._module.config, "is_encoder_decoder", False)
        if encodes and named.get("labels") is not None and named.get("decoder_input_ids") is None:
            raise MisconfigurationException(
                f"{what} makes the decoder's input of its labels, which are whole while each rank has {inside.sequence.cut.local} of"
                f" {inside.sequence.cut.length} tokens here. Pass decoder_input_ids (labels shifted right) beside the labels."
            )


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a module is a model of Hugging Face's, which is never imported for that."""
    return hasattr(module, "config") and any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )
