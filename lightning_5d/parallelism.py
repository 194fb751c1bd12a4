"""The interface every parallelism implements.

A `Parallelism` is what a person writes down: a small frozen object with sizes and options. It can be checked, printed and
used in as many Trainers as one likes. `Parallelism.parallelize` turns it into a `Parallelized`: the same axis at work on one
module, with the state that needs. `FiveD` calls the hooks of both in a fixed order and knows nothing about any axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_5d.checkpoint.stages import Stages
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.plan import ParallelPlan
    from lightning_5d.steps import ParallelSteps

Size = int | Literal["auto"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        what: What is wrong, with the numbers that clash.
        fix: The nearest setting that works.
    """

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that an axis which places weights has to provide for.

    Attributes:
        compute: Modules compute in this one, from copies of the weights; ``None`` for the weights' own.
        reduce: Gradients are added up over ranks in this one; ``None`` for the one they come in.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class RunContext:
    """What is known about a run before any process is launched; plugins validate against it.

    Attributes:
        world_size: Number of ranks, over all nodes.
        num_nodes: Number of nodes.
        device_type: ``"cpu"``, ``"cuda"``, …
        precision: Lightning's precision string, such as ``"bf16-mixed"``.
        sizes: Size of every mesh axis, ``"auto"`` already resolved; axes that are not in use have size 1.
        module: The user's module where it is already known, else ``None``.
        plan: The plan given to `FiveD`, if any.
        dtypes: What that precision asks of the axes.
    """

    world_size: int
    num_nodes: int
    device_type: str
    precision: str
    sizes: dict[str, int]
    module: nn.Module | None = None
    plan: ParallelPlan | None = None
    dtypes: Dtypes = Dtypes()


@dataclass(frozen=True)
class Part:
    """A piece of the module that a schedule runs on its own: a stage of a pipeline that this rank holds.

    Attributes:
        stage: Its number in the whole pipeline.
        modules: The modules whose weights are used by this part alone. Weights of the module outside all parts belong to several.
    """

    stage: int
    modules: tuple[nn.Module, ...]


class StoredForm(Protocol):
    """How ranks together store a weight that a checkpoint has in another form: in another order, padded, parts of it twice."""

    def whole_shape(self, stored: Sequence[int]) -> torch.Size:
        """The shape of the weight in a checkpoint, from that of the stored one."""

    def store(self, whole: Tensor) -> Tensor:
        """The stored weight, of all ranks together, of one from a checkpoint."""

    def restore(self, stored: Tensor) -> Tensor:
        """The reverse."""


class Parallelism(ABC):
    """One axis of parallelism as a person configures it. Subclasses are frozen dataclasses."""

    axis: ClassVar[str]
    """The name a person knows the axis by: ``"data"``, ``"tensor"``, ``"pipeline"``, ``"context"``, ``"expert"``."""

    order: ClassVar[int]
    """Position in `parallelize`: pipeline 10, tensor 20, expert 30, context 40, activation checkpointing 60, data 90 (it wraps
    last)."""

    def mesh_sizes(self) -> dict[str, Size]:
        """Sizes of the mesh axes this plugin brings, by name; ``"auto"`` takes what is left of the world."""
        return {}

    def validate(self, context: RunContext) -> list[Problem]:
        """Everything that is wrong with this plugin in this run; an empty list when nothing is."""
        return []

    def short(self) -> str:
        """As a person would write it: its first setting, and those that are not the defaults."""
        settings: list[Field[Any]] = list(fields(self))  # type: ignore[arg-type]
        written = [
            f"{setting.name}={getattr(self, setting.name)!r}"
            for index, setting in enumerate(settings)
            if not index or getattr(self, setting.name) != setting.default
        ]
        return f"{type(self).__name__}({', '.join(written)})"

    def surveyed(self, module: nn.Module, plan: ParallelPlan) -> Parallelism:
        """The plugin whose `parallelize` is called, now that the whole module is known, before any axis changes it; itself by default."""
        return self

    @abstractmethod
    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Applies the axis to the module, in place.

        Args:
            module: The user's LightningModule, on its device, with the same values on every rank.
            plan: Where the module may be cut.
            mesh: The ranks by axis.
            dtypes: What to compute and to reduce in.

        Returns:
            The axis at work, whose hooks `FiveD` calls during steps.
        """


class Parallelized:
    """One axis at work on one module. Hooks that have nothing to do inherit these empty defaults."""

    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        """Comes once, when all axes are at work on the module; inside out, so that hooks of an outer axis lie around those of others.

        Args:
            axes: All of them, this one included.
        """

    def shard_batch(self, batch: Any) -> Any:
        """Returns this rank's part of a batch that all ranks of the axis hold."""
        return batch

    def step_context(self) -> AbstractContextManager[None]:
        """A context around every step of the user, training or not; and around what backward runs again of one, see `recompute_context`."""
        return nullcontext()

    def recompute_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """What a part of a step has to run in when backward runs it again, as things are now, right before it runs first.

        It is asked in the step, and what it gives is called as often as that part runs again, each time for a context: after the step or
        inside of it, in any order with others of several microbatches. The step's own context if nothing changes within a step.
        """
        return self.step_context

    def microbatches(self, count: int) -> int:
        """How many microbatches a step has where this rank's batch can be split into so many.

        Fewer, if the rank waits inside of modules for others whose batches are smaller. It comes before each schedule, on all ranks.
        """
        return count

    def taking_back(self) -> Callable[[], None]:
        """Comes before forwards of a step that may turn out to have come too early; what it gives is called if they have.

        It takes back what the axis has counted in them: they run once more.
        """
        return lambda: None

    def recomputing_together(self) -> dist.ProcessGroup | None:
        """Ranks that wait for each other inside of modules where they may have tensors of other sizes; ``None`` if there are none.

        What of a module is kept, and what backward runs again, is decided by one of them for all: a rank that sends something once more
        while another does not would wait for ever.
        """
        return None

    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of a user's step function; an axis that has to do something around it overrides this."""
        return step(*args, **kwargs)

    def owed(self) -> Sequence[Tensor]:
        """Where backward has to start, with zeros, in a microbatch of weight zero, whose loss is not used; asked at the end of a user's step.

        There is something if other ranks, whose microbatches count, wait for this one inside of modules.
        """
        return ()

    # [Note: schedules]
    # An axis that runs a step as a schedule of microbatches, forwards and backwards of several of them in any order, does so
    # inside `scheduled` of all other axes. There the hooks around single steps and backwards (`begin_microbatch`,
    # `before_backward`, `after_backward`) do not come; `call` still does, around every call of the user's step.
    def scheduled(self, parts: Sequence[Part], *, last: bool, backward: bool) -> AbstractContextManager[None]:
        """A context around a whole schedule of microbatches; all ranks that share a part enter it together.

        Inside, gradients add up in ``grad`` of the parameters that the module shows. After it, they are where the optimizer
        finds them.

        Args:
            parts: The parts that this rank runs, in the order of their stages.
            last: Whether gradients are complete, and must be synchronised, when the schedule ends.
            backward: Whether it has backwards, or only forwards without gradients.
        """
        return nullcontext()

    def part_begins(self, stage: int) -> None:
        """Comes inside `scheduled` before each forward, backward or weight gradient of a part."""

    def part_ends(self, stage: int, *, gradients: bool = False, complete: bool = False, partly: bool = False) -> None:
        """Comes inside `scheduled` after each of them.

        Args:
            stage: The part's.
            gradients: A microbatch's gradients of the part's weights have been added up.
            complete: They were the last of this schedule.
            partly: Some of them have been added up, and the others come with a later action.
        """

    # [Note: tensors of an axis between stages]
    # What one stage of a pipeline hands to the next may be a tensor that only another axis understands: one that looks whole and holds
    # a part. It travels as a plain one, with gradients, and with a description that is agreed on once per signature of inputs. The code
    # around the blocks goes on with what it would have without stages.
    def plain_form(self, tensor: Tensor) -> tuple[Tensor, Hashable] | None:
        """A tensor subclass of this axis as a plain tensor, for another stage; ``None`` for what is not this axis's.

        Args:
            tensor: What a stage hands on, with its graph.

        Returns:
            A plain tensor, with a graph, and how it is to be read: something small that can be compared and pickled.

        Raises:
            TypeError: If it cannot be handed on.
        """
        return None

    def from_plain_form(self, plain: Tensor, form: Any) -> Tensor:
        """The reverse, on another stage; with a graph where the plain one is trained."""
        raise NotImplementedError

    def begin_microbatch(self, *, last: bool) -> None:
        """Comes before the forward of each training microbatch.

        Args:
            last: Whether gradients are complete, and must be synchronised, after this microbatch's backward.
        """

    def before_backward(self, loss: Tensor) -> Tensor:
        """Comes before each backward, innermost axis first, with the tensor it will start from; returns the one to start from."""
        return loss

    def after_backward(self) -> None:
        """Comes after each backward, innermost axis first, before anybody may look at gradients."""

    def standing_in(self) -> Iterable[Tensor]:
        """What stands for the module's parameters in graphs, where that are other tensors than those in the module now."""
        return ()

    def own_backward(self) -> AbstractContextManager[None]:
        """A context around a backward that the user's code runs by itself, with its `before_backward` and `after_backward`.

        Gradients are complete after it, also in the middle of an accumulation window: the user may read them.
        """
        return nullcontext()

    def before_optimizer_step(self) -> None:
        """Comes right before parameters change."""

    def after_optimizer_step(self) -> None:
        """Comes right after parameters have changed."""

    def finalize_gradients(self) -> None:
        """Comes once per optimizer step, after the last backward and before hooks, clipping and the step itself."""

    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        """What its own placement does not tell about who counts this parameter's gradient in a norm over all ranks.

        Returns:
            The mesh axes along which other ranks hold *other* gradients in its place: ``pp`` for weights of a stage, the axes
            that hold other experts for an expert's. Along all other axes a gradient is taken for a copy. ``None`` if this
            rank's gradient does not count at all: one of two stages that own a tied weight says so, and only one.
        """
        return ()

    def holders_of(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """The ranks, this one included, that hold the same parameter and use it for different parts of the same batch; ``None`` if alone.

        Ranks along axes that cut the batch itself, or sequences, are not meant: two stages that own a tied weight are, and the two ranks
        that hold a stage in a pipeline of two directions. What counts tokens where the parameter is, over a step, adds up over them, too.
        """
        return None

    def shares_of_work(self) -> Mapping[nn.Module, float]:
        """Which part of the operations in a module's forward is this rank's, where others do the same ones: a half of those that two ranks do.

        Modules inside of it that are not named are as it is. A sum over all ranks then has each operation of the model once.
        """
        return {}

    def optimizer_context(self) -> AbstractContextManager[None]:
        """A context around the user's `configure_optimizers`."""
        return nullcontext()

    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        """What is wrong with the user's optimizers for parameters as this axis has placed them."""
        return []

    def training_context(self, strategy: ParallelSteps) -> AbstractContextManager[None]:
        """A context around training, from `on_train_start` on.

        Args:
            strategy: Whose training it is.
        """
        return nullcontext()

    def evaluation_context(self, *, uneven: bool) -> AbstractContextManager[None]:
        """A context around a whole evaluation loop.

        Args:
            uneven: Ranks have different numbers of batches, so a step may not communicate.
        """
        return nullcontext()

    def memory(self) -> Iterable[tuple[str, Tensor]]:
        """What the axis holds beside the module's parameters, their gradients and the optimizers' states, for accounts of memory.

        Pairs of a category (``"weights"``, ``"master weights"``, ``"gradients"``, ``"communication buffers"``, ``"memory of
        other ranks"``; see `lightning_5d.memory.categories`) and a tensor whose storage is that memory, whole, also while parts of it are lent.
        """
        return ()

    def stages(self) -> Stages | None:
        """What joins the state of ranks that hold different stages of the module, for checkpoints and the like.

        An axis that cuts modules makes it before it cuts one. ``None`` where each rank holds all of the module, or shards of it.
        """
        return None

    def stored_forms(self) -> Mapping[str, StoredForm]:
        """How those weights are stored that are not as in a checkpoint, by name; a weight with several names under each."""
        return {}

    def describe(self) -> str:
        """What the axis has made of the module, for people: a table or a few lines. Empty where there is nothing to tell."""
        return ""

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """A context in which parameters are whole on every rank. All ranks enter it together."""
        yield

    def close(self) -> None:
        """Releases what the axis holds outside the module (buffers, groups)."""


def plugin_problems(plugins: Sequence[Any]) -> list[Problem]:
    """What is wrong with a set of plugins whatever the run is: strangers among them, two of one axis."""
    problems = [
        Problem(f"{plugin!r} is not a parallelism.", "Give objects such as ZeRO(stage=1).")
        for plugin in plugins
        if not isinstance(plugin, Parallelism)
    ]
    axes = [plugin.axis for plugin in plugins if isinstance(plugin, Parallelism)]
    for axis in dict.fromkeys(axes):
        if axes.count(axis) > 1:
            given = ", ".join(repr(p) for p in plugins if isinstance(p, Parallelism) and p.axis == axis)
            problems.append(Problem(f"The {axis} axis has {axes.count(axis)} plugins: {given}.", "Keep one of them."))
    return problems


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raises one error that lists every problem.

    Args:
        problems: What was found; nothing happens when it is empty.

    Raises:
        MisconfigurationException: With one numbered line per problem.
    """
    if not problems:
        return
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    head = "One setting does not work:" if len(problems) == 1 else f"{len(problems)} settings do not work:"
    raise MisconfigurationException("\n".join([head, *(f"  {i}. {p}" for i, p in enumerate(problems, 1))]))
