"""A text from the trained model."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import torch
from typing_extensions import override

from lightning_5d.data.corpus import Corpus
from lightning_5d.models.language_model import LanguageModel


class TextSample(L.Callback):
    """Continues `prompt` when training ends, prints the text and writes it to a file.

    The weights of all ranks are gathered into a plain copy of the model on rank 0, which then generates alone: a
    sharded model would need every rank for each token.

    Args:
        path: The text file.
        prompt: How the text begins.
        tokens: How many tokens to add.
        temperature: See `Decoder.generate`.
        top_k: See `Decoder.generate`.
        seed: Of the sampling.
    """

    def __init__(
        self,
        path: str | Path,
        prompt: str = "The ",
        tokens: int = 300,
        temperature: float = 0.7,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        self.path = Path(path)
        self.prompt = prompt
        self.tokens = tokens
        self.temperature = temperature
        self.top_k = top_k
        self.seed = seed
        self.text: str | None = None

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather on all ranks, generate on the first."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(pl_module, LanguageModel) or not isinstance(data, Corpus):
            return
        weights = trainer.strategy.lightning_module_state_dict()
        if not trainer.is_global_zero:
            return
        begin = data.encode(self.prompt)
        if not begin:
            return
        with torch.device("meta"):
            plain = LanguageModel(**pl_module.hparams)
        plain.load_state_dict(weights, assign=True)
        ids = plain.eval().decoder.generate(
            torch.tensor([begin]),
            self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            generator=torch.Generator().manual_seed(self.seed),
        )
        self.text = data.decode(ids[0].tolist())
        if self.text is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.text)
