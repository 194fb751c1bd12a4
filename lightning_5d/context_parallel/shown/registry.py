"""Who handles which operation on tensors that are cut along the sequence."""

from __future__ import annotations

from lightning_5d.shown.registry import EVERY, Registry, by_name

SEQUENCE = Registry(parent=EVERY)
handles, answers = SEQUENCE.handles, SEQUENCE.answers

__all__ = ["SEQUENCE", "answers", "by_name", "handles"]
