"""Text and token files as LightningDataModules."""

from lightning_5d.data.corpus import Corpus
from lightning_5d.data.python_docs import PythonDocs
from lightning_5d.data.text import TextFiles
from lightning_5d.data.tokenizer import tokenize_files
from lightning_5d.data.tokens import TokenFile

__all__ = ["Corpus", "PythonDocs", "TextFiles", "TokenFile", "tokenize_files"]
