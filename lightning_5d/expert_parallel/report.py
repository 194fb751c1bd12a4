"""Which ranks hold which experts, as a table for people. Nothing here needs ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.memory.summary import readable
from lightning_5d.tensor_parallel.problems import generic

_LISTED = 8
"""So many groups of ranks are listed one by one; of more, the first two and the last."""


@dataclass(frozen=True)
class ExpertPlaces:
    """How the ranks of one place of the pipeline share experts; the sizes of `ExpertView`.

    Attributes:
        size: Ranks that hold different experts.
        same: Ranks that hold the same ones, and other tokens, in one replica: what ZeRO shards them over.
        tensor: Ranks that hold parts of the same experts.
        replicas: Copies of all that (``dp_replicate``).
    """

    size: int
    same: int = 1
    tensor: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.size * self.same * self.tensor * self.replicas

    def holders(self, place: int) -> list[int]:
        """The ranks that hold the experts of one of `size` places, or parts of them; the first rank of this place of the pipeline being 0."""
        inner = self.size * self.tensor
        return [
            block * inner + place * self.tensor + part
            for block in range(self.same * self.replicas)
            for part in range(self.tensor)
        ]


def describe_experts(found: Sequence[FoundExperts], places: ExpertPlaces, experts_shards: int | None = None) -> str:
    """A table of layers, one of ranks, and a line about the bytes.

    Args:
        found: The layers of the whole module; weights may be without memory. Layers that are alike share a line.
        places: The ranks.
        experts_shards: Ranks that ZeRO shards the weights of each expert over at rest, if that is known.
    """
    if not found:
        return "No experts."
    lines = _aligned([("layer", "experts", "top-k", "on a rank", "weights on a rank"), *_layer_rows(found, places)])
    lines.insert(1, "-" * max(map(len, lines)))
    lines += ["", _head(places)]
    if places.size > 1:
        lines += _aligned([*_rank_rows(found, places)])
    total = sum(_nbytes(each) for each in found)
    own = total // (places.size * places.tensor)
    said = f"All experts are {readable(total)}; a rank holds {readable(own)} of them"
    if experts_shards is not None and experts_shards > 1:
        said += f", and at rest {readable(own / experts_shards)}, as ZeRO shards them over {experts_shards} ranks"
    lines += ["", f"{said}."]
    return "\n".join(lines)


def _head(places: ExpertPlaces) -> str:
    said = f"Expert axis of {places.size}"
    said += f", each expert cut over {places.tensor} tensor ranks" if places.tensor > 1 else ""
    same = places.same * places.replicas
    others = "no other rank has the same ones" if same == 1 else f"{same} ranks have the same ones, and other tokens"
    if places.size == 1 and places.tensor == 1:
        return f"{said}: every rank holds all experts."
    return f"{said}: {others}."


def _layer_rows(found: Sequence[FoundExperts], places: ExpertPlaces) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, ...], list[FoundExperts]] = {}
    for each in found:
        cells = (
            generic(each.name),
            str(each.count),
            "?" if each.top_k is None else str(each.top_k),
            f"{each.count // places.size}" + (f", 1/{places.tensor} of each" if places.tensor > 1 else ""),
            readable(_nbytes(each) / (places.size * places.tensor)),
        )
        alike.setdefault(cells, []).append(each)
    return [
        (f"{cells[0]} ({len(same)})" if len(same) > 1 else same[0].name, *cells[1:]) for cells, same in alike.items()
    ]


def _rank_rows(found: Sequence[FoundExperts], places: ExpertPlaces) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    counts = sorted({each.count for each in found})
    shown = range(places.size) if places.size <= _LISTED else (0, 1, places.size - 1)
    for place in shown:
        held = []
        for count in counts:
            own = count // places.size
            last = (place + 1) * own - 1
            span = f"{place * own}-{last}" if own > 1 else f"{last}"
            held.append(f"{span} of {count}" if len(counts) > 1 else span)
        rows.append((f"rank {_listed(places.holders(place))}", f"experts {'; '.join(held)}"))
        if places.size > _LISTED and place == 1:
            rows.append(("...", ""))
    return rows


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= _LISTED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}"


def _nbytes(each: FoundExperts) -> int:
    weights = [getattr(each.module, key) for key in each.stacked]
    return sum(math.prod(weight.shape) * weight.element_size() for weight in weights)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
