"""The `.bin` format: token ids as plain little-endian integers, described by a JSON file beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lightning_5d.data.windows import TokenArray

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")})


@dataclass(frozen=True)
class Sidecar:
    """What `NAME.bin.json` says about `NAME.bin`.

    Args:
        dtype: `uint16` or `uint32`.
        vocab_size: Number of ids; every id in the file is below it.
        count: Number of tokens in the file.
        bytes: Length of the text in UTF-8, when known; gives bits per byte.
        tokenizer: `byte`, or where the Hugging Face tokenizer lies, when known; lets samples be decoded.
    """

    dtype: str
    vocab_size: int
    count: int
    bytes: int | None = None
    tokenizer: str | None = None


def sidecar_path(path: Path) -> Path:
    """`NAME.bin` -> `NAME.bin.json`."""
    return path.with_name(path.name + ".json")


def write_token_file(
    path: Path, documents: Iterable[Sequence[int]], *, vocab_size: int, text_bytes: int | None, tokenizer: str | None
) -> Sidecar:
    """Write ids and sidecar; under their final names only when both are complete.

    Args:
        path: The `.bin` file.
        documents: Token ids, one sequence after the other.
        vocab_size: Number of ids; decides between uint16 and uint32.
        text_bytes: See `Sidecar.bytes`.
        tokenizer: See `Sidecar.tokenizer`.

    Returns:
        The sidecar that was written.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    count = 0
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as stream:
            for ids in documents:
                # Python's numbers are checked on their way into the type, bytes fit any.
                array = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids, DTYPES[dtype])
                array.astype(DTYPES[dtype], copy=False).tofile(stream)
                count += len(ids)
        sidecar = Sidecar(dtype, vocab_size, count, text_bytes, tokenizer)
        sidecar_path(path).write_text(json.dumps(asdict(sidecar), indent=2) + "\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return sidecar


def read_sidecar(path: Path) -> tuple[Sidecar | None, list[str]]:
    """The sidecar of `path`, and everything that is wrong with it."""
    beside = sidecar_path(path)
    how = "`fived tokenize TEXT OUTPUT.bin` writes both files; docs/data.md describes them."
    if not beside.is_file():
        return None, [f"{str(beside)!r} is missing, so the layout of {path.name!r} is unknown; {how}"]
    try:
        content: Any = json.loads(beside.read_text())
    except ValueError as error:
        return None, [f"{str(beside)!r} is not JSON ({error}); {how}"]
    if not isinstance(content, dict):
        return None, [
            f"{str(beside)!r} holds a {type(content).__name__} instead of an object with dtype, vocab_size and count; {how}"
        ]
    problems = [f"{beside.name}: {problem}" for problem in _sidecar_problems(content)]
    if problems:
        return None, problems
    known: dict[str, Any] = {name: content.get(name) for name in Sidecar.__dataclass_fields__}
    return Sidecar(**known), []


def map_tokens(path: Path, sidecar: Sidecar) -> tuple[TokenArray | None, list[str]]:
    """The ids, memory-mapped and read-only, and how the file disagrees with its sidecar."""
    dtype, size = DTYPES[sidecar.dtype], path.stat().st_size
    if size == 0:
        return None, [f"the file {str(path)!r} is empty; write it again with `fived tokenize`."]
    if size % dtype.itemsize:
        return None, [
            f"the file {str(path)!r} has {size} bytes, which is not a multiple of the {dtype.itemsize} bytes of "
            f"{sidecar.dtype}: it was cut short, or its dtype is another one. {sidecar.count} tokens take "
            f"{sidecar.count * dtype.itemsize} bytes."
        ]
    if size != sidecar.count * dtype.itemsize:
        return None, [
            f"the file {str(path)!r} has {size} bytes, that is {size // dtype.itemsize} tokens of {sidecar.dtype}, but "
            f"its sidecar says count {sidecar.count}, that is {sidecar.count * dtype.itemsize} bytes."
        ]
    return np.memmap(path, dtype=dtype, mode="r"), []


def _sidecar_problems(content: dict[str, Any]) -> list[str]:
    problems = []
    dtype = content.get("dtype")
    if dtype not in DTYPES:
        problems.append(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.")
    for name, least in (("vocab_size", 1), ("count", 0)):
        value = content.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problems.append(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return problems
