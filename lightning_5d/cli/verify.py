"""`fived verify`: is a configured run equal to the same run in one process?"""

from __future__ import annotations

import math
from itertools import islice

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from lightning_5d.cli.build import ImpossibleRunError, build
from lightning_5d.mesh import DATA_AXES, resolve_sizes
from lightning_5d.verify import verify as compare

STEPS = 3


def verify(config: DictConfig) -> bool:
    """Compare one process with the configured strategy on the first batches of the configured data, and print the table.

    Args:
        config: What `conf/train.yaml` describes, resolved.

    Returns:
        Whether they agree.

    Raises:
        ValueError: If the number of processes is not given as a number.
        ImpossibleRunError: If the settings do not work together, or the strategy is not FiveD's.
    """
    trainer = config.trainer
    if not isinstance(trainer.devices, int):
        raise ValueError(f"trainer.devices is {trainer.devices!r}; fived verify needs a number, for example 2.")
    if not isinstance(config.strategy, DictConfig):
        raise ImpossibleRunError(
            f"strategy is {config.strategy!r}, which is none of FiveD's, so there is nothing to compare. Choose one such as"
            " strategy=zero1 or strategy=pipeline."
        )
    L.seed_everything(config.seed, workers=True, verbose=False)
    data = build(config.data)
    data.setup("fit")
    sizes, _ = resolve_sizes(trainer.devices, build(config.strategy).plugins)
    per_step = math.prod(sizes[axis] for axis in DATA_AXES) * trainer.accumulate_grad_batches
    batches = list(islice(data.train_dataloader(), STEPS * per_step))
    try:
        parity = compare(
            build(config.model),
            batches,
            lambda: build(config.strategy),
            devices=trainer.devices,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            precision=build(config.precision),
            gradient_clip_val=trainer.gradient_clip_val,
            accelerator=trainer.accelerator,
        )
    except MisconfigurationException as error:
        raise ImpossibleRunError(str(error)) from error
    print(parity)
    return parity.passed
