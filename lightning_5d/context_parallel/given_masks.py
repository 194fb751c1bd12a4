"""What an attention mask says that a model hands to its attention, where each rank has a part of the tokens.

Read is what is the same for all queries, which ranks can put together from their parts, and the causal triangle, where it was made for
the whole sequence. A mask of a rank's own queries and keys says nothing of the others': what looks like the triangle in a part may be
a window that is longer than the part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.place import refused
from lightning_5d.context_parallel.triangle import Triangle

_HIDES = -1e4
"""Added to scores, so much or less leaves nothing of a probability: models take -inf, a dtype's smallest number, -1e9 or -1e4."""

_WORKS = (
    "Pass is_causal=True or a mask without queries, (B, 1, 1, S) of one entry per key; compare document numbers or positions that the model is"
    " given as arguments, documents[:, :, None] == documents[:, None, :]; or build a Hugging Face model whose masks are known by name: causal,"
    " sliding windows, padding and packed documents."
)


@dataclass(frozen=True)
class Reading:
    """What a mask says.

    Attributes:
        causal: Keys up to the query's own position only.
        keys: (B, S) or (1, S), bool, whole on every rank: keys that may be seen at all; ``None`` for all.
    """

    causal: bool = False
    keys: Tensor | None = None


class GivenMasks:
    """Reads the masks of one call of a door, each of them once: all layers share one, or views of one buffer."""

    def __init__(self) -> None:
        self._read: deque[tuple[Tensor, int, bool, Reading]] = deque(maxlen=8)

    def clear(self) -> None:
        """Forgets them."""
        self._read.clear()

    def read(self, inside: Inside, mask: Tensor, lead: Sequence[int], hides: bool = False) -> Reading:
        """Reads a mask; all ranks of the axis call it together.

        Args:
            inside: The door that is open.
            mask: (..., H|1, queries|1, keys) or without the first of them; boolean, or added to the scores.
            lead: Sizes of the queries' dimensions before that of heads.
            hides: Whether ``True`` hides a key, as in `torch.nn.MultiheadAttention`.

        Raises:
            MisconfigurationException: If it may say something else.
        """
        for known, version, hid, reading in self._read:
            if hid == hides and version == known._version and _is_same(known, mask):
                return reading
        reading = _read(inside, mask, lead, hides)
        # The mask is kept with it, so that no other one gets its memory.
        self._read.append((mask, mask._version, hides, reading))
        return reading


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one._version == other._version
    )


def _read(inside: Inside, mask: Tensor, lead: Sequence[int], hides: bool) -> Reading:
    cut = inside.sequence.cut
    shape = tuple(mask.shape)
    if mask.requires_grad:
        raise refused(
            inside, f"adds a learned bias {shape} to its attention scores", "A bias of positions cannot be cut yet."
        )
    queries = mask.shape[-2] if mask.ndim > 1 else 1
    if mask.shape[-1] not in (cut.local, cut.length):
        raise refused(
            inside,
            f"has an attention mask {shape} for {cut.local} keys",
            "Its last dimension has to be that of the tokens.",
        )
    if mask.ndim > 2 and mask.shape[-3] > 1 and mask.stride(-3):
        raise refused(inside, f"has an attention mask {shape} with an entry for each of its heads", _WORKS)
    if queries == 1 or mask.stride(-2) == 0:
        return Reading(keys=_keys(inside, mask, lead, hides))
    if any(size > 1 and mask.stride(dim) for dim, size in enumerate(mask.shape[:-2])):
        raise refused(
            inside, f"has an attention mask {shape} of pairs of tokens that differs between sequences", _WORKS
        )
    if is_causal(inside, mask, hides):
        return Reading(causal=True)
    raise refused(
        inside,
        f"has an attention mask {shape} of pairs of tokens, made of a rank's own ones, of which nobody can tell what it says about all pairs",
        _WORKS,
    )


def _keys(inside: Inside, mask: Tensor, lead: Sequence[int], hides: bool) -> Tensor | None:
    """(B|1, S): which keys are seen."""
    row = mask[..., 0, :] if mask.ndim > 1 else mask
    row = row[..., 0, :] if row.ndim > 1 else row  # of heads
    if row.ndim > 2:
        row = row.expand(*lead, row.shape[-1])
    row = row.reshape(-1, row.shape[-1])
    whole = row if row.shape[-1] == inside.sequence.cut.length else inside.sequence.gather(row.contiguous(), 1)
    seen = _seen(whole, hides)
    if seen is None:
        raise refused(
            inside,
            f"has an attention mask {tuple(mask.shape)} that adds other numbers than 0 and -inf to scores",
            _WORKS,
        )
    return None if bool(seen.all()) else seen


def is_causal(inside: Inside, mask: Tensor, hides: bool) -> bool:
    """Whether a mask of queries and keys is the causal triangle of the whole sequence."""
    cut = inside.sequence.cut
    if isinstance(mask, Triangle):
        return mask.says_causal(hides)
    if tuple(mask.shape[-2:]) == (cut.local, cut.local) and cut.local != cut.length:
        base = _table(mask, cut.length)
        return base is not None and _is_triangle(base, torch.arange(cut.length, device=mask.device), hides)
    mask = mask[(0,) * (mask.ndim - 2)]
    if mask.shape[1] != cut.length or mask.shape[0] not in (cut.local, cut.length):
        return False
    rows = torch.arange(cut.length, device=mask.device)
    if mask.shape[0] != cut.length:
        held = inside.sequence.positions(mask.device)[0]
        mask, rows = mask[held < cut.length], held[held < cut.length]
    return _is_triangle(mask, rows, hides)


def _table(mask: Tensor, length: int) -> Tensor | None:
    """The beginning of the larger table, for the whole sequence, of which a mask is the beginning."""
    base = mask._base
    if base is None or base.ndim < 2 or min(base.shape[-2:]) < length or base.dtype != mask.dtype:
        return None
    if any(size > 1 for size in base.shape[:-2]) or mask.data_ptr() != base.data_ptr():
        return None
    if mask.stride()[-2:] != base.stride()[-2:]:
        return None
    return base[(0,) * (base.ndim - 2)][:length, :length]


def _is_triangle(mask: Tensor, rows: Tensor, hides: bool) -> bool:
    seen = _seen(mask, hides)
    return seen is not None and torch.equal(seen, torch.arange(mask.shape[1], device=mask.device) <= rows[:, None])


def _seen(mask: Tensor, hides: bool) -> Tensor | None:
    if mask.dtype == torch.bool:
        return ~mask if hides else mask
    seen = mask == 0
    return seen if bool((seen | (mask <= _HIDES)).all()) else None
