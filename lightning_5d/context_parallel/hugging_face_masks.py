"""Hugging Face's attention masks inside a door: said in words, and not built of the length of a rank's part.

Its models ask a registry for a function that makes their masks, and give it the pattern as nested functions of two indices. While a door
is open the registry has one that reads the pattern. Checked with transformers 5.24; nothing here imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.place import refused
from lightning_5d.context_parallel.stated_mask import StatedMask

_MASKS, _ATTENTION = "transformers.masking_utils", "transformers.integrations.sdpa_attention"


@contextmanager
def stating_masks(inside: Inside | None) -> Iterator[None]:
    """A context in which Hugging Face's masks are stated; with ``None``, one in which they are made as ever.

    Args:
        inside: The door that is open.
    """
    masks, attention = sys.modules.get(_MASKS), sys.modules.get(_ATTENTION)
    registry = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if masks is None or registry is None:
        yield
        return
    local = registry._local_mapping
    before = local.get("sdpa")
    names = [(masks, "find_packed_sequence_indices"), (attention, "use_gqa_in_sdpa")]
    saved = [
        (module, name, vars(module)[name]) for module, name in names if module is not None and hasattr(module, name)
    ]
    if inside is None:
        local.pop("sdpa", None)
        for module, name, function in saved:
            vars(module)[name] = getattr(function, "original", function)
    else:
        local["sdpa"] = partial(_state, inside, masks)
        new = {"find_packed_sequence_indices": partial(_documents, inside), "use_gqa_in_sdpa": partial(_yes)}
        for module, name, function in saved:
            new[name].original = getattr(function, "original", function)  # type: ignore[attr-defined]
            vars(module)[name] = new[name]
    try:
        yield
    finally:
        if before is None:
            local.pop("sdpa", None)
        else:
            local["sdpa"] = before
        for module, name, function in saved:
            vars(module)[name] = function


def _yes(*_: Any) -> bool:
    # Single key and value heads are sent, not those repeated for each query head.
    return True


def _documents(inside: Inside, position_ids: Tensor) -> Tensor | None:
    """Takes the place of the function that finds documents in positions, which on a rank are those of its part."""
    if inside.documents is None:
        return None
    return inside.sequence.part(inside.documents, 1).expand(position_ids.shape[0], -1)


@dataclass(frozen=True)
class Pattern:
    """What Hugging Face's nested functions of two indices say.

    Attributes:
        causal: Keys up to the query's own position.
        window: Keys at a distance of less than this.
        chunk: Keys of the query's own chunk of so many tokens, from the first that is no padding.
        packed: Keys of the query's own document.
        unknown: What else there is, in words.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    packed: bool = False
    unknown: str | None = None


def pattern_of(function: Callable[..., Any]) -> Pattern:
    """Reads a mask function of ``transformers.masking_utils``."""
    kind = getattr(function, "__qualname__", repr(function)).partition(".")[0]
    held = _held(function)
    if getattr(function, "__module__", None) != _MASKS:
        return Pattern(unknown=f"a mask function of its own ({kind})")
    if kind == "causal_mask_function":
        return Pattern(causal=True)
    if kind == "bidirectional_mask_function":
        return Pattern()
    if kind == "and_masks":
        found = Pattern()
        for inner in held["mask_functions"]:
            found = _both(found, pattern_of(inner))
        return found
    if kind == "sliding_window_overlay":
        return Pattern(window=held["sliding_window"])
    if kind == "sliding_window_bidirectional_overlay":
        return Pattern(window=held["sliding_window"] + 1)
    if kind == "chunked_overlay":
        return Pattern(chunk=held["chunk_size"])
    if kind == "packed_sequence_mask_function":
        return Pattern(packed=True)
    if kind == "remap_positions_for_packed_sequence":
        # Positions that grow by one within a document, where alone they are compared.
        inner_pattern = pattern_of(held["mask_function"])
        return replace(inner_pattern, unknown="chunks of packed documents") if inner_pattern.chunk else inner_pattern
    if kind == "or_masks":
        kinds = {getattr(inner, "__qualname__", "").partition(".")[0] for inner in held["mask_functions"]}
        is_blocks = "blockwise_overlay" in kinds
        return Pattern(
            unknown="blocks that see themselves whole (block_sequence_ids)"
            if is_blocks
            else "a union of masks (or_mask_function)"
        )
    return Pattern(unknown=f"a mask function that is not known ({kind})")


def _held(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return (
        {}
        if code is None or cells is None
        else {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    )


def _both(one: Pattern, other: Pattern) -> Pattern:
    if one.chunk and other.chunk:
        return Pattern(unknown="chunks of two lengths")
    windows = [pattern.window for pattern in (one, other) if pattern.window is not None]
    return Pattern(
        one.causal or other.causal,
        min(windows, default=None),
        one.chunk or other.chunk,
        one.packed or other.packed,
        one.unknown or other.unknown,
    )


def _state(
    inside: Inside,
    masks: ModuleType,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Takes the place of ``transformers.masking_utils.sdpa_mask``; with the same arguments, of a rank's part."""
    function = masks.causal_mask_function if mask_function is None else mask_function
    pattern = pattern_of(function)
    cut = inside.sequence.cut
    of_part = q_length == cut.local and (kv_length == cut.local or (kv_length == cut.length and pattern != Pattern()))
    if not of_part:
        if pattern == Pattern() and not use_vmap:
            return _of_whole_keys(attention_mask, batch_size, q_length, kv_length, allow_is_bidirectional_skip)
        made: Tensor | None = masks.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, local_size, allow_is_causal_skip,
            allow_is_bidirectional_skip, use_vmap, device, **kwargs,
        )  # fmt: skip
        return made
    if pattern.unknown is not None:
        raise refused(
            inside,
            f"has {pattern.unknown} in its attention mask",
            "Causal masks, sliding windows, chunks, padding and packed documents can be kept. Leave it out.",
        )
    if not isinstance(q_offset, int) or not isinstance(kv_offset, int) or q_offset or kv_offset:
        raise refused(inside, f"has a cache that holds {q_offset} tokens already", "Give no past_key_values in a step.")
    keys = _keys(inside, attention_mask)
    is_plain = not pattern.packed and keys is None and (local_size is None or cut.length < local_size)
    # As Hugging Face decides for the whole sequence. Of one token it would take itself for a step of generation.
    if is_plain and pattern.causal and allow_is_causal_skip and cut.local > 1:
        return None
    if is_plain and allow_is_bidirectional_skip:
        return None
    documents = inside.documents if pattern.packed else None
    if pattern.chunk is not None and pattern.chunk < cut.length:
        documents = _chunks(inside, pattern.chunk, keys, device)
    window = pattern.window if pattern.window is not None and pattern.window < cut.length else None
    stated = AttentionMask(pattern.causal, window, keys, documents)
    return StatedMask.of(stated, (batch_size, 1, q_length, cut.local), device)


def _keys(inside: Inside, attention_mask: Tensor | None) -> Tensor | None:
    """(B, S), bool: keys that are no padding; ``None`` if all are."""
    if attention_mask is None:
        return None
    cut = inside.sequence.cut
    given = attention_mask.bool()
    if given.shape[-1] == cut.length and given.shape[-1] != cut.local:
        whole = given
    elif given.shape[-1] == cut.local:
        whole = inside.gather(given, 1)
    else:
        raise refused(
            inside,
            f"has an attention_mask {tuple(attention_mask.shape)}",
            f"It has to be (batch, {cut.length}), as the tokens are; prefixes that a model has tuned are not kept.",
        )
    return None if bool(whole.all()) else whole


def _chunks(inside: Inside, chunk: int, keys: Tensor | None, device: torch.device | str) -> Tensor:
    """(B|1, S): the chunk of each token, from the first token that is no padding on."""
    positions = torch.arange(inside.sequence.cut.length, device=device)[None]
    return (positions if keys is None else positions - (keys.cumsum(-1) == 0).sum(-1, keepdim=True)) // chunk


def _of_whole_keys(attention_mask: Tensor | None, batch: int, queries: int, keys: int, may_skip: bool) -> Tensor | None:
    """A mask of keys that are whole, for all queries alike."""
    if attention_mask is None or bool(attention_mask.all()):
        return None if may_skip else torch.ones((), dtype=torch.bool).expand(batch, 1, queries, keys)
    return attention_mask.bool()[:, None, None, :keys].expand(batch, 1, queries, keys)
