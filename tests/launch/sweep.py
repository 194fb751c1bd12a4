"""A Hydra script that trains with ranks of its own in every job of a sweep."""

import hydra
import lightning.pytorch as L
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig

from lightning_5d import FiveD, ZeRO


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> float:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FiveD(ZeRO(stage=1)),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    # One write for the whole line: the ranks share the file.
    print(f"DONE job {config.x} rank {trainer.global_rank} of {trainer.world_size}\n", end="", flush=True)
    return 0.0


if __name__ == "__main__":
    main()
