"""The tensor axis at work: layers of which each rank holds a part, inside Lightning's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Parallelized, Part
from lightning_5d.tensor_parallel.axis import open_axis
from lightning_5d.tensor_parallel.layers import install
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.placement import place


class ShardedLayers(Parallelized):
    """Layers cut over the ranks of ``tp``.

    Args:
        module: The user's LightningModule, or this rank's stages of it.
        layout: What becomes of its layers; of layers that are not on this rank, too.
        mesh: The ranks by axis.
        sequence_parallel: Whether the sequence is cut outside of the layers.
    """

    def __init__(
        self, module: nn.Module, layout: TensorLayout, mesh: ParallelMesh, *, sequence_parallel: bool
    ) -> None:
        self._module, self._layout, self._mesh = module, layout, mesh
        self.axis = open_axis(mesh.group("tp"))
        place(module, layout, mesh)
        self._installed = install(module, layout, self.axis, sequence_parallel)

    @override
    def close(self) -> None:
        self._installed.close()
        self.axis.close()
