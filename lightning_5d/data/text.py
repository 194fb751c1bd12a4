"""Text files as bytes, one token for each byte."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_5d.data.corpus import Corpus
from lightning_5d.data.windows import TokenArray

BYTES = 256
SEPARATOR = b"\n\n"


class ByteCorpus(Corpus):
    """A corpus whose tokens are the bytes of UTF-8 text."""

    @property
    @override
    def bytes_per_token(self) -> float:
        """Exactly one."""
        return 1.0

    @abstractmethod
    def _documents(self) -> tuple[list[bytes], list[str]]:
        """The texts in order, and what is wrong with them."""

    @override
    def _read(self) -> tuple[TokenArray | None, list[str]]:
        documents, problems = self._documents()
        if self.vocab_size < BYTES:
            problems.append(f"vocab_size is {self.vocab_size}; bytes need {BYTES}.")
        if not documents:
            return None, problems
        return np.frombuffer(SEPARATOR.join(documents), dtype=np.uint8), problems

    @override
    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    @override
    def decode(self, ids: list[int]) -> str:
        """The text of the bytes; what is not UTF-8 becomes the replacement character."""
        return text_of_bytes(ids)


class TextFiles(ByteCorpus):
    """A UTF-8 text file, or all files below a folder in the order of their paths, with an empty line between them.

    Args:
        path: The file or folder.
        pattern: Which files below a folder count, as for `pathlib.Path.glob`. Hidden ones never do.
        settings: See `Corpus`.
    """

    def __init__(self, path: str | Path, *, pattern: str = "**/*", **settings: Any) -> None:
        super().__init__(**settings)
        self.path = Path(path).expanduser()
        self.pattern = pattern

    @property
    @override
    def source(self) -> str:
        """The path."""
        return f"the text {self.path}"

    @override
    def _documents(self) -> tuple[list[bytes], list[str]]:
        files, problems = text_files(self.path, self.pattern)
        contents, unreadable = read_texts(files)
        return contents, problems + unreadable


def text_of_bytes(ids: Sequence[int]) -> str:
    """The text of byte ids; what is not UTF-8 becomes the replacement character, and ids above 255 are left out."""
    return bytes(i for i in ids if i < BYTES).decode(errors="replace")


def text_files(path: Path, pattern: str = "**/*") -> tuple[list[Path], list[str]]:
    """The files that `path` means, in order, and why there are none."""
    if path.is_file():
        return [path], []
    if not path.exists():
        return [], [f"path is {str(path)!r}, which does not exist (looked from {Path.cwd()}).{_nearest_folder(path)}"]
    files = sorted(
        file
        for file in path.glob(pattern)
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        return [], [f"the folder {str(path)!r} holds no file that matches {pattern!r}; name another folder or pattern."]
    return files, []


def read_texts(files: Sequence[Path]) -> tuple[list[bytes], list[str]]:
    """The contents of UTF-8 files, and for each file that has none what is wrong with it."""
    contents: list[bytes] = []
    problems: list[str] = []
    for file in files:
        content = file.read_bytes()
        problem = _not_text(file, content)
        if problem is None:
            contents.append(content)
        else:
            problems.append(problem)
    return contents, problems


def _not_text(file: Path, content: bytes) -> str | None:
    if not content:
        return f"the file {str(file)!r} is empty; remove it or fill it."
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return (
            f"the file {str(file)!r} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} "
            f"({error.reason}); convert it, for example with `iconv -f LATIN1 -t UTF-8`."
        )
    return None


def _nearest_folder(path: Path) -> str:
    folder = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    return f" The nearest folder that exists is {str(folder)!r}." if folder else ""
