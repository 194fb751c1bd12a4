"""The tensor axis at work: layers of which each rank holds a part, inside Lightning's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Part
from lightning_5d.tensor_parallel.axis import open_axis
from lightning_5d.tensor_parallel.first_step import FirstStep
from lightning_5d.tensor_parallel.layers import install
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.random_regions import RandomRegions
from lightning_5d.tensor_parallel.report import describe_layout
from lightning_5d.tensor_parallel.state import PlacedWeights


class ShardedLayers(PlacedWeights):
    """Layers cut over the ranks of ``tp``.

    Args:
        module: The user's LightningModule, or this rank's stages of it.
        layout: What becomes of its layers; of layers that are not on this rank, too.
        mesh: The ranks by axis.
        sequence_parallel: Whether the sequence is cut outside of the layers.
        compute: The dtype that modules compute in, if not their own.

    Attributes:
        sequence: Where the sequence is cut; ``None`` if it is not.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: TensorLayout,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        compute: torch.dtype | None = None,
    ) -> None:
        axis = open_axis(mesh.group("tp"), mesh.device)
        self._guards = FirstStep(module, layout, axis, compute)
        super().__init__(module, layout, axis, mesh)
        self._installed = install(module, layout, axis, sequence_parallel)
        self.sequence = self._installed.sequence
        self._stage = 0
        self._random = RandomRegions(module, layout, axis.rank, mesh.device)

    @override
    def step_context(self) -> AbstractContextManager[None]:
        return self._random.step()

    @override
    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guards.watching(self._kind()):
            output = step(*args, **kwargs)
        if not self.layout.heads:
            return output
        from lightning_5d.tensor_parallel.vocabulary import with_whole_logits

        return with_whole_logits(output, training=self._run_stage() == RunningStage.TRAINING)

    @override
    def describe(self) -> str:
        return describe_layout(self.layout, self.axis.size)

    @override
    def before_backward(self, loss: Tensor) -> Tensor:
        self._guards.note_loss(loss)
        return super().before_backward(loss)

    @override
    def after_backward(self) -> None:
        super().after_backward()
        if self._last:
            self._guards.check_gradients()

    @contextmanager
    @override
    def scheduled(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        with super().scheduled(parts, last=last, backward=backward):
            yield
        if backward:
            self._guards.check_gradients()

    @override
    def part_begins(self, stage: int) -> None:
        super().part_begins(stage)
        self._stage = stage

    @override
    def close(self) -> None:
        self._random.close()
        self._installed.close()
        super().close()

    def _kind(self) -> str:
        stage = self._run_stage()
        return f"{'' if stage is None else stage.value} {self._stage}"

    def _run_stage(self) -> RunningStage | None:
        trainer = getattr(self._module, "_trainer", None)
        return None if trainer is None else trainer.state.stage
