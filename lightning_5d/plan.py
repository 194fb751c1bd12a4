"""Where a model may be cut: its blocks, and its layers on the tensor axis; found or given."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ParallelPlan:
    """Where a model may be cut.

    Attributes:
        blocks: Fully-qualified names of the repeated blocks, in the order they run; ``*`` stands for one or more
            characters without a dot, as in ``"model.layers.*"``. Found by itself when empty.
        source: Where the blocks came from, for messages; ``"automatic"`` if nobody chose them.
        before: Modules that run before the blocks, where the order of registration says otherwise. One that is named in
            `after` too runs on both sides of them.
        after: Modules that run after the blocks.
        tensor: What becomes of modules on the tensor axis, ``{pattern: style}``, as in ``{"layers.*.mlp.up": "colwise",
            "layers.*.mlp.down": "rowwise"}``. Patterns are those of `blocks`; styles are listed in
            `lightning_5d.tensor_parallel.styles`. The model's own when empty.
        tensor_source: Where those came from, for messages.
    """

    blocks: tuple[str, ...] = ()
    source: str = "given"
    options: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    tensor_source: str = "given"

    def __post_init__(self) -> None:
        for name in ("blocks", "before", "after"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    @property
    def chosen(self) -> bool:
        """Whether a person chose the blocks, and not `find_blocks`."""
        return self.source != "automatic"

    def block_names(self, module: nn.Module) -> list[str]:
        """Names of the module's blocks, in module order.

        Raises:
            ValueError: If a pattern matches no submodule with parameters.
        """
        patterns = [name_pattern(text) for text in self.blocks]
        hits: Counter[str] = Counter()
        names = []
        for name, _ in module.named_modules():
            for text, pattern in zip(self.blocks, patterns, strict=True):
                if pattern.fullmatch(name):
                    hits[text] += 1
                    names.append(name)
                    break
        missing = [text for text in self.blocks if not hits[text]]
        if missing:
            lists = sorted({re.sub(r"\.\d+$", ".*", n) for n, _ in module.named_modules() if re.search(r"\.\d+$", n)})
            raise ValueError(
                f"The plan ({self.source}) names blocks that the module does not have: {', '.join(missing)}."
                f" Lists in the module: {', '.join(lists) or 'none'}."
            )
        return names


def name_pattern(text: str) -> re.Pattern[str]:
    """Matches the fully-qualified names that a pattern of a plan stands for; ``*`` is one or more characters without a dot."""
    return re.compile(re.escape(text).replace(r"\*", "[^.]+"))


def find_plan(module: nn.Module, given: ParallelPlan | None = None) -> ParallelPlan:
    """Finds the plan of a module.

    Blocks are those of the first that names some: `given`, the module's ``parallel_plan()``, the ``parallel_plan`` of a model
    inside of it, and `find_blocks`. Styles of the tensor axis are those of the first that has some: `given`, the module's
    ``parallel_plan()``, and the models inside of it, each with its ``parallel_plan`` or what Hugging Face's models have in
    its place (``_tp_plan``, and the config's ``base_model_tp_plan``). Where a model is plain data, a ``parallel_plan`` may be
    a mapping, of styles alone.

    Args:
        module: The user's LightningModule.
        given: A plan from a plugin's argument.

    Raises:
        TypeError: If something called ``parallel_plan`` is not a `ParallelPlan`, nor such a mapping.
    """
    plans = [*([] if given is None else [given]), *_plans_inside(module)]
    with_blocks = next((plan for plan in plans if plan.blocks or plan.before or plan.after), None)
    plan = with_blocks or (plans[0] if plans else ParallelPlan(source="automatic"))
    if not plan.blocks:
        plan = replace(plan, blocks=tuple(find_blocks(module)), source="automatic")
    styles, source = _styles(module, given)
    return replace(plan, tensor=styles, tensor_source=source)


def find_styles(module: nn.Module) -> dict[str, str]:
    """The styles of the tensor axis that a module's own plans name, to start a plan of one's own from.

    As in ``ParallelPlan(tensor={**find_styles(module), "model.lm_head": "replicate"})``.
    """
    return dict(_styles(module, None)[0])


def _styles(module: nn.Module, given: ParallelPlan | None) -> tuple[Mapping[str, str], str]:
    if given is not None and given.tensor:
        return given.tensor, given.tensor_source
    own = _own_plan(module, "")
    if own is not None and own.tensor:
        return own.tensor, own.tensor_source
    styles: dict[str, str] = {}
    sources: dict[str, None] = {}
    for name, model in _outermost(module, _has_styles):
        plan = _own_plan(model, name)
        found, source = (plan.tensor, plan.tensor_source) if plan else _hugging_face_styles(model, name)
        styles |= found
        sources[source] = None
    return styles, ", ".join(sources) or "none"


def _plans_inside(module: nn.Module) -> list[ParallelPlan]:
    """The module's own plan, and those of models inside of it, with names as the module has them."""
    found = _outermost(module, lambda model: _has(model, "parallel_plan"))
    return [plan for name, model in [("", module), *found] if (plan := _own_plan(model, name)) is not None]


def _own_plan(owner: nn.Module, name: str) -> ParallelPlan | None:
    found = getattr(owner, "parallel_plan", None) if _has(owner, "parallel_plan") else None
    if found is None:
        return None
    plan = found() if callable(found) else found
    where = f"{type(owner).__name__}.parallel_plan"
    if isinstance(plan, Mapping):
        plan = ParallelPlan(tensor=plan)
    if not isinstance(plan, ParallelPlan):
        raise TypeError(
            f"{where} is a {type(plan).__name__}; it must be, or return, a ParallelPlan or a mapping of patterns to styles."
        )
    prefix = f"{name}." if name else ""
    blocks, before, after = (tuple(prefix + n for n in names) for names in (plan.blocks, plan.before, plan.after))
    tensor = {prefix + pattern: style for pattern, style in plan.tensor.items()}
    return ParallelPlan(blocks, where, plan.options, before, after, tensor, where)


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """Modules below this one that are wanted, without those inside another such."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules():
        if name and not any(name.startswith(f"{outer}.") for outer, _ in found) and wanted(child):
            found.append((name, child))
    return found


def _has_styles(model: nn.Module) -> bool:
    if _has(model, "parallel_plan"):
        plan = _own_plan(model, "")
        return plan is not None and bool(plan.tensor)
    return bool(_hugging_face_styles(model, "")[0])


def _has(owner: nn.Module, attribute: str) -> bool:
    """Whether an object itself has an attribute; wrappers such as compiled modules answer for what they hold as well."""
    return inspect.getattr_static(owner, attribute, None) is not None


def _hugging_face_styles(model: nn.Module, name: str) -> tuple[dict[str, str], str]:
    """Styles as a model of transformers carries them; they are read and nothing of that library is needed.

    Checked with transformers 5.24: a model's ``_tp_plan`` holds its class's, those of its children and, under the name of its
    base model, the config's. Before a model's ``post_init`` it is the class's alone. Patterns for modules that a size of
    the model does not have are part of every such plan, and left out here.
    """
    if not (_has(model, "_tp_plan") or _has(model, "base_model_prefix")):
        return {}, ""
    styles: dict[str, str] = {}
    if "_tp_plan" not in vars(model):
        base = getattr(model, "base_model_prefix", "")
        prefix = f"{base}." if base and isinstance(model._modules.get(base), nn.Module) else ""
        config = getattr(model, "config", None)
        styles |= {
            prefix + pattern: style for pattern, style in (getattr(config, "base_model_tp_plan", None) or {}).items()
        }
    styles |= getattr(model, "_tp_plan", None) or {}
    names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters(remove_duplicate=False)]
    present = {pattern: style for pattern, style in styles.items() if any(map(name_pattern(pattern).fullmatch, names))}
    outer = f"{name}." if name else ""
    return {outer + pattern: style for pattern, style in present.items()}, f"{type(model).__name__}._tp_plan"


def find_blocks(module: nn.Module) -> list[str]:
    """Names of the repeated blocks of a module, in module order.

    A block is a child of a `ModuleList` or `Sequential` that holds at least two children of its class with parameters, and
    is not inside another block. Encoder and decoder lists are both found.
    """
    blocks: list[str] = []
    for name, container in module.named_modules():
        if any(name == block or name.startswith(block + ".") for block in blocks):
            continue
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        children = [
            (child_name, child)
            for child_name, child in container.named_children()
            if any(True for _ in child.parameters())
        ]
        counts = Counter(type(child) for _, child in children)
        if not counts:
            continue
        kind, count = counts.most_common(1)[0]
        if count < 2 or issubclass(kind, nn.ModuleList | nn.ModuleDict):
            continue
        prefix = f"{name}." if name else ""
        blocks += [prefix + child_name for child_name, child in children if type(child) is kind]
    return blocks
