"""The state of a module on the tensor axis: whose gradients are whose, and what a checkpoint sees of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.data_parallel.compatibility import needs_whole_tensors
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Parallelized, Part, Problem, StoredForm
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.partial_gradients import PartialGradients
from lightning_5d.tensor_parallel.placement import Holders, place, placed_elsewhere
from lightning_5d.tensor_parallel.work import shares_of_work


class PlacedWeights(Parallelized):
    """Weights over the tensor axis: places them, completes their gradients, and says how they are stored.

    What the module computes with them is for subclasses.

    Args:
        module: The user's, whole and with the same values on every rank; or a stage of it.
        layout: How its weights are cut.
        axis: The ranks of the axis.
        mesh: All ranks by axis.
    """

    def __init__(self, module: nn.Module, layout: TensorLayout, axis: TensorAxis, mesh: ParallelMesh) -> None:
        layout = layout.without_weights(placed_elsewhere(module))
        place(module, layout, mesh)
        self._module, self.layout, self.axis, self._mesh = module, layout, axis, mesh
        self._holders = Holders(module, layout, axis.rank)
        self._partial: PartialGradients | None = None
        self._last = True

    @property
    def partial_gradients(self) -> PartialGradients:
        """What completes gradients.

        Raises:
            RuntimeError: Before all axes are at work.
        """
        if self._partial is None:
            raise RuntimeError("The axes are not at work yet.")
        return self._partial

    @override
    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        # Now that the data axis has put its parameters into the module.
        self._partial = PartialGradients(self._module, self.layout, self.axis, self._mesh.device)
        self._refresh()

    @override
    def begin_microbatch(self, *, last: bool) -> None:
        self._last = last
        self._refresh()

    @override
    def before_backward(self, loss: Tensor) -> Tensor:
        self.partial_gradients.begin()
        return loss

    @override
    def after_backward(self) -> None:
        if self._last:
            self.partial_gradients.complete()

    @override
    @contextmanager
    def scheduled(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        if not backward:
            yield
            return
        self._refresh()
        self.partial_gradients.begin()
        try:
            yield
        except BaseException:
            self.partial_gradients.drop()
            raise
        # Also if it was not the last one: what is there by now is set aside, and added to what comes.
        self.partial_gradients.complete()

    @override
    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        return self._holders.gradient_axes(parameter)

    @override
    def stored_forms(self) -> Mapping[str, StoredForm]:
        return self._holders.forms

    @override
    def shares_of_work(self) -> Mapping[nn.Module, float]:
        return shares_of_work(self._module, self.layout, self.axis.size)

    @override
    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        return [
            Problem(
                f"{type(optimizer).__name__} {reason}, and {self.axis.size} ranks of the tensor axis have a part of them each.",
                "Use another optimizer.",
            )
            for optimizer in optimizers
            if (reason := needs_whole_tensors(optimizer)) is not None
        ]

    def _refresh(self) -> None:
        # Between steps. Parameters may have been replaced since: filled, or loaded.
        self.partial_gradients.refresh()
        self._holders.refresh()

    @override
    def close(self) -> None:
        self.axis.close()
