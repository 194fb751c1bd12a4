"""The expert axis: MoE layers whose experts live on other ranks than the tokens that are sent to them.

`MoE` and `MoEConfig` are a block of experts in plain torch, `balance_by_bias` what balances it without a loss; `ExpertParallel`, the axis, is
with the others in `lightning_5d`.
"""

from lightning_5d.expert_parallel.bias import balance_by_bias
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.moe import MoE

__all__ = ["MoE", "MoEConfig", "balance_by_bias"]
