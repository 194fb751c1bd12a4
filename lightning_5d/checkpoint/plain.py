"""Checkpoints hold plain containers, so that they can be read without the classes of the run that wrote them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from omegaconf import Container, OmegaConf


def plain_containers(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A Lightning checkpoint whose OmegaConf objects are resolved dicts and lists, at any depth.

    A weights-only load, which is torch's default, refuses any other class and with it the whole file.
    """
    plain = {key: _plain(value) for key, value in checkpoint.items()}
    kind = plain.get(LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE)
    if isinstance(kind, type) and issubclass(kind, Container):
        del plain[LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE]
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=True)
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner) for inner in value)
    return value
