"""`fived verify`: is a configured run equal to the same run in one process?"""

from __future__ import annotations

from itertools import islice

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from lightning_5d.cli.build import ImpossibleRunError, build
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
        ImpossibleRunError: If the settings do not work together.
    """
    trainer = config.trainer
    if not isinstance(trainer.devices, int):
        raise ValueError(f"trainer.devices is {trainer.devices!r}; fived verify needs a number, for example 2.")
    L.seed_everything(config.seed, workers=True, verbose=False)
    data = build(config.data)
    data.setup("fit")
    # More data ranks than processes there cannot be.
    batches = list(islice(data.train_dataloader(), STEPS * trainer.devices * trainer.accumulate_grad_batches))
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
