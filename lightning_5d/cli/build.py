"""From a group of the configuration to the object it names."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig


def build(group: DictConfig, **arguments: Any) -> Any:
    """What the group's `_target_` makes of its other entries and of `arguments`; a group of groups gives a dict.

    Lists and mappings arrive as plain ones: as OmegaConf's they would turn a plugin, which is a dataclass, into a config.
    """
    return instantiate(group, _convert_="all", **arguments)
