"""`fived verify`: is a configured run equal to the same run in one process?"""

from __future__ import annotations

import lightning.pytorch as L
from hydra.utils import instantiate
from omegaconf import DictConfig


def verify(config: DictConfig) -> bool:
    """Compare one process with the configured strategy on the first batches of the configured data.

    Args:
        config: What `conf/train.yaml` describes, resolved.

    Returns:
        Whether they agree.
    """
    from lightning_5d.verify import verify as compare

    L.seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    data.check()
    batch = next(iter(data.train_dataloader()))
    report = compare(instantiate(config.model), batch, instantiate(config.strategy))
    print(report)
    return bool(report.passed)
