"""What stands in for an attention mask that nobody may build: it would be of the size of all pairs of tokens, or of a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.context_parallel.masks import AttentionMask

# What a model does to a mask on the way to its attention and what leaves it what it is.
_KEPT = frozenset(
    [
        "__getitem__",
        "bool",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "expand",
        "expand_as",
        "narrow",
        "repeat",
        "requires_grad_",
        "squeeze",
        "to",
        "type",
        "unsqueeze",
        "view",
        "reshape",
        "alias",
        "view_as",
    ]
)
_WHOLE = frozenset(["clone", "contiguous", "detach", "repeat", "requires_grad_", "alias"])
_ASKED = frozenset(
    ["__get__", "__repr__", "__hash__", "__len__", "dim", "ndimension", "size", "stride", "numel", "is_contiguous", "data_ptr",
     "is_floating_point", "get_device", "storage_offset", "type_as", "element_size", "untyped_storage", "__reduce_ex__", "nelement"]
)  # fmt: skip


class StatedMask(Tensor):
    """A mask that says in words what queries see. It looks like a boolean (B, 1, s, s) and holds one number.

    Attributes:
        stated: What it says.
    """

    stated: AttentionMask

    @classmethod
    def of(cls, stated: AttentionMask, shape: Sequence[int], device: torch.device | str) -> StatedMask:
        """A mask of some shape that says this."""
        return cls._with(torch.ones((), dtype=torch.bool, device=device).expand(tuple(shape)), stated)

    @classmethod
    def _with(cls, tensor: Tensor, stated: AttentionMask) -> StatedMask:
        mask = tensor.as_subclass(cls)
        mask.stated = stated
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets a mask be passed on, and nothing be computed with it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ASKED:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        mask = args[0] if args else None
        if name not in _KEPT or not isinstance(mask, StatedMask):
            raise MisconfigurationException(
                f"A model computes with its attention mask ({name}), as it does to add a bias to it. With ContextParallel no rank has one: its"
                " masks come from Hugging Face's functions and may only be handed to scaled_dot_product_attention. Take the bias out of"
                " the model, or ContextParallel out of FiveD."
            )
        if name in _WHOLE:
            return mask
        with torch._C.DisableTorchFunctionSubclass():
            # One number, in whichever shape: nothing of the size of the mask is ever made.
            result = func(mask.as_subclass(Tensor), *args[1:], **kwargs)
            if result.untyped_storage().nbytes() > result.element_size():
                result = torch.ones((), dtype=result.dtype, device=result.device).expand(result.shape)
        return cls._with(result, mask.stated)
