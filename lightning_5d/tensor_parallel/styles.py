"""The words by which a plan says what becomes of a module on the tensor axis: Hugging Face's, and a few more."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["column", "row", "vocabulary", "whole", "experts", "unsupported"]


@dataclass(frozen=True)
class Style:
    """What a style word asks for.

    Attributes:
        kind: ``"column"``: outputs are cut. ``"row"``: inputs are cut, outputs are sums. ``"vocabulary"``: embeddings and heads.
            ``"whole"``: every rank holds all of it; whether its gradient is a summand follows from where it is used.
            ``"experts"``: as ``"whole"``, until there is an axis for experts.
        whole_outside: Of columns, that outputs are made whole again; of rows, that inputs come whole.
        packed: The cut side is made of this many parts of one size, each of which is cut (``packed_colwise:3``).
        fused: It is made of queries, keys and values.
        heads: Of those, the numbers of query heads and of key and value heads where they are written down (``fused_qkv:32,8``).
    """

    kind: Kind
    whole_outside: bool = False
    packed: int = 1
    fused: bool = False
    heads: tuple[int, int] | None = None


COLUMN, ROW = Style("column"), Style("row")
GATHERED, SPLIT = Style("column", whole_outside=True), Style("row", whole_outside=True)
VOCABULARY, WHOLE, EXPERTS, UNSUPPORTED = Style("vocabulary"), Style("whole"), Style("experts"), Style("unsupported")

STYLES: Mapping[str, Style] = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise_split_input": SPLIT,
    "rowwise_rep": SPLIT,
    "packed_colwise": Style("column", packed=2),
    "packed_rowwise": Style("row", packed=2),
    "fused_qkv": Style("column", fused=True),
    "embedding_rowwise": VOCABULARY,
    "vocabulary": VOCABULARY,
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
    "sequence_parallel": WHOLE,
    "local_params": WHOLE,
    # Its rotary part goes past the next projection; a region is entered at its door, so no path needs care of its own.
    "mla_kv_a_proj": WHOLE,
    "moe_tp_experts": EXPERTS,
    "moe_identity_expert": EXPERTS,
    "ep_dispatch_experts": EXPERTS,
    "ep_router": EXPERTS,
    "grouped_gemm": EXPERTS,
    "all_reduce": UNSUPPORTED,
    "embedding_colwise": UNSUPPORTED,
}
"""Style words that may stand in a plan. ``packed_colwise:N``, ``packed_rowwise:N`` and ``fused_qkv:HEADS,KV_HEADS`` carry numbers."""

WRITABLE = (
    "colwise, rowwise, colwise_gather_output, rowwise_split_input, packed_colwise[:PARTS], packed_rowwise[:PARTS],"
    " fused_qkv[:HEADS,KV_HEADS], vocabulary, replicate"
)


def read_style(word: object) -> Style | None:
    """What a style word says; ``None`` if it is none."""
    if not isinstance(word, str):
        return None
    name, _, numbers = word.partition(":")
    style = STYLES.get(name)
    if style is None or not numbers:
        return style if word == name else None
    counts = [int(n) if n.strip().isdecimal() else 0 for n in numbers.split(",")]
    if not all(counts):
        return None
    if name in ("packed_colwise", "packed_rowwise") and len(counts) == 1:
        return Style(style.kind, packed=counts[0])
    if name == "fused_qkv" and len(counts) in (1, 2):
        return Style("column", fused=True, heads=(counts[0], counts[-1]))
    return None


def nearest_word(word: object) -> str:
    """The style word that a person may have meant."""
    close = difflib.get_close_matches(str(word).partition(":")[0], [w for w in STYLES if STYLES[w] != UNSUPPORTED], 1)
    return close[0] if close else ""
