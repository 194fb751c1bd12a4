"""The English text that Python ships: the language reference behind `help()`."""

from __future__ import annotations

from typing_extensions import override

from lightning_5d.data.text import ByteCorpus


class PythonDocs(ByteCorpus):
    """The topics of `pydoc_data.topics`, byte by byte, in the order of their names: about 460 kB, no download.

    Takes the settings of `Corpus`.
    """

    @property
    @override
    def source(self) -> str:
        """Its name."""
        return "the language reference in pydoc_data"

    @override
    def _documents(self) -> tuple[list[bytes], list[str]]:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            return [], [
                "this Python was installed without pydoc_data.topics; use data=text data.path=FILE_OR_FOLDER instead."
            ]
        return [topics[name].strip().encode() for name in sorted(topics)], []
