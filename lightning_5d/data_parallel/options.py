"""How an engine spreads a module over the data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class ShardOptions:
    """How parameters, gradients and optimizer state are spread over the data ranks.

    Attributes:
        stage: 0 replicates everything; 1 shards the optimizer state; 2 also gradients; 3 also parameters.
        mp_policy: Dtypes of compute and reduction over fp32 master weights. None computes in the parameters' dtype.
        offload: ``"optimizer+parameters"`` keeps sharded parameters, gradients and optimizer state in host memory.
        synchronize: Makes parameters and buffers of all data ranks equal to those of the first one before sharding.
        shared_memory: Ranks on one host exchange through shared memory where possible (CPU only).
        per_microbatch: Under a schedule of microbatches, stage 2 reduces gradients after each of them instead of once, and
            stage 3 also gathers a part of the module for each of its forwards and backwards.
    """

    stage: int = 1
    mp_policy: MixedPrecisionPolicy | None = None
    offload: Literal["none", "optimizer+parameters"] = "none"
    synchronize: bool = True
    shared_memory: bool = True
    per_microbatch: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={self.stage!r} is none of ZeRO's stages; choose 0, 1, 2 or 3.")
        if self.offload not in ("none", "optimizer+parameters"):
            raise ValueError(f"offload={self.offload!r} is unknown; choose 'none' or 'optimizer+parameters'.")
        if self.offload != "none" and self.stage == 0:
            raise ValueError("offload='optimizer+parameters' needs sharded parameters; choose stage 1, 2 or 3, not 0.")
        if self.per_microbatch and self.stage < 2:
            raise ValueError(f"per_microbatch=True shards nothing more at stage {self.stage}; choose stage 2 or 3.")
