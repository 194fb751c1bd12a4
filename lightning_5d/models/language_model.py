"""A decoder as an ordinary LightningModule: next-token loss, AdamW, warm-up and cosine decay. Nothing parallel in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from typing_extensions import override

from lightning_5d.expert_parallel.balance import Losses
from lightning_5d.expert_parallel.bias import balance_by_bias
from lightning_5d.models.decoder import Decoder, DecoderConfig, DecoderOutput


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Args:
        lr: The highest learning rate, reached at the end of the warm-up.
        betas: Decay of AdamW's two running means.
        weight_decay: Applied to matrices, not to the vectors of the norms.
        warmup_steps: Optimizer steps over which the rate grows linearly from near 0.
        min_lr_ratio: The share of `lr` that the cosine ends at.

    Raises:
        ValueError: With every value that is not what it has to be.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        problems = []
        for name, default in (("lr", 3e-3), ("weight_decay", 0.1), ("warmup_steps", 20), ("min_lr_ratio", 0.1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                problems.append(f"optimizer {name} is {value!r}; it must be a number of at least 0, such as {default}.")
        if len(self.betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas):
            problems.append(
                f"optimizer betas is {self.betas!r}; it must be two numbers from 0 to below 1, as [0.9, 0.95]."
            )
        if problems:
            raise ValueError("\n".join(problems))


class LanguageModel(L.LightningModule):
    """Trains a `Decoder` on batches `{"input_ids": (B, T), "labels": (B, T)}`, label t being the target of input t.

    Logs `train_loss` and `val_loss` in nats per token, and `val_bits_per_byte` where the data module says how many
    bytes a token stands for (its `bytes_per_token`). Losses of experts are added to what is trained, and logged as ``train_balance_loss``
    and ``train_z_loss``; `train_loss` and `val_loss` are without them.

    Args:
        decoder: Sizes, as a `DecoderConfig` or its fields by name.
        optimizer: An `OptimizerConfig` or its fields by name.
    """

    def __init__(
        self,
        decoder: DecoderConfig | Mapping[str, Any],
        optimizer: OptimizerConfig | Mapping[str, Any] = OptimizerConfig(),
    ) -> None:
        super().__init__()
        decoder = decoder if isinstance(decoder, DecoderConfig) else DecoderConfig(**decoder)
        optimizer = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(**optimizer)
        # Plain values, so that a checkpoint can be read without unpickling classes.
        self.save_hyperparameters({"decoder": asdict(decoder), "optimizer": asdict(optimizer)})
        self.optimizer_config = optimizer
        self.decoder = Decoder(decoder)

    @override
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor | DecoderOutput:
        """Logits of shape (B, T, V), perhaps with losses of experts; see `Decoder.forward`."""
        output: Tensor | DecoderOutput = self.decoder(input_ids, position_ids)
        return output

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the batch in nats per token. Labels of -100 do not count."""
        return self.losses(batch)[0]

    def losses(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Losses]:
        """The same, and the losses of experts by name."""
        output = self(batch["input_ids"], batch.get("position_ids"))
        logits_BTV, losses = output if isinstance(output, DecoderOutput) else (output, {})
        return F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten()), losses

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        loss, losses = self.losses(batch)
        size = len(batch["input_ids"])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=size)
        for name, value in losses.items():
            self.log(f"train_{name}_loss", value, sync_dist=True, batch_size=size)
        return sum(losses.values(), loss)

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, without gradients."""
        loss = self.loss(batch)
        size = len(batch["input_ids"])
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=size)
        bytes_per_token = getattr(getattr(self.trainer, "datamodule", None), "bytes_per_token", None)
        if bytes_per_token is not None:
            bits = loss / (math.log(2) * bytes_per_token)
            self.log("val_bits_per_byte", bits, sync_dist=True, batch_size=size)
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, weight decay on matrices only, and a learning rate that changes at every step."""
        config = self.optimizer_config
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            # The fused kernel takes parameters of one tensor class only.
            fused=len({type(parameter) for parameter in parameters}) == 1,
        )
        if self.decoder.config.moe is not None:
            balance_by_bias(self, optimizer)
        schedule = partial(
            warmup_cosine,
            warmup_steps=config.warmup_steps,
            total_steps=int(self.trainer.estimated_stepping_batches),
            floor=config.min_lr_ratio,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, floor: float) -> float:
    """The share of the highest learning rate used at `step` (from 0): linear up, then a half cosine down to `floor`."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
