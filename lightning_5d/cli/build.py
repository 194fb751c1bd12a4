"""From the configuration to the objects it names, and everything that keeps them from being made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from hydra.errors import CompactHydraException, InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from lightning_5d.data.corpus import Corpus
from lightning_5d.mesh import DATA_AXES, resolve_sizes
from lightning_5d.strategy import FiveD

_SAID_BY_CONSTRUCTORS = (ValueError, TypeError, ImportError, MisconfigurationException, InstantiationException)


class ImpossibleRunError(CompactHydraException, MisconfigurationException):
    """A configuration that cannot run. Hydra shows what it says without a traceback."""


@dataclass(frozen=True)
class Run:
    """What `fived train` puts together."""

    data: L.LightningDataModule
    model: L.LightningModule
    trainer: L.Trainer


def build(group: DictConfig, **arguments: Any) -> Any:
    """What the group's `_target_` makes of its other entries and of `arguments`; a group of groups gives a dict.

    Lists and mappings arrive as plain ones: as OmegaConf's they would turn a plugin, which is a dataclass, into a config.
    """
    try:
        return instantiate(group, _convert_="all", **arguments)
    except MissingMandatoryValue as error:
        key = str(error.full_key or "").removeprefix("config.")
        raise ValueError(f"{key} is not set. Give it on the command line: {key}=VALUE.") from None
    except InstantiationException as error:
        # The constructor's own words, which Hydra puts on one line between its own.
        raise error.__cause__ or error from None


def build_run(config: DictConfig) -> Run:
    """Data, model and trainer of a configuration, made before any other process is started.

    Raises:
        ImpossibleRunError: With everything that any of them found wrong.
    """
    errors: list[Exception] = []

    def attempt(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except _SAID_BY_CONSTRUCTORS as error:
            errors.append(error)

    data = attempt(lambda: build(config.data))
    model = attempt(lambda: build(config.model))
    trainer = attempt(lambda: _trainer(config, attempt))
    attempt(lambda: _check_checkpoint(config.ckpt_path))
    if isinstance(data, Corpus):
        attempt(lambda: data.check(data_ranks(trainer) if trainer is not None else 1))
    if errors:
        raise ImpossibleRunError("\n".join(str(error) for error in errors)) from errors[0]
    return Run(data, model, trainer)


def _check_checkpoint(path: str | None) -> None:
    """Raises if `path` names a file that is not there; Lightning also takes a few words, and addresses of other machines."""
    if path is None or path in ("best", "last", "hpc") or "://" in path or path.startswith("registry"):
        return
    if not Path(path).exists():
        raise ValueError(
            f"ckpt_path is {path!r}, which does not exist (looked for {Path(path).absolute()}). Checkpoints of a run are in its"
            " folder's checkpoints/; leave ckpt_path out to start anew."
        )


def data_ranks(trainer: L.Trainer) -> int:
    """How many ranks will read different samples."""
    world = trainer.num_devices * trainer.num_nodes
    if not isinstance(trainer.strategy, FiveD):
        return world
    sizes, _ = resolve_sizes(world, trainer.strategy.plugins)
    return math.prod(sizes[axis] for axis in DATA_AXES)


def _trainer(config: DictConfig, attempt: Callable[[Callable[[], Any]], Any]) -> L.Trainer:
    """The Trainer; what is wrong with a callback or the precision is noted by `attempt`, and the others are looked at as well."""
    made = [attempt(partial(build, group)) for group in config.callbacks.values() if group is not None]
    settings, arguments = config.trainer, {"callbacks": [callback for callback in made if callback is not None]}
    plugins = build(settings.plugins) if settings.get("plugins") else []
    if _is_fived(settings.strategy) and not any(isinstance(plugin, Precision) for plugin in plugins):
        # The plugin itself: it has options, and of "16-mixed" Lightning would make bf16 on CPU.
        precision = attempt(lambda: build(config.precision))
        arguments["plugins"] = plugins if precision is None else [*plugins, precision]
        resolved: dict[str, Any] = OmegaConf.to_container(settings, resolve=True)  # type: ignore[assignment]
        settings = OmegaConf.create({k: v for k, v in resolved.items() if k not in ("precision", "plugins")})
    trainer: L.Trainer = build(settings, **arguments)
    return trainer


def _is_fived(strategy: Any) -> bool:
    if isinstance(strategy, DictConfig):
        return isinstance(build(strategy), FiveD)
    return isinstance(strategy, str) and strategy.startswith(FiveD.strategy_name)
