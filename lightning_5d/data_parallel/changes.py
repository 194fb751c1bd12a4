"""Taking over what somebody wrote into a copy of a tensor."""

from __future__ import annotations

import torch


def copy_changes(seen: torch.Tensor, original: torch.Tensor) -> None:
    """Writes to ``original`` where its copy ``seen``, perhaps of lower precision, says something else.

    Elements that nobody has changed keep their precision, and without any ``original`` is not touched on CPU. On an
    accelerator nothing waits for the answer.
    """
    as_copied = original.to(seen.dtype)
    if seen.device.type == "cpu" and torch.equal(_bits(seen), _bits(as_copied)):
        return
    original.copy_(seen if seen.dtype == original.dtype else torch.where(seen == as_copied, original, seen))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Integers are compared twice as fast as floating point numbers, and a NaN equals itself.
    flat = tensor.contiguous().view(-1)
    for dtype in (torch.int64, torch.int32):
        if flat.numel() * flat.itemsize % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)
