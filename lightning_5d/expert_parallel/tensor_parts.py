"""Experts of which each rank of the tensor axis has a part: which rows of their weights, and how checkpoints read them."""

# [Note: parts of experts]
# An expert is down(act(gate x) * up x). Cut along its inner features, a rank computes with its share of them and gets a summand of the output.
# So gate and up, which are two halves of one weight, are each cut, and a rank has its share of the one behind that of the other: its part looks
# like a narrower expert's weight, and the expert's code need not know. All ranks' parts one after the other are the *stored* weight, whose
# rows are in another order than the whole one's (`tensor_parallel/rows.py`).

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.tensor_parallel.rows import Rows
from lightning_5d.tensor_parallel.shards import features


def tensor_rows(found: FoundExperts, size: int) -> dict[str, Rows]:
    """How each stacked weight of some experts is cut over the ranks of the tensor axis, by its own name.

    ``rows.part(whole, rank, size)`` is a rank's part, of some experts as of all of them; ``rows`` is the `StoredForm` of the weight if its ``index``
    is not ``None``.

    Args:
        found: The experts; `size` divides what is cut, see `compatibility.module_problems`.
        size: Ranks that have a part of each.
    """
    weights = dict(found.module.named_parameters(recurse=False))
    return {
        name: features(dim, weights[name].shape[dim], 2 if name in found.halves else 1, size)
        for name, dim in found.tensor_dims.items()
    }


def local_part(whole: Tensor, rows: Rows, rank: int, size: int) -> Tensor:
    """What a rank stores of a weight: a copy, as a view would keep the whole in memory."""
    return rows.part(whole, rank, size).clone()


def stored_forms(prefix: str, rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The forms of those weights that are stored in another order, by full name, see `Parallelized.stored_forms`."""
    return {f"{prefix}.{name}": form for name, form in rows.items() if form.index is not None}
