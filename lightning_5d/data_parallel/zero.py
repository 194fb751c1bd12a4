"""The data axis: `ZeRO`, its stages and what they shard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from lightning_5d.mesh import GRADIENT_AXES, nearest_divisor
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext, Size

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.plan import ParallelPlan

Offload = Literal["none", "cpu"]
_OFFLOADS = ("none", "cpu")


@dataclass(frozen=True)
class ZeRO(Parallelism):
    """Data parallel training that keeps one copy of the training state instead of one per rank.

    | stage | kept once over the ranks | traffic per step (M = bytes of the parameters) |
    |---|---|---|
    | 0 | nothing: every rank holds everything (DDP) | 2M |
    | 1 | optimizer states and master weights | 2M |
    | 2 | the gradients too | (1 + microbatches) M |
    | 3 | the parameters too | 3M per microbatch |

    A pipeline runs many microbatches of its parts in a row, in any order. Around all of them parameters are gathered once and
    gradients reduced once, at any stage: 2M per step, and a rank holds its part of the model whole meanwhile, gradients
    included. With ``per_microbatch=True`` stages 2 and 3 go further under a pipeline, too:

    | stage | besides | traffic per step |
    |---|---|---|
    | 2 | gradients are reduced after each microbatch, and held whole for one only | (1 + microbatches) M |
    | 3 | also, a part's parameters are gathered for each of its forwards, backwards and weight gradients, and freed after it | 3M to 4M per microbatch |

    With a context axis its ranks join in: they compute from other tokens with the same weights. State is kept once over data
    ranks times context ranks, also where there is one data rank.

    Args:
        stage: 0, 1, 2 or 3.
        replicate: Size of the outer, replicated data axis: state is sharded inside groups of ``data ranks / replicate`` (times
            context ranks) and equal between them (HSDP).
        size: Number of data ranks, those that read different samples; ``"auto"`` for what other axes leave of the world.
        offload: ``"cpu"`` keeps sharded parameters and optimizer states in host memory between uses.
        per_microbatch: Stages 2 and 3 under a pipeline: saves memory in each microbatch, for the traffic above. Without a
            pipeline they do so in any case.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019), section 5;
    the engine is `torch.distributed.fsdp.fully_shard`.
    """

    axis: ClassVar[str] = "data"
    order: ClassVar[int] = 90

    stage: int = 1
    replicate: int = 1
    size: Size = "auto"
    offload: Offload = "none"
    per_microbatch: bool = False

    def mesh_sizes(self) -> dict[str, Size]:
        """Sizes of ``dp_replicate`` and ``dp_shard``; stage 0 shards nothing, so all its ranks are replicas."""
        replicate = self.replicate if _is_count(self.replicate) else 1
        if self.size == "auto" or not _is_count(self.size) or self.size % replicate:
            return {"dp_replicate": replicate, "dp_shard": "auto"}
        return {"dp_replicate": replicate, "dp_shard": self.size // replicate}

    def validate(self, context: RunContext) -> list[Problem]:
        """Checks stage, sizes and offload, each with what would work."""
        problems = []
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            problems.append(Problem(f"ZeRO(stage={self.stage!r}): there is no such stage.", "Use 0, 1, 2 or 3."))
        if not _is_count(self.replicate):
            problems.append(
                Problem(
                    f"ZeRO(replicate={self.replicate!r}) is not a whole number of at least 1.", "Use 1 for no replicas."
                )
            )
        if self.size != "auto" and not _is_count(self.size):
            problems.append(
                Problem(f"ZeRO(size={self.size!r}) is not a whole number of at least 1.", 'Use "auto" or a number.')
            )
        elif self.size != "auto" and _is_count(self.replicate) and int(self.size) % self.replicate:
            divisor = nearest_divisor(int(self.size), self.replicate)
            problems.append(
                Problem(
                    f"ZeRO(size={self.size}, replicate={self.replicate}): {self.replicate} does not divide {self.size}.",
                    f"replicate={divisor} does.",
                )
            )
        if self.offload == "cpu" and self.stage == 0:
            problems.append(
                Problem('ZeRO(stage=0, offload="cpu"): stage 0 shards nothing to offload.', "Use stage 1, 2 or 3.")
            )
        if not isinstance(self.per_microbatch, bool):
            what = f"ZeRO(per_microbatch={self.per_microbatch!r}) is neither True nor False."
            problems.append(Problem(what, "Use True to save memory in each microbatch of a pipeline."))
        elif self.per_microbatch and self.stage in (0, 1):
            what = f"ZeRO(stage={self.stage}, per_microbatch=True): stage {self.stage} holds gradients and parameters whole."
            problems.append(Problem(what, "Use stage 2 or 3, or leave per_microbatch out."))
        if self.offload not in _OFFLOADS:
            problems.append(
                Problem(f"ZeRO(offload={self.offload!r}) is unknown.", f"Use one of {', '.join(_OFFLOADS)}.")
            )
        if context.module is not None and not problems:
            from lightning_5d.data_parallel.compatibility import module_problems

            ranks = math.prod(context.sizes[axis] for axis in GRADIENT_AXES)
            trainer = getattr(context.module, "_trainer", None)
            callbacks = getattr(trainer, "callbacks", ())
            cast = context.dtypes.compute is not None
            problems += module_problems(
                context.module, self.stage, ranks, callbacks, cast=cast, tensor=context.sizes.get("tp", 1)
            )
        return problems

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Wraps the plan's blocks and the rest of the module for this stage."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from lightning_5d.data_parallel.blocks import outer_modules
        from lightning_5d.data_parallel.options import ShardOptions
        from lightning_5d.data_parallel.sharded import ShardedData

        blocks = [module.get_submodule(name) for name in plan.block_names(module)]
        if mesh.size("pp") > 1:
            # Of their own, as the first and the last stage may be on one rank: each is reduced when its stage is done.
            blocks += outer_modules(module, blocks)
        # FiveD has made values equal by now, over all axes.
        options = ShardOptions(
            stage=self.stage,
            # Inputs are not FSDP2's to cast: it would round the batch at the root, float targets included.
            mp_policy=MixedPrecisionPolicy(dtypes.compute, dtypes.reduce, cast_forward_inputs=False),
            offload="none" if self.offload == "none" else "optimizer+parameters",
            synchronize=False,
            per_microbatch=self.per_microbatch,
        )
        return ShardedData(module, blocks, mesh.shard_mesh, options, list(mesh.expert_views.values()))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
