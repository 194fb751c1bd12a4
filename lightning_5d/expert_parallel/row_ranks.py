"""The ranks that have rows of the same microbatch, and of the same step: which tokens each has, and sums over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_5d.context_parallel.cut_sequences import CutSequences
from lightning_5d.expert_parallel.counted import Scope
from lightning_5d.expert_parallel.microbatch_rows import MicrobatchRows
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.mesh import DATA_AXES, ParallelMesh
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.sharded import ShardedLayers

if TYPE_CHECKING:
    from lightning_5d.context_parallel.inside import Inside
    from lightning_5d.parallelism import Parallelized
    from lightning_5d.tensor_parallel.sequence import SequenceCut

_MOST_MASKS = 64

# [Note: which rows a rank has]
# A MoE layer runs between the blocks' regions, never inside of one: a plan cuts linear layers, and neither a router nor stacked experts are
# such. Beside them a shared expert may be one (DeepSeek-V3's, our own `MoE`'s), with doors of its own; Mixtral's and Qwen-MoE's layers have
# none. So with sequence parallelism every MoE layer sees its rank's piece of the sequence, as norms do, and what it computes of weights,
# its router's among them, are summands, which `tensor_parallel/partial.py` lists for all weights of blocks. Without it, and outside of
# the blocks, ranks of the tensor axis have the same rows. That a layer is inside of a region is refused (`rows.region_problems`).
# Inside a door of the context axis rows are of this rank's tokens; a model that is no door, as it gets no sequence, has the same rows on all.
# Both are asked anew in every call: a door is open or not, a block runs or does not, also when backward runs it again.


@dataclass(frozen=True)
class Differing:
    """Along which axes the ranks of a microbatch have different rows.

    Attributes:
        context: Each rank of the context axis has its tokens.
        tensor: Each rank of the tensor axis has its piece of the sequence.
    """

    context: bool = False
    tensor: bool = False


class RowRanks:
    """The ranks around one, as MoE layers need them. All ranks of a place of the pipeline make it together, and call its sums in one order.

    Args:
        mesh: The ranks by axis.
        inside: The context axis's open door, if it is at work and one is open.
        sequence: Where the tensor axis cuts the sequence; ``None`` without sequence parallelism.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        inside: Callable[[], Inside | None] | None = None,
        sequence: SequenceCut | None = None,
    ) -> None:
        self._mesh, self._inside, self._sequence = mesh, inside, sequence
        self._together = True
        parts = [axis for axis, cuts in (("cp", inside), ("tp", sequence)) if cuts is not None and mesh.size(axis) > 1]
        self._microbatch = _opened(mesh, parts)
        self._data = _opened(mesh, DATA_AXES)
        self._all = _opened(mesh, [*DATA_AXES, *parts]) if self._microbatch and self._data else None
        self._parts = parts
        self._padding: dict[tuple[MicrobatchRows, int], Tensor | None] = {}

    @classmethod
    def of(cls, mesh: ParallelMesh, axes: Sequence[Parallelized]) -> RowRanks:
        """The ranks, as the axes that are at work cut sequences.

        Args:
            mesh: The ranks by axis.
            axes: As `Parallelized.all_at_work` gives them.
        """
        context = next((axis for axis in axes if isinstance(axis, CutSequences)), None)
        tensor = next((axis for axis in axes if isinstance(axis, ShardedLayers)), None)
        return cls(
            mesh,
            None if context is None else lambda: context.doors.inside,
            None if tensor is None else tensor.sequence,
        )

    @property
    def is_cut(self) -> bool:
        """Whether code that runs now has a piece of the sequence along the tensor axis."""
        return self._sequence is not None and self._sequence.inside is not None

    @property
    def door(self) -> Inside | None:
        """The open door of the context axis behind which the code that runs now has this rank's tokens."""
        inside = None if self._inside is None else self._inside()
        return None if inside is None or inside.paused else inside

    @property
    def differing(self) -> Differing:
        """Which ranks have different rows now."""
        return Differing(self.door is not None and self._mesh.size("cp") > 1, self.is_cut)

    @property
    def is_first(self) -> bool:
        """Whether of the ranks that have the same rows now this is the one that counts them."""
        differing = self.differing
        return not (
            (self._mesh.rank("cp") and not differing.context) or (self._mesh.rank("tp") and not differing.tensor)
        )

    def place(self, *, spread: bool) -> int | None:
        """This rank's number among those that draw from one random stream and have different rows in experts; ``None`` if there are no others.

        Args:
            spread: Whether ranks have other experts, and so other rows than outside of them.
        """
        differs = {"cp": spread or self.differing.context, "tp": spread or self.is_cut}
        axes = [axis for axis, differ in differs.items() if differ and self._mesh.size(axis) > 1]
        return self._mesh.rank(*axes) if axes else None

    @property
    def context_ranks(self) -> int:
        """Ranks of the context axis."""
        return self._mesh.size("cp")

    @property
    def rows(self) -> MicrobatchRows | None:
        """Which tokens rows are that the code has now; ``None`` where no sequence is cut."""
        door = self.door
        cut = None if door is None else door.sequence.cut
        whole = None if self._sequence is None else self._sequence.inside
        if whole is not None:
            return MicrobatchRows(whole, self._mesh.size("tp"), cut)
        return None if cut is None else MicrobatchRows(cut.local, 1, cut)

    def real(self, rows: int) -> Tensor | None:
        """Which of this rank's rows are tokens and not padding, as booleans (rows,); ``None`` if all are."""
        known = self.rows
        if known is None:
            return None
        key = (known, rows)
        if key not in self._padding:
            if len(self._padding) >= _MOST_MASKS:
                self._padding.clear()
            # A recomputation finds the mask, and would count other operations than the first run.
            with hidden_operations(), torch.inference_mode(False):
                self._padding[key] = known.real(self._place(known), rows, self._mesh.device)
        return self._padding[key]

    @torch.no_grad()
    def sum(self, x: Tensor, scope: Scope, differing: Differing | None = None) -> Tensor:
        """The sum over the ranks of that scope, with each token once; the same bits on all of them.

        Args:
            x: This rank's summand; of ranks that have the same rows the same one.
            scope: Whose tokens.
            differing: Which ranks had different rows when `x` was made; those of now by default.
        """
        differing = differing or self.differing
        data = self._data if scope == "global" and self._together else None
        if not (differing.context or differing.tensor):
            return x.detach() if data is None else self._summed(data, x)
        axis = self._microbatch if data is None else self._all or data
        return x.detach() if axis is None else self._summed(axis, self._once(x, differing))

    @torch.no_grad()
    def choices(self, index_NK: Tensor, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts all tokens of the microbatch have chosen, and their weights: the same on all ranks that have some of them.

        All of them call it together.

        Args:
            index_NK: The experts that this rank's rows go to.
            weights_NK: With which weights.

        Returns:
            Both for all rows (B * S, K) of the whole sequences, in the order of one process, without padding.
        """
        rows = self.rows
        if rows is None or rows.ranks == 1 or self._microbatch is None:
            return index_NK, weights_NK.detach()
        rows.sequences(len(index_NK))
        choices = index_NK.shape[1]
        # One message: whole numbers up to 2^24 are exact in fp32, and all that 16 bits can be is.
        wide = torch.float64 if weights_NK.dtype == torch.float64 else torch.float32
        with hidden_operations():
            packed = torch.cat([index_NK.to(wide), weights_NK.detach().to(wide)], 1)
            gathered = self._microbatch.gather(packed, 0).unflatten(0, (self._microbatch.size, len(packed)))  # type: ignore[no-untyped-call]
            whole = rows.whole([gathered[rank] for rank in self._different(rows)])
        return whole[:, :choices].to(index_NK.dtype), whole[:, choices:].to(weights_NK.dtype)

    def part(self, whole_NK: Tensor, fill: bool = False) -> Tensor:
        """This rank's rows of what was decided for all rows that `choices` gave; rows of padding are `fill`."""
        rows = self.rows
        if rows is None:
            return whole_NK
        return rows.part(whole_NK, self._place(rows), fill)

    def kept(
        self, index_NK: Tensor, weights_NK: Tensor, decide: Callable[[Tensor, Tensor], Tensor] | None
    ) -> Tensor | None:
        """Which choices of this rank's rows go to experts, as booleans (N, K); ``None`` if all do.

        Those of padding do not, and of the others those that would be left out in one process. All ranks that have rows of the microbatch call it
        together.

        Args:
            index_NK: The experts of each row.
            weights_NK: Their weights.
            decide: Says of the choices of all tokens of a microbatch which are kept; ``None`` if all are.
        """
        if decide is not None:
            return self.part(decide(*self.choices(index_NK, weights_NK)))
        real = self.real(len(index_NK))
        return None if real is None else real[:, None].expand_as(index_NK)

    @property
    def are_apart(self) -> bool:
        """Whether data ranks have different numbers of batches now."""
        return not self._together

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which data ranks have different numbers of batches: sums over all ranks are those over the ranks of a microbatch."""
        before, self._together = self._together, False
        try:
            yield
        finally:
            self._together = before

    def memory(self) -> Iterable[tuple[str, Tensor]]:
        """See `Parallelized.memory`."""
        for axis in self._axes:
            for tensor in axis.memory():
                yield "communication buffers", tensor
            for tensor in axis.mapped():
                yield "memory of other ranks", tensor

    def close(self) -> None:
        """Gives back what it holds."""
        for axis in self._axes:
            axis.close()

    @property
    def _axes(self) -> list[TensorAxis]:
        return [axis for axis in (self._microbatch, self._data, self._all) if axis is not None]

    def _once(self, x: Tensor, differing: Differing) -> Tensor:
        """The summand, or zeros on a rank whose rows another rank counts."""
        differs = {"cp": differing.context, "tp": differing.tensor}
        repeated = any(self._mesh.rank(axis) for axis in self._parts if not differs[axis])
        return torch.zeros_like(x) if repeated else x

    def _summed(self, axis: TensorAxis, x: Tensor) -> Tensor:
        try:
            with hidden_operations():
                return axis.sum(x.detach().contiguous())
        except RuntimeError as error:
            error.add_note(
                "It was in a sum over the tokens of routers, as balance losses and biases need it: these ranks have to call the layers with experts"
                " equally often, in one order."
            )
            raise

    def _place(self, rows: MicrobatchRows) -> int:
        """This rank's number among those with different rows."""
        context = 0 if rows.cut is None else self._mesh.rank("cp")
        return context * rows.pieces + (self._mesh.rank("tp") if rows.pieces > 1 else 0)

    def _different(self, rows: MicrobatchRows) -> range:
        """The first ranks of the microbatch with each of the different rows."""
        tensor = self._mesh.size("tp") if "tp" in self._parts else 1
        if rows.cut is None:
            return range(rows.pieces)
        return range(0, rows.cut.size * tensor, tensor // rows.pieces)


def _opened(mesh: ParallelMesh, axes: Sequence[str]) -> TensorAxis | None:
    present = [axis for axis in axes if mesh.size(axis) > 1]
    return open_axis(mesh.across(*present), mesh.device, name="group of routers") if present else None
