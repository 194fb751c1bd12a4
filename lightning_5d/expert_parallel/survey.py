"""Which modules of a model hold experts that can be spread, and which ones nearly do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from lightning_5d.expert_parallel import experts, hugging_face, own_forward
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.parallelism import Problem

_TOP_K = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
"""The names that models have for how many experts a token goes to."""


# [Note: what counts as experts]
# 1. Those of the reference decoder, `lightning_5d.expert_parallel.experts.Experts` (not one with another forward); and a module with a method ``compute_sorted(rows_SD,
#    counts_M)``: the person who wrote it says so, and computes by that. All parameters have the experts as their first dimension.
# 2. What transformers' decorator has made, see `hugging_face`.
# 3. A module named ``experts``, or of a class named ``…Experts`` (not shared ones, which all tokens go through), whose forward takes three tensors and whose weights are stacked. Its own
#    forward computes, see `own_forward`; that this fits is looked at before.
# Names are asked for in the third case because an attention over heads, forward(query, key, value) with weights (H, D, D), looks the same.
def found_experts(root: nn.Module) -> list[FoundExperts]:
    """All submodules that hold the experts of a layer and can be spread, in the order of the module's."""
    return [each for each in _surveyed(root) if isinstance(each, FoundExperts)]


def first_names(root: nn.Module, found: Iterable[FoundExperts]) -> dict[str, str]:
    """The name of each of these experts, by every name that it has in a module: layers may share them."""
    names = {id(each.module): each.name for each in found}
    every = root.named_modules(remove_duplicate=False)
    return {name: names[id(module)] for name, module in every if id(module) in names}


def near_misses(root: nn.Module) -> list[Problem]:
    """Submodules that hold experts, too, but in a way that cannot be spread: which, why, and what works."""
    problems = []
    for each in _surveyed(root):
        if isinstance(each, Problem):
            problems.append(each)
        elif own_forward.is_anybodys(each) and (problem := own_forward.disagreement(each)) is not None:
            problems.append(problem)
    return problems


def _surveyed(root: nn.Module) -> Iterator[FoundExperts | Problem]:
    seen: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(outer) for outer in seen):
            continue
        found = _looked_at(root, name, module)
        if found is not None:
            # What is inside of experts is no layer of its own.
            seen.append(f"{name}.")
            yield found


def _looked_at(root: nn.Module, name: str, module: nn.Module) -> FoundExperts | Problem | None:
    last = name.rpartition(".")[2]
    called = type(module).__name__
    found: FoundExperts | str
    if experts.is_plain(module):
        found = experts.described(name, module)
    elif callable(getattr(module, "compute_sorted", None)):
        found = own_forward.described(name, module, _top_k(root, name, module))
    elif hugging_face.is_hugging_face(module):
        found = _adapters(root, name) or hugging_face.described(name, module, _top_k(root, name, module))
    elif "shared" in last or (last != "experts" and not called.endswith("Experts")):
        return None
    elif isinstance(module, nn.ModuleList | nn.ModuleDict):
        inside = [child for child in module.children() if next(child.parameters(), None) is not None]
        if len(inside) < 2:
            return None
        kind = "ModuleDict" if isinstance(module, nn.ModuleDict) else "ModuleList"
        found = f"is a {kind} of {len(inside)} modules"
    elif next(module.parameters(), None) is None:
        return None
    else:
        found = own_forward.described(name, module, _top_k(root, name, module))
    if isinstance(found, FoundExperts):
        return found
    return Problem(
        f"The experts {name} ({called}) cannot be spread over ranks: it {found}.",
        "Leave ExpertParallel out, or keep them as one module with stacked weights, such as gate_up_proj (experts, 2 * inner, hidden) and down_proj"
        " (experts, hidden, inner), called as experts(hidden, index, weights).",
    )


def _adapters(root: nn.Module, name: str) -> str | None:
    """PEFT computes adapters of stacked weights as a change to all of them."""
    outer, _, last = name.rpartition(".")
    if last != "base_layer" or not any(
        key.startswith("lora_") for key, _ in root.get_submodule(outer).named_children()
    ):
        return None
    return "has adapters on stacked weights, which are computed for all experts at once"


def _top_k(root: nn.Module, name: str, module: nn.Module) -> int | None:
    """Experts that each token is sent to: what the layer or its router says, else the model's config."""
    layer = root.get_submodule(name.rpartition(".")[0]) if name else root
    routers = [child for key, child in layer.named_children() if "gate" in key or "router" in key]
    for holder in (module, layer, *routers, getattr(module, "config", None), getattr(layer, "config", None)):
        for key in _TOP_K:
            value = getattr(holder, key, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
