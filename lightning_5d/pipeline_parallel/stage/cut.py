"""One module, of which a rank holds some stages: what it does not hold is left out, and a step runs one stage of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_5d.parallelism import Part
from lightning_5d.pipeline_parallel.stage.dependence import Dependence
from lightning_5d.pipeline_parallel.stage.first_run import FirstRun
from lightning_5d.pipeline_parallel.stage.layout import StageLayout
from lightning_5d.pipeline_parallel.stage.outline import Outline
from lightning_5d.pipeline_parallel.stage.placeholders import accepting_empty
from lightning_5d.pipeline_parallel.stage.recorded import install_hooks
from lightning_5d.pipeline_parallel.stage.run import Run, StageBoundary
from lightning_5d.pipeline_parallel.stage.stubs import stub

Scene = list[tuple[dict[str, Any], dict[str, nn.Module]]]


class Boundary(NamedTuple):
    """A stage has run up to its end.

    Attributes:
        payload: What its last block returned; what the next stage receives.
    """

    payload: Any


class Finished(NamedTuple):
    """The last stage has run, and with it the user's step.

    Attributes:
        output: What the step returned.
    """

    output: Any


class Cut:
    """The stages of a module that this rank holds.

    Making it puts stand-ins where the rank holds nothing, so that those weights are gone; names do not change. What the rank
    holds is all in place, except during a run, when only one stage's modules are.

    Args:
        module: The user's LightningModule. It is changed.
        layout: Which stage holds what.
        stages_here: The stages of this rank.

    Attributes:
        layout: Which stage holds what.
        stages_here: The stages of this rank, in order.
        running: The run that is going on.
        device: Where its weights are.
        optimizing: Optimizers are being made: a weight that is not here is one without elements.
    """

    def __init__(self, module: nn.Module, layout: StageLayout, stages_here: Sequence[int]) -> None:
        self.layout, self.stages_here = layout, tuple(sorted(stages_here))
        self.running: Run | None = None
        self.optimizing = False
        self._module = module
        self._outline: Outline | None = None
        self._handles: list[RemovableHandle] = []
        self._scenes: dict[int, Scene] = {}
        self._home: Scene = []
        self._blocks: dict[int, list[nn.Module]] = {}
        self._known: set[int] = set()
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        places = {place.name: place for place in layout.anatomy.places}
        self._stubs = {
            name: stub(place, module.get_submodule(name), layout.stages_of(place), self)
            for name, place in places.items()
        }
        self._held = tuple(n for n, found in self._stubs.items() if not set(self.stages_here).isdisjoint(found.stages))
        _put(self._scene({n: found for n, found in self._stubs.items() if n not in self._held}))

    @property
    def owners(self) -> Mapping[str, tuple[int, ...]]:
        """Name of each parameter of the whole module, under all of its names, and the stages that use it."""
        return self.layout.owners

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stages of this rank, each with those of its modules whose weights no other stage of this rank uses."""
        return tuple(Part(stage, tuple(self._alone(stage))) for stage in self.stages_here)

    def _alone(self, stage: int) -> list[nn.Module]:
        users: dict[int, set[int]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), set()).update(self.layout.owners.get(name, ()))
        found: dict[int, nn.Module] = {}
        for name in self._held:
            module = self._module.get_submodule(name)
            stages = {stage for parameter in module.parameters() for stage in users[id(parameter)]}
            if stages.intersection(self.stages_here) == {stage}:
                found[id(module)] = module
        return list(found.values())

    def arm(self) -> None:
        """Makes the stages ready to run; to be called when all others have put their hooks on modules."""
        self.close()
        if self.layout.stages == 1:
            return
        install_hooks(self._module)
        real = {name: self._module.get_submodule(name) for name in self._held}
        if len(self.stages_here) > 1:
            self._home = self._scene(real)
            self._scenes = {
                stage: self._scene(
                    {n: m if stage in self._stubs[n].stages else self._stubs[n] for n, m in real.items()}
                )
                for stage in self.stages_here
            }
        for stage in self.stages_here:
            low, high = self.layout.spans[stage]
            self._blocks[stage] = [real[name] for name in self.layout.blocks[low:high]]
            if low == high:
                continue
            first, last = self._blocks[stage][0], self._blocks[stage][-1]
            # First and last, where the code around the blocks is: other axes' hooks make of its tensors what blocks compute with.
            enter = partial(self._enter, stage)
            self._handles.append(first.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            if stage < self.layout.stages - 1:
                self._handles.append(last.register_forward_hook(partial(self._leave, stage)))
        if 0 in self.stages_here:
            for name in self.layout.anatomy.outer("before"):
                self._handles.append(real[name].register_forward_hook(partial(self._record, name)))

    def close(self) -> None:
        """Takes the hooks off again. Weights that are gone stay gone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._scenes, self._home, self._blocks, self._known = {}, [], {}, set()

    @contextmanager
    def optimizer_context(self) -> Iterator[None]:
        """A context in which optimizers may be made of weights that this rank does not hold; see `is_placeholder`."""
        if self.layout.stages == 1:
            yield
            return
        self.optimizing = True
        try:
            with accepting_empty(self.device):
                yield
        finally:
            self.optimizing = False

    def outline(self) -> Outline:
        """What modules before the blocks returned in the last run of the first stage, for the other stages.

        Raises:
            RuntimeError: If there was none on this rank.
        """
        if self._outline is None:
            raise RuntimeError(
                "The first stage has not run on this rank, so nobody knows what comes before the blocks."
            )
        return self._outline

    def run(
        self,
        stage: int,
        step: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        received: Any = None,
        outline: Outline | None = None,
    ) -> Boundary | Finished:
        """Runs a user's step with one stage alone.

        Args:
            stage: The stage, one of this rank's.
            step: The step. It runs from its beginning to the stage's last block; on the last stage to its end.
            args: Its arguments.
            kwargs: Its arguments by name.
            received: What the stage before handed on.
            outline: What `outline` gave on the first stage for inputs of this signature: later stages need it. The first run
                with one looks at all that the step computes.

        Raises:
            MisconfigurationException: If the model does not run its blocks once, in order, and without help of what the
                modules before them returned to other stages.
        """
        if self.layout.stages == 1:
            self._outline = Outline({})
            return Finished(step(*args, **(kwargs or {})))
        first, last = stage == 0, stage == self.layout.stages - 1
        low, high = self.layout.spans[stage]
        if low == high and not first and not last:
            return Boundary(received)
        if self.running is not None:
            raise RuntimeError(f"Stage {stage} cannot run while stage {self.running.stage} does.")
        if not first and outline is None:
            raise ValueError(f"Stage {stage} needs the outline that the first stage gave for inputs of this signature.")
        watch = Dependence() if outline is not None and not first and stage not in outline.seen else None
        run = self.running = Run(self.layout, stage, received, outline, self.device, watch)
        look = None
        if watch is not None or stage not in self._known:
            look = FirstRun(run, self._module, dict(zip(range(low, high), self._blocks[stage], strict=True)))
        output = None
        try:
            _put(self._scenes.get(stage, ()))
            with nullcontext() if look is None else look.looking():
                output = step(*args, **(kwargs or {}))
        except StageBoundary:
            pass
        finally:
            self.running = None
            _put(self._home)
        if first:
            self._outline = Outline({name: tuple(calls) for name, calls in run.calls.items()})
        if not run.stopped and not (last and run.reached):
            run.refuse_end()
        self._known.add(stage)
        if look is not None:
            look.check(output)
        if watch is not None and outline is not None:
            outline.seen.add(stage)
            outline.written |= run.written()
        return Boundary(run.payload) if run.stopped else Finished(output)

    # Hooks on own modules. They do nothing outside of a run: a backward may call modules again.

    def _enter(self, stage: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        run = self.running
        return run.enter(args, kwargs) if run is not None and run.stage == stage else None

    def _leave(self, stage: int, module: nn.Module, args: Any, output: Any) -> None:
        run = self.running
        if run is not None and run.stage == stage:
            run.stop(output)

    def _record(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        run = self.running
        if run is not None and run.stage == 0:
            run.record(name, output)

    def _scene(self, modules: Mapping[str, nn.Module]) -> Scene:
        scene: dict[str, dict[str, nn.Module]] = {}
        for name, module in modules.items():
            owner, _, key = name.rpartition(".")
            scene.setdefault(owner, {})[key] = module
        return [(self._module.get_submodule(owner)._modules, entries) for owner, entries in scene.items()]


def _put(scene: Iterable[tuple[dict[str, Any], dict[str, nn.Module]]]) -> None:
    for children, entries in scene:
        children.update(entries)
