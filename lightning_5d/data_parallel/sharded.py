"""The data axis at work: the ZeRO engine inside Lightning's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.data_parallel.assigned_data import assigned_data
from lightning_5d.data_parallel.compatibility import sharded_optimizer_problems
from lightning_5d.data_parallel.engine import Engine, ShardedEngine
from lightning_5d.data_parallel.hooks_aside import hooks_aside
from lightning_5d.data_parallel.options import ShardOptions
from lightning_5d.data_parallel.sharding import shard
from lightning_5d.data_parallel.states import state_of
from lightning_5d.mesh import ExpertView
from lightning_5d.parallelism import Parallelized, Part, Problem

if TYPE_CHECKING:
    from lightning_5d.steps import ParallelSteps


class ShardedData(Parallelized):
    """Data parallelism of one module, at any ZeRO stage.

    The root of FSDP2 is the LightningModule itself, and a whole step is its forward. That takes some care, see the notes.

    Args:
        module: The user's LightningModule.
        blocks: Its repeated blocks, each of which is gathered and freed as one.
        mesh: The data ranks: ``dp_shard``, or ``dp_replicate x dp_shard``.
        options: The stage and what belongs to it.
        views: Other arrangements of the ranks, on which some weights live.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        options: ShardOptions,
        views: Sequence[ExpertView] = (),
    ) -> None:
        self.engine = shard(module, blocks, mesh, options, views)
        self._module = module
        self._root: FSDPState | None = state_of(module) if isinstance(module, FSDPModule) else None
        self._in_step = False
        self._open = False
        self._scheduled = self._own_backward = False
        # Other parameters are gathered when their module is called; those the root holds itself are just read.
        self._root_holds_parameters = any(True for _ in module.parameters(recurse=False))
        self._by_hand = not getattr(module, "automatic_optimization", True)
        if self._root is not None and self._by_hand:
            _mirror_toggling(module, self.engine)
        if isinstance(self.engine, ShardedEngine):
            for group in self.engine.groups:
                # Steps by hand limit weights between their optimizers' steps, often through `.data`.
                group.compare_all = self._by_hand

    # [Note: the step as the root's forward]
    # FSDP2 gathers the root's parameters before the root's forward and hooks the root's output for backward. The step takes
    # the place of that forward, so the two hooks are called here, around the step, and are taken off the module while it
    # runs: a step that calls `self(x)` must not run them a second time.
    @override
    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._root is None or self._scheduled:
            return step(*args, **kwargs)
        args, kwargs = self._enter(args, kwargs)
        self._in_step = True
        self._hold(True)
        self._keep(True)
        try:
            # Checked with torch 2.13: FSDP2 keeps the handles of the two hooks it registers on a module in its state.
            root = self._root
            hooks = self._module, {root._pre_forward_hook_handle.id, root._post_forward_hook_handle.id}
            with hooks_aside([hooks]), _clearing(self._module, self.engine):
                output = step(*args, **kwargs)
            if self._open:
                output = self._leave(output)
        finally:
            self._in_step = False
            self._hold(False)
            self._keep(False)
            self._take_gradients(hide=True)
        if self._by_hand and torch.is_grad_enabled():
            self._reshard()  # hooks, and a checkpoint they save, see the sharded weights; no backward follows
        return output

    # [Note: backward inside the step]
    # Under manual optimization `training_step` itself calls backward, perhaps several times, and steps optimizers in
    # between. The root's forward then has to end before each backward (so that its hook sits on that loss) and to begin
    # again after it; and before an optimizer step everything must be resharded, or what follows would go on with the old
    # values.
    @override
    def before_backward(self, loss: Tensor) -> Tensor:
        self._hold(False)
        self._take_gradients(hide=True)
        if not self._in_step or not self._open:
            return loss
        left: Tensor = self._leave(loss)
        return left

    @override
    def after_backward(self) -> None:
        self.engine.wait()
        self._hold(self._in_step)
        self._reopen()

    @override
    def standing_in(self) -> Iterable[Tensor]:
        return self.engine.full_parameters()

    @contextmanager
    @override
    def own_backward(self) -> Iterator[None]:
        # What of the step follows is again a forward of the root, whatever it uses.
        before, self._own_backward = self._own_backward, not self._by_hand
        try:
            with self.engine.completing():
                yield
        finally:
            self._own_backward = before

    @override
    def finalize_gradients(self) -> None:
        self._take_gradients(hide=False)

    @override
    def before_optimizer_step(self) -> None:
        self._take_gradients(hide=True)
        if self._in_step:
            self._open = False
            self._keep(False)
            self._reshard()
            self._keep(True)

    @override
    def after_optimizer_step(self) -> None:
        self._reopen()

    @override
    def begin_microbatch(self, *, last: bool) -> None:
        self.engine.begin(last)

    @contextmanager
    @override
    def scheduled(self, parts: Sequence[Part], *, last: bool, backward: bool) -> Iterator[None]:
        with self.engine.schedule(parts, last=last, backward=backward):
            self._scheduled = True
            try:
                yield
            finally:
                self._scheduled = False

    @override
    def part_begins(self, stage: int) -> None:
        self.engine.part_begins(stage)

    @override
    def part_ends(self, stage: int, *, gradients: bool = False, complete: bool = False, partly: bool = False) -> None:
        self.engine.part_ends(stage, gradients=gradients, complete=complete, partly=partly)

    @override
    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        return [] if self._root is None else sharded_optimizer_problems(optimizers, self.engine.options.stage)

    @override
    def training_context(self, strategy: ParallelSteps) -> AbstractContextManager[None]:
        return assigned_data()

    @override
    def evaluation_context(self, *, uneven: bool) -> AbstractContextManager[None]:
        # A rank that has run out of batches cannot take part in gathers: have everything gathered before.
        return self.unsharded() if uneven else self.engine.evaluating()

    @override
    def memory(self) -> Iterable[tuple[str, Tensor]]:
        return self.engine.memory()

    @contextmanager
    @override
    def unsharded(self) -> Iterator[None]:
        with self.engine.unsharded():
            yield

    @override
    def close(self) -> None:
        self.engine.close()

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._open = True
        if self._root is None:
            return args, kwargs
        entered: tuple[tuple[Any, ...], dict[str, Any]] = self._root._pre_forward(self._module, args, kwargs)
        return entered

    def _hold(self, hold: bool) -> None:
        if isinstance(self.engine, ShardedEngine):
            self.engine.hold_through_backward(hold)

    def _keep(self, keep: bool) -> None:
        if isinstance(self.engine, ShardedEngine):
            self.engine.keeps_pinned = keep

    def _reshard(self) -> None:
        if isinstance(self.engine, ShardedEngine):
            self.engine.reshard()

    def _reopen(self) -> None:
        if self._in_step and not self._open and (self._root_holds_parameters or self._own_backward):
            self._enter((), {})
            if isinstance(self.engine, ShardedEngine):
                self.engine.shown.show()

    def _take_gradients(self, *, hide: bool) -> None:
        if isinstance(self.engine, ShardedEngine):
            self.engine.shown.take(hide=hide)

    def _leave(self, output: Any) -> Any:
        self._open = False
        return output if self._root is None else self._root._post_forward(self._module, (), output)


@contextmanager
def _clearing(module: nn.Module, engine: Engine) -> Iterator[None]:
    """Lets the module's `zero_grad`, which finds full parameters in a step, reach the gradients of shards."""
    original = module.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        original(set_to_none)
        if isinstance(engine, ShardedEngine):
            engine.clear_gradients(set_to_none)

    before = module.__dict__.get("zero_grad")
    module.__dict__["zero_grad"] = zero_grad
    try:
        yield
    finally:
        del module.__dict__["zero_grad"]
        if before is not None:
            module.__dict__["zero_grad"] = before


def _mirror_toggling(module: nn.Module, engine: Engine) -> None:
    """Lets `toggle_optimizer`, which switches `requires_grad` of the optimizers' (sharded) parameters, reach the full ones."""
    for name in ("toggle_optimizer", "untoggle_optimizer"):
        original = getattr(module, name, None)
        if original is None:
            continue

        def mirrored(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            result = _original(*args, **kwargs)
            if isinstance(engine, ShardedEngine):
                engine.mirror_requires_grad()
            return result

        object.__setattr__(module, name, mirrored)
