"""Text to token ids and back: bytes, or a Hugging Face tokenizer from a local folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_5d.data.text import BYTES, SEPARATOR, read_texts, text_files, text_of_bytes
from lightning_5d.data.token_file import Sidecar, write_token_file


class Tokenizer(Protocol):
    """What tokenizing a corpus needs."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of one text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""

    @property
    def separator(self) -> Sequence[int]:
        """Ids put between two documents."""


class ByteTokenizer:
    """One id for each byte of UTF-8."""

    vocab_size = BYTES
    separator = SEPARATOR

    def encode(self, text: str) -> bytes:
        """The bytes, which are a sequence of whole numbers as they are."""
        return text.encode()

    def decode(self, ids: list[int]) -> str:
        """The text; what is not UTF-8 becomes the replacement character."""
        return text_of_bytes(ids)


class HuggingFaceTokenizer:
    """A tokenizer that `transformers` loads from a folder. Documents end with its end-of-sequence token, if it has one.

    Raises:
        ImportError: If `transformers` is not installed.
        ValueError: If the folder holds no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                f"The tokenizer in {str(folder)!r} needs transformers: pip install 'lightning-5d[hf]'. "
                "`--tokenizer byte` works without it."
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The folder {str(folder)!r} holds no tokenizer that transformers can load: {error}"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._tokenizer)

    @property
    def separator(self) -> list[int]:
        """The end-of-sequence token."""
        end = self._tokenizer.eos_token_id
        return [] if end is None else [int(end)]

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return str(self._tokenizer.decode(ids))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: `byte`, or the folder of a Hugging Face one.

    Raises:
        ImportError: If it needs `transformers`, which is not installed.
        ValueError: If there is no such folder, or no tokenizer in it.
    """
    if name == "byte":
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"The tokenizer is {name!r}; it must be 'byte' or an existing folder with a Hugging Face tokenizer "
            f"(looked from {Path.cwd()})."
        )
    return HuggingFaceTokenizer(folder)


def tokenize_files(source: Path, output: Path, tokenizer_name: str, *, overwrite: bool = False) -> Sidecar:
    """Turn a UTF-8 text file, or a folder of them, into a `.bin` file with its sidecar.

    Args:
        source: The file or folder.
        output: The `.bin` file to write.
        tokenizer_name: See `load_tokenizer`.
        overwrite: Whether an existing `output` may be replaced.

    Returns:
        The sidecar.

    Raises:
        ImportError: If the tokenizer needs `transformers`, which is not installed.
        ValueError: Listing every problem with source, output and tokenizer.
    """
    files, problems = text_files(source)
    contents, unreadable = read_texts(files)
    problems += unreadable
    if output.exists() and not overwrite:
        problems.append(f"the output {str(output)!r} exists; name another file or pass --force.")
    if not output.absolute().parent.is_dir():
        problems.append(f"the folder of the output, {str(output.absolute().parent)!r}, does not exist; make it first.")
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = load_tokenizer(tokenizer_name)
    except ValueError as error:
        problems.append(str(error))
    if problems or tokenizer is None:
        raise ValueError(f"Cannot tokenize {source}:\n" + "\n".join(f"  - {problem}" for problem in problems))

    def documents(tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
        for number, content in enumerate(contents):
            if number:
                yield tokenizer.separator
            yield tokenizer.encode(content.decode())

    name = "byte" if tokenizer_name == "byte" else str(Path(tokenizer_name).expanduser().absolute())
    text_bytes = sum(map(len, contents)) + (len(SEPARATOR) * (len(contents) - 1) if name == "byte" else 0)
    return write_token_file(
        output, documents(tokenizer), vocab_size=tokenizer.vocab_size, text_bytes=text_bytes, tokenizer=name
    )
