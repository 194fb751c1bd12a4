"""Activation checkpointing: which modules throw their activations away and compute them again in backward."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from typing_extensions import override

from lightning_5d.absent import Absent
from lightning_5d.memory_budget import BudgetKeeping, MemoryBudget
from lightning_5d.names import plain_name
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext
from lightning_5d.plan import ParallelPlan, find_plan
from lightning_5d.recomputation import KEEP_INPUTS, CheckpointedForward, Context, Keeping, Rerun
from lightning_5d.recompute_contexts import RecomputeContexts
from lightning_5d.saved_activations import Agree, Measured, first_of, measure
from lightning_5d.saved_operations import DEFAULT, GROUPS, ChosenOperations, SavedOperations, operations, unknown

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_5d.mesh import ParallelMesh

MODES = ("full", "selective", "budget")


@dataclass(frozen=True)
class ActivationCheckpointing(Parallelism):
    """Saves memory for time: activations inside the chosen modules are computed again in backward.

    ```python
    FiveD(ZeRO(stage=3), activation_checkpointing="full")                # each block keeps its input only
    FiveD(ZeRO(stage=3), activation_checkpointing="selective")           # and what matmuls and attention return
    FiveD(ZeRO(stage=3), activation_checkpointing=0.5)                   # half of the bytes, whatever is best kept
    FiveD(activation_checkpointing=ActivationCheckpointing(every=2))     # every second block
    FiveD(activation_checkpointing=ActivationCheckpointing(modules=["*.mlp"]))
    ```

    Gradients, random numbers, buffers and names are those of a run without it.

    Args:
        mode: ``"full"``, ``"selective"`` or ``"budget"``.
        every: Of the chosen modules every n-th is checkpointed, the first one included.
        modules: Names of modules instead of the plan's blocks, with ``*`` for any characters: ``"*.mlp"``.
        save: Selective only: operations whose results are kept, as names of groups (``"matmul"``, ``"attention"``,
            ``"convolution"``, ``"collectives"``) or of single operations (``"aten.mm"``, ``"mylib::my_op"``). Matmul, attention
            and collectives if ``None``.
        memory_budget: Budget only: the share, 0 to 1, of the bytes that the modules save without checkpointing. Inputs are
            kept in any case, so a budget below their share comes out as ``"full"``.
    """

    # Not an axis of the mesh: it has no sizes. Its place in the order, and everything else it needs, is a plugin's.
    axis: ClassVar[str] = "activation checkpointing"
    order: ClassVar[int] = 60

    mode: str = "full"
    every: int = 1
    modules: tuple[str, ...] = ()
    save: tuple[str, ...] | None = None
    memory_budget: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", _names(self.modules))
        if self.save is not None:
            object.__setattr__(self, "save", _names(self.save))
        if self.memory_budget is not None and self.mode == "full":
            object.__setattr__(self, "mode", "budget")

    @override
    def validate(self, context: RunContext) -> list[Problem]:
        """Checks the options, and where the module is known, that it has what they name."""
        problems = list(self._problems())
        if context.module is not None and not problems:
            problems += module_problems(self, context.module, context.plan)
        return problems

    @override
    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Gives the chosen modules another forward."""
        return Checkpointed(module, self, plan)

    def _problems(self) -> Iterator[Problem]:
        me = "ActivationCheckpointing"
        if self.mode not in MODES:
            yield Problem(f"{me}(mode={self.mode!r}) is unknown.", f"Use one of {', '.join(MODES)}.")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            yield Problem(f"{me}(every={self.every!r}) is not a whole number of at least 1.", "Use 1 for each block.")
        if any(not isinstance(pattern, str) or not pattern for pattern in self.modules):
            yield Problem(
                f"{me}(modules={self.modules!r}) has entries that are not names.", 'Use names such as "*.mlp".'
            )
        if self.save is not None:
            if self.mode in ("full", "budget"):
                yield Problem(
                    f"{me}(mode={self.mode!r}, save={self.save!r}): only the selective mode keeps chosen operations.",
                    'Use mode="selective", or leave save out.',
                )
            for name, close in unknown(self.save).items():
                yield Problem(
                    f"{me}(save={self.save!r}): there is no operation {name!r}.",
                    f"Did you mean {close!r}? Groups are {', '.join(GROUPS)}.",
                )
            if not self.save:
                yield Problem(f"{me}(save=()) keeps nothing.", 'Use mode="full" for that.')
        budget = self.memory_budget
        if self.mode == "budget" and budget is None:
            yield Problem(f'{me}(mode="budget") has no memory_budget.', "Give a share from 0 to 1, such as 0.5.")
        if budget is not None and self.mode == "selective":
            yield Problem(
                f"{me}(mode='selective', memory_budget={budget!r}): a budget chooses operations itself.",
                'Use mode="budget", or leave memory_budget out.',
            )
        if budget is not None and not (_is_number(budget) and 0 <= budget <= 1):
            nearest = min(max(float(budget), 0.0), 1.0) if _is_number(budget) and budget == budget else 0.5
            yield Problem(f"{me}(memory_budget={budget!r}) is not a share from 0 to 1.", f"The nearest is {nearest:g}.")


class Checkpointed(Parallelized):
    """Activation checkpointing at work on one module.

    Attributes:
        names: The modules that are checkpointed.
        budget: What is kept under a memory budget, and of how much; ``None`` in other modes.
    """

    def __init__(self, module: nn.Module, options: ActivationCheckpointing, plan: ParallelPlan) -> None:
        self._module = module
        self.names = units(module, options, plan)
        self.budget = MemoryBudget(float(options.memory_budget or 0.0)) if options.mode == "budget" else None
        self._told = False
        self._contexts = RecomputeContexts()
        self._together: list[dist.ProcessGroup] = []
        self._forwards: list[CheckpointedForward] = []
        for name in self.names:
            unit = module.get_submodule(name)
            keeping: Keeping = InputKeeping()
            if self.budget is not None:
                keeping = BudgetKeeping(unit, self.budget)
            elif options.mode == "selective":
                keeping = SelectiveKeeping(unit, SavedOperations(options.save or DEFAULT))
            forward = CheckpointedForward(unit, keeping, self._around, self._agree)
            unit.__dict__["forward"] = forward
            self._forwards.append(forward)
        configs: Iterator[Any] = (getattr(inner, "config", None) for inner in module.modules())
        self._caching: dict[int, Any] = {
            id(config): config for config in configs if getattr(config, "use_cache", None) is True
        }

    @contextmanager
    @override
    def step_context(self) -> Iterator[None]:
        # Models in the manner of Hugging Face fill a key/value cache in training too, if nobody stops them.
        if not self._module.training or not torch.is_grad_enabled():
            yield
            return
        for config in self._caching.values():
            config.use_cache = False
        try:
            yield
        finally:
            for config in self._caching.values():
                config.use_cache = True

    @override
    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        self._contexts = RecomputeContexts([axis for axis in axes if axis is not self])
        together = [axis.recomputing_together() for axis in axes]
        self._together = [group for group in together if group is not None]

    @override
    def after_backward(self) -> None:
        budget = self.budget
        if budget is None or self._told or not budget.saved:
            return
        self._told = True
        if budget.kept > budget.share * budget.saved:
            rank_zero_warn(
                f"memory_budget={budget.share:g} of {budget.saved:,} bytes of activations cannot be kept: the inputs of"
                f" the checkpointed modules alone are {budget.kept:,} bytes, a share of {budget.kept / budget.saved:.3f}."
            )

    @override
    def close(self) -> None:
        for forward in self._forwards:
            restore(forward.module)
        self._forwards.clear()

    def _around(self) -> Context:
        return self._contexts.now()

    def _agree(self, measured: Measured) -> Measured:
        return first_of(self._together, measured)


class InputKeeping:
    """Inputs only: the mode ``"full"``."""

    def policy(self, rerun: Rerun, agree: Agree) -> Any:
        """The policy for one call."""
        return KEEP_INPUTS

    def traced(self) -> Any:
        """The policy under `torch.compile`."""
        return KEEP_INPUTS


class SelectiveKeeping:
    """Inputs and the results of chosen operations.

    The first call is measured, to leave out results that no backward needs (of a last matmul, whose result is only added)
    and those that are written to later.
    """

    def __init__(self, module: nn.Module, saved: SavedOperations) -> None:
        self._module, self._saved = module, saved
        self._keys: frozenset[tuple[str, int]] | None = None

    def policy(self, rerun: Rerun, agree: Agree) -> Any:
        """The policy for one call."""
        if self._keys is None:
            chosen = {str(operation) for operation in operations(self._saved.names)}
            with rerun() as (run, inputs):
                found = agree(measure(run, inputs, self._module)).operations
            self._keys = frozenset(operation.key for operation in found if operation.key[0] in chosen)
        return ChosenOperations(self._keys) if self._keys else KEEP_INPUTS

    def traced(self) -> Any:
        """The policy under `torch.compile`, which finds out by itself what backward needs."""
        return self._saved


def activation_checkpointing_of(given: Any) -> tuple[list[ActivationCheckpointing], list[Problem]]:
    """What a person may write for `FiveD(activation_checkpointing=…)`, as plugins: one or none.

    Args:
        given: ``None`` or False; True or a mode; a memory budget; the options by name; or the object itself.

    Returns:
        The plugin, and what is wrong with what was given.
    """
    if given is None or given is False:
        return [], []
    if isinstance(given, ActivationCheckpointing):
        return [given], []
    if given is True:
        return [ActivationCheckpointing()], []
    if isinstance(given, str):
        return [ActivationCheckpointing(mode=given)], []
    if isinstance(given, int | float):
        return [ActivationCheckpointing(memory_budget=given)], []
    fix = f"Give a mode ({', '.join(MODES)}), a memory budget from 0 to 1, or ActivationCheckpointing(...)."
    if not isinstance(given, Mapping):
        return [], [Problem(f"activation_checkpointing={given!r} is a {type(given).__name__}.", fix)]
    known = [field.name for field in fields(ActivationCheckpointing)]
    strange = [str(key) for key in given if key not in known]
    if strange:
        what = f"activation_checkpointing={dict(given)!r} has options that do not exist: {', '.join(strange)}."
        return [], [Problem(what, f"There are {', '.join(known)}.")]
    return [ActivationCheckpointing(**given)], []


def units(module: nn.Module, options: ActivationCheckpointing, plan: ParallelPlan) -> list[str]:
    """Names of the modules to checkpoint, in module order: innermost blocks, or outermost matches of the patterns."""
    blocks = plan.block_names(module)
    if options.modules:
        patterns = [_pattern(pattern) for pattern in options.modules]
        chosen: list[str] = []
        for name, _ in module.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in chosen)
            # Around a block there would be gathers inside of what is run again.
            around = not name or any(block.startswith(f"{name}.") for block in blocks)
            if not inside and not around and any(pattern.fullmatch(plain_name(name)) for pattern in patterns):
                chosen.append(name)
    else:
        chosen = [name for name in blocks if not any(other.startswith(f"{name}.") for other in blocks)]
    # Counted in the whole model, so that a pipeline changes nothing; what it has left of other stages' blocks has no weights.
    chosen = chosen[:: options.every]
    return [name for name in chosen if not isinstance(module.get_submodule(name), Absent)]


def module_problems(options: ActivationCheckpointing, module: nn.Module, given: ParallelPlan | None) -> list[Problem]:
    """What a module lacks for these options, or does already by itself."""
    try:
        plan = find_plan(module, given)
        blocks = plan.block_names(module)
    except (TypeError, ValueError) as error:
        return [Problem(f"Activation checkpointing has no plan: {error}", "Give FiveD(plan=ParallelPlan([...])).")]
    problems = []
    names = [plain_name(name) for name, _ in module.named_modules() if name]
    for pattern in options.modules:
        hits = [name for name in names if _pattern(pattern).fullmatch(name)]
        if not hits:
            ends = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
            problems.append(
                Problem(
                    f"ActivationCheckpointing(modules=[{pattern!r}]) matches no module of {type(module).__name__}.",
                    f"Names end in {', '.join(ends[:12])}{', …' if len(ends) > 12 else ''}.",
                )
            )
        elif all(any(plain_name(block).startswith(f"{name}.") for block in blocks) for name in hits):
            problems.append(
                Problem(
                    f"ActivationCheckpointing(modules=[{pattern!r}]) matches only {hits[0]}, which contains whole blocks.",
                    "Leave modules out to checkpoint each block, or name modules inside of them.",
                )
            )
    if not options.modules and not blocks:
        problems.append(
            Problem(
                f"Activation checkpointing found no blocks in {type(module).__name__}: no list of modules of one class.",
                'Name modules, as in ActivationCheckpointing(modules=["*.mlp"]), or give FiveD(plan=ParallelPlan([...])).',
            )
        )
    if problems:
        return problems
    own = [n for n, m in module.named_modules() if getattr(m, "gradient_checkpointing", None) is True]
    own += [n for n, m in module.named_modules() if isinstance(m, CheckpointWrapper)]
    if own:
        problems.append(
            Problem(
                f"{own[0] or type(module).__name__} already recomputes its activations ({len(own)} modules do); twice costs time"
                " and saves nothing.",
                "Call gradient_checkpointing_disable() on the model, or leave activation_checkpointing out.",
            )
        )
    if options.mode == "budget":
        compiled = [name for name in units(module, options, plan) if _is_compiled(module.get_submodule(name))]
        if compiled:
            problems.append(
                Problem(
                    f"memory_budget={options.memory_budget} cannot be measured in {compiled[0]}, which is compiled.",
                    f"Set torch._functorch.config.activation_memory_budget = {options.memory_budget} and leave"
                    ' activation_checkpointing out, or use "full" or "selective".',
                )
            )
    return problems


def restore(module: nn.Module) -> None:
    """Gives checkpointed modules inside a module their own forward back."""
    for inner in module.modules():
        forward = inner.__dict__.get("forward")
        if isinstance(forward, CheckpointedForward):
            del inner.__dict__["forward"]
            if forward.previous is not None:
                inner.__dict__["forward"] = forward.previous


def _is_compiled(module: nn.Module) -> bool:
    return any(
        isinstance(inner, torch._dynamo.OptimizedModule) or inner._compiled_call_impl is not None
        for inner in module.modules()
    )


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


def _names(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
