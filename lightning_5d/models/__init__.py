"""Reference models in plain torch, without any parallel code."""

from lightning_5d.models.decoder import PRESETS, Decoder, DecoderConfig
from lightning_5d.models.language_model import LanguageModel, OptimizerConfig

__all__ = ["PRESETS", "Decoder", "DecoderConfig", "LanguageModel", "OptimizerConfig"]
