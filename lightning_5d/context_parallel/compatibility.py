"""What a module has that a context axis cannot do, as far as that is known before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_5d.context_parallel.heads import heads_problem
from lightning_5d.context_parallel.hugging_face_models import hugging_face_problems
from lightning_5d.parallelism import Problem
from lightning_5d.tensor_parallel.heads import KV_HEADS, QUERY_HEADS

if TYPE_CHECKING:
    from lightning_5d.context_parallel.context import ContextParallel


def module_problems(module: nn.Module, plugin: ContextParallel, tensor: int = 1) -> list[Problem]:
    """What keeps a module from computing on parts of sequences.

    Args:
        module: The user's module.
        plugin: The settings.
        tensor: Ranks of the tensor axis, which share the heads already.
    """
    problems = hugging_face_problems(module)
    ranks = plugin.size if plugin.method == "ulysses" else plugin.ulysses
    if ranks == 1:
        return problems
    for name, heads, kv in _configured_heads(module):
        if heads % tensor or not heads // tensor or (kv % tensor and tensor % kv):
            continue  # the tensor axis says so
        problem = heads_problem(heads // tensor, max(1, kv // tensor), ranks)
        if problem is not None:
            problems.append(Problem(f"{name}: {problem.what}", problem.fix))
    return problems


def _configured_heads(module: nn.Module) -> list[tuple[str, int, int]]:
    """Query heads, and key and value heads, that configs of models inside of the module name, each pair once."""
    found: dict[tuple[int, int], str] = {}
    for name, inner in module.named_modules():
        config = getattr(inner, "config", None)
        heads = _number(config, QUERY_HEADS)
        if heads:
            found.setdefault((heads, _number(config, KV_HEADS) or heads), name or type(inner).__name__)
    return [(name, heads, kv) for (heads, kv), name in found.items()]


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
