"""A file of token ids, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_5d.data.corpus import Corpus, ids_out_of_range
from lightning_5d.data.token_file import Sidecar, map_tokens, read_sidecar
from lightning_5d.data.tokenizer import Tokenizer, load_tokenizer
from lightning_5d.data.windows import TokenArray


class TokenFile(Corpus):
    """A `.bin` file of token ids and its JSON sidecar (see `docs/data.md`), as `fived tokenize` writes them.

    Args:
        path: The `.bin` file.
        check_ids: Whether to read the whole file once at the start, to see that every id is below `vocab_size`.
        settings: See `Corpus`.
    """

    def __init__(self, path: str | Path, *, check_ids: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.path = Path(path).expanduser()
        self.check_ids = check_ids
        self._sidecar: Sidecar | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    @override
    def source(self) -> str:
        """The path."""
        return f"the token file {self.path}"

    @property
    @override
    def bytes_per_token(self) -> float | None:
        """The mean over the file, when its sidecar knows the length of the text."""
        if self._sidecar is None or self._sidecar.bytes is None:
            return None
        return self._sidecar.bytes / self._sidecar.count

    @override
    def _read(self) -> tuple[TokenArray | None, list[str]]:
        if not self.path.is_file():
            return None, [f"path is {str(self.path)!r}, which is no file (looked from {Path.cwd()})."]
        self._sidecar, problems = read_sidecar(self.path)
        if self._sidecar is None:
            return None, problems
        if self._sidecar.vocab_size > self.vocab_size:
            problems.append(
                f"the file's vocab_size is {self._sidecar.vocab_size}, the model's {self.vocab_size}; "
                f"set model.decoder.vocab_size={self._sidecar.vocab_size} or higher."
            )
        tokens, file_problems = map_tokens(self.path, self._sidecar)
        problems += file_problems
        if tokens is not None and self.check_ids:
            problems += ids_out_of_range(tokens, min(self.vocab_size, self._sidecar.vocab_size))
        return tokens, problems

    @override
    def encode(self, text: str) -> list[int] | None:
        """Token ids, when the sidecar names a tokenizer that is here."""
        tokenizer = self._tokenizer_if_here()
        return list(tokenizer.encode(text)) if tokenizer else None

    @override
    def decode(self, ids: list[int]) -> str | None:
        """The text, when the sidecar names a tokenizer that is here."""
        tokenizer = self._tokenizer_if_here()
        return tokenizer.decode(ids) if tokenizer else None

    def _tokenizer_if_here(self) -> Tokenizer | None:
        if self._tokenizer is None and self._sidecar is not None and self._sidecar.tokenizer is not None:
            try:
                self._tokenizer = load_tokenizer(self._sidecar.tokenizer)
            except (ValueError, ImportError):
                return None
        return self._tokenizer
