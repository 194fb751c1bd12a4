"""The context axis at work: doors around the models that a module calls, and attention of all ranks behind them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.context_parallel.attention import open_attention
from lightning_5d.context_parallel.between_stages import from_plain_form, plain_form
from lightning_5d.context_parallel.doors import Doors
from lightning_5d.context_parallel.first_step import FirstStep
from lightning_5d.context_parallel.redirect import Redirect
from lightning_5d.context_parallel.shown import with_whole_sequences
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Parallelized
from lightning_5d.tensor_parallel.axis import open_axis

if TYPE_CHECKING:
    from lightning_5d.context_parallel.context import ContextParallel


class CutSequences(Parallelized):
    """Sequences cut over the ranks of ``cp``.

    Args:
        module: The user's LightningModule, or this rank's stages of it.
        plugin: The settings.
        mesh: The ranks by axis.
    """

    def __init__(self, module: nn.Module, plugin: ContextParallel, mesh: ParallelMesh) -> None:
        self._module, self._plugin = module, plugin
        self._axis = open_axis(mesh.line("cp"), mesh.device, name="context group")
        self._attention = open_attention(plugin.method, plugin.ulysses, mesh)
        self._redirect = Redirect(self._attention, mesh.size("tp"))
        self._guards = FirstStep(module, self._redirect, lambda: self.doors.outside)
        self._is_split = mesh.size("pp") > 1
        self._stage = 0
        self._told = False
        self._doors: Doors | None = None

    @override
    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        # Once other axes have put their hooks on modules, so that those see a rank's tokens; only a pipeline's come later, and see whole sequences.
        self._doors = Doors(
            self._module,
            self._axis,
            self._plugin.cut,
            self._redirect.inside,
            keys=self._plugin.keys,
            pad=self._plugin.pad,
            documents=self._plugin.documents,
            is_split=self._is_split,
        )

    @property
    def doors(self) -> Doors:
        """The doors.

        Raises:
            RuntimeError: Before all axes are at work.
        """
        if self._doors is None:
            raise RuntimeError("The context axis is not at work yet.")
        return self._doors

    @override
    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.doors.step(args, kwargs), self._guards.watching(self._kind()):
            output = step(*args, **kwargs)
        self._tell_of_unused_keys()
        if self._plugin.whole_outputs and self._run_stage() != RunningStage.TRAINING:
            return with_whole_sequences(output)
        return output

    @override
    def part_begins(self, stage: int) -> None:
        self._stage = stage

    @override
    def recompute_context(self) -> Callable[[], AbstractContextManager[None]]:
        return self.doors.again()

    @override
    def plain_form(self, tensor: Tensor) -> tuple[Tensor, Hashable] | None:
        return plain_form(tensor)

    @override
    def from_plain_form(self, plain: Tensor, form: Any) -> Tensor:
        return from_plain_form(plain, form, self.doors.sequence)

    @override
    def memory(self) -> Iterable[tuple[str, Tensor]]:
        for tensor in (*self._axis.memory(), *self._attention.memory()):
            yield "communication buffers", tensor
        for tensor in (*self._axis.mapped(), *self._attention.mapped()):
            yield "memory of other ranks", tensor

    @override
    def close(self) -> None:
        if self._doors is not None:
            self._doors.close()
        self._attention.close()
        self._axis.close()

    def _tell_of_unused_keys(self) -> None:
        """Says once, after a first training step, which names of `keys` have met nothing: one may be misspelt."""
        if self._told or self._is_split or self._run_stage() != RunningStage.TRAINING:
            return
        self._told = True
        if unused := self.doors.unused_keys():
            rank_zero_warn(
                f"ContextParallel(keys=...): nothing in the first training step is called {' or '.join(map(repr, unused))}. Names are those of"
                " entries of the batch, of arguments or outputs of modules, perhaps with what they are in, as 'inputs.frames'."
            )

    def _kind(self) -> str:
        stage = self._run_stage()
        return f"{'' if stage is None else stage.value} {self._stage}"

    def _run_stage(self) -> RunningStage | None:
        trainer = getattr(self._module, "_trainer", None)
        return None if trainer is None else trainer.state.stage
