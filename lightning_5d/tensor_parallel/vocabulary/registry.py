"""Who handles which operation on logits that are cut along the vocabulary."""

from __future__ import annotations

from lightning_5d.shown.registry import EVERY, Registry, by_name

VOCABULARY = Registry(parent=EVERY)
handles, answers = VOCABULARY.handles, VOCABULARY.answers

__all__ = ["VOCABULARY", "answers", "by_name", "handles"]
