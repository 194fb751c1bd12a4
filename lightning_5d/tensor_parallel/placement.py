"""The weights of a module as DTensors over the tensor axis, each rank with its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_5d.mesh import ParallelMesh
from lightning_5d.names import plain_name
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.rows import Rows

AXIS = "tp"
"""The mesh axis."""


def place(module: nn.Module, layout: TensorLayout, mesh: ParallelMesh) -> None:
    """Makes every parameter a DTensor over the tensor axis, in place and without communication.

    Those that the layout cuts become shards of the stored weight, all others are replicated, but for those that are DTensors already:
    another axis has placed them (experts). Parameters keep their names, dtype,
    device and ``requires_grad``; one with several names stays one. Meta tensors stay meta tensors.

    Args:
        module: Its parameters are plain and whole, with the same values on every rank. Before it is sharded over data ranks.
        layout: Which weights are cut, and how. Names that the module does not have (another stage's) are passed over.
        mesh: The ranks by axis, more than one along ``tp``.

    Raises:
        MisconfigurationException: If a weight cannot be cut as the layout says; names it.
    """
    axis = mesh.device_mesh[AXIS]
    placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for prefix, owner in module.named_modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            known = placed.get(id(parameter))
            if known is None:
                name = plain_name(f"{prefix}.{key}" if prefix else key)
                tensor = _placed(name, parameter, layout.weights.get(name), axis)
                # The plain one is kept until the end, as its id must not be used again.
                known = parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                placed[id(parameter)] = known
            owner._parameters[key] = known[1]


def _placed(name: str, parameter: Tensor, rows: Rows | None, axis: DeviceMesh) -> DTensor:
    whole = parameter.detach()
    if rows is None:
        return DTensor.from_local(whole.contiguous(), axis, [Replicate()], run_check=False)
    if not 0 <= rows.dim < whole.ndim or whole.shape[rows.dim] != rows.whole or rows.stored % axis.size():
        raise MisconfigurationException(
            f"{name} of shape {tuple(whole.shape)} cannot be cut along dimension {rows.dim} from {rows.whole} rows into"
            f" {axis.size()} parts of {rows.stored} stored ones: the layout was made for another module or another size."
        )
    shape = torch.Size(rows.stored if dim == rows.dim else size for dim, size in enumerate(whole.shape))
    if whole.is_meta:
        part = whole.new_empty([size // axis.size() if d == rows.dim else size for d, size in enumerate(shape)])
    else:
        # A copy: a part that is a view would keep the whole weight in memory.
        part = rows.part(whole, axis.get_local_rank(), axis.size()).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, axis, [Shard(rows.dim)], run_check=False, shape=shape, stride=stride)


def placed_elsewhere(module: nn.Module) -> frozenset[str]:
    """Names of parameters that are DTensors before the tensor axis places any."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(plain_name(name) for name, parameter in named if isinstance(parameter, DTensor))


class Holders:
    """Which ranks of the tensor axis hold what of a module's weights.

    Args:
        module: Its parameters may be sharded over data ranks, and be whole on them, later.
        layout: How they are placed.
        rank: This rank's place on the axis.
    """

    def __init__(self, module: nn.Module, layout: TensorLayout, rank: int) -> None:
        self._module, self._layout, self._rank = module, layout, rank
        self._known: dict[int, tuple[Tensor, Sequence[str] | None]] = {}

    @property
    def forms(self) -> Mapping[str, Rows]:
        """How those weights are stored that a checkpoint has in another form, by name."""
        return {name: rows for name, rows in self._layout.weights.items() if rows.index is not None}

    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        """See `lightning_5d.parallelism.Parallelized.gradient_axes`: of several copies the first one counts."""
        known = self._known.get(id(parameter))
        if known is None or known[0] is not parameter:
            self.refresh()
            known = self._known.get(id(parameter), (parameter, ()))
        return known[1]

    # [Note: two tensors of one parameter]
    # During a step the data axis has plain parameters in the module, and the optimizer has those that are there between steps:
    # either may be asked about at any time.
    def refresh(self) -> None:
        """Gets to know the parameters that are in the module now, besides those it knows; to be called between steps."""
        for name, found in self._module.named_parameters():
            known = self._known.get(id(found))
            if known is None or known[0] is not found:
                self._known[id(found)] = found, self._axes_of(plain_name(name))

    def _axes_of(self, name: str) -> Sequence[str] | None:
        rows = self._layout.weights.get(name)
        if rows is None:
            return ()
        return None if self._rank % rows.copies else (AXIS,)
