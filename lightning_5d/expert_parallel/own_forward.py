"""Experts of anybody's, whose own forward computes rows that are sorted by expert: one choice per row, with weight one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_5d.expert_parallel.dispatch import through_experts
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.parallelism import Problem

_ROWS = 8
_EXPERTS = 4


def described(name: str, module: nn.Module, top_k: int | None) -> FoundExperts | str:
    """A module as this package knows experts, or why it cannot be one.

    Args:
        name: Its name in the whole module.
        module: One with stacked weights, called as ``experts(hidden, index, weights)``.
        top_k: Experts that each token is sent to.
    """
    if (taken := _arguments(module)) is not None:
        return f"is called with {taken}, not with hidden states, the experts of each and their weights"
    own = dict(module.named_parameters())
    if inner := [key for key in own if "." in key]:
        return f"holds weights in modules inside of it ({inner[0]})"
    if not own:
        return "has no weights"
    sizes = {parameter.shape[:1] for parameter in own.values()}
    if len(sizes) != 1 or any(parameter.ndim < 2 for parameter in own.values()):
        shapes = ", ".join(f"{key} {tuple(parameter.shape)}" for key, parameter in own.items())
        return f"has weights whose first dimensions are not all its experts ({shapes})"
    if buffers := [key for key, _ in module.named_buffers()]:
        return f"has buffers ({', '.join(buffers)}), of which nothing tells whether they are of one expert each"
    sorted_by_expert = callable(getattr(module, "compute_sorted", None))
    count = next(iter(own.values())).shape[0]
    how = _by_method if sorted_by_expert else compute
    return FoundExperts(name, module, count, top_k, tuple(own), how, may_draw=True)


def is_anybodys(found: FoundExperts) -> bool:
    """Whether a module is one that `described` knows."""
    return found.compute in (compute, _by_method)


def compute(module: nn.Module, rows_SD: Tensor, counts_M: Tensor) -> Tensor:
    """What a module makes of rows by its own forward.

    Args:
        module: Experts, with the weights of M of them.
        rows_SD: Rows sorted by expert.
        counts_M: Rows of each, on the CPU.

    Returns:
        (S, D).
    """
    count, device = len(counts_M), rows_SD.device
    index_S = torch.repeat_interleave(torch.arange(count), counts_M, output_size=len(rows_SD)).to(device)
    with _counting(module, count):
        # Not `module.forward`, which sends tokens to other ranks while an axis is at work.
        out: Tensor = type(module).forward(module, rows_SD, index_S[:, None], rows_SD.new_ones(len(rows_SD), 1))
    return _taking_part(out, module, rows_SD)


def disagreement(found: FoundExperts) -> Problem | None:
    """What is wrong with a module that cannot be computed as this package does.

    Its forward has to make the same of rows when it has half of its experts, and the weighted sum of that of rows with several experts. Weights on the
    meta device are tried with values of no meaning.
    """
    total = found.count
    if total < 2:
        return None
    if any(parameter.is_meta for parameter in found.module.parameters()):
        found = _with_values(found)
    module, own = found.module, dict(found.module.named_parameters())
    weight = next(iter(own.values()))
    width = next((size for size in _widths(own) if _runs(found, size)), None)
    what = f"The experts {found.name} ({type(module).__name__}) cannot be spread over ranks: "
    fix = (
        "Give the class a method compute_sorted(rows, counts) that computes, of rows sorted by expert and numbers of rows for each, what the experts"
        " that its present weights are make of them."
    )
    if width is None:
        return Problem(f"{what}its forward does not run with half of its {total} experts.", fix)
    rows = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    index = torch.arange(_ROWS) % found.count
    order = torch.argsort(index, stable=True)
    rows, counts = rows[order.to(weight.device)], torch.bincount(index, minlength=found.count)
    half = found.count // 2
    split = int(counts[:half].sum())
    with _quiet(module):
        try:
            whole = found.compute(module, rows, counts)
            halves = (rows[:split], counts[:half], 0), (rows[split:], counts[half:], half)
            parts = torch.cat([_part(found, *part) for part in halves])
        except Exception as error:  # anybody's code
            return Problem(
                f"{what}its forward does not run with rows of one expert each ({type(error).__name__}: {error}).", fix
            )
        rounding = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 3e-2
        if not torch.allclose(whole, parts, rounding, rounding * float(whole.abs().max())):
            return Problem(
                f"{what}with half of its {total} experts its forward computes other values for the same rows.",
                f"Let it take its arguments in this order: forward(hidden, index, weights). If it does: {fix[0].lower()}{fix[1:]}",
            )
        difference = _of_the_sum(found, rows, rounding)
    if difference is None:
        return None
    return Problem(
        f"{what}{difference}.",
        "Let forward(hidden, index, weights) return, for each row, the sum of weights[:, k] times what expert index[:, k] makes of it, and leave"
        " everything else (scaled inputs, normalised weights, a residual, auxiliary outputs) to the code around it.",
    )


def _with_values(found: FoundExperts) -> FoundExperts:
    """The same layer with a few experts, on the CPU: a large one need not fit there, and what does for half of its experts does for some."""
    module, count = found.module, min(found.count, _EXPERTS)
    generator = torch.Generator().manual_seed(0)
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    if vars(module).get("num_experts") == found.count:
        twin.num_experts = count  # type: ignore[assignment]
    weights = {}
    for key, parameter in module.named_parameters():
        values = torch.randn(count, *parameter.shape[1:], generator=generator) * parameter.shape[-1] ** -0.5
        weights[key] = nn.Parameter(values.to(parameter.dtype))
    object.__setattr__(twin, "_parameters", weights)
    return replace(found, module=twin, count=count)


def _of_the_sum(found: FoundExperts, rows: Tensor, rounding: float) -> str | None:
    """What a forward makes of choices with weights, if it is not the weighted sum of what experts make of rows."""
    generator = torch.Generator().manual_seed(1)
    error: Exception | None = None
    for choices in dict.fromkeys((min(found.top_k or 2, found.count), 1)):
        index = (torch.arange(len(rows))[:, None] + torch.arange(choices)) % found.count
        index = index.to(rows.device)
        weights = (0.25 + 0.5 * torch.rand(index.shape, generator=generator)).to(rows.device, rows.dtype)
        try:
            theirs = type(found.module).forward(found.module, rows, index, weights)
        except Exception as raised:
            error = raised
            continue
        if not isinstance(theirs, Tensor) or theirs.shape != rows.shape:
            returned = tuple(theirs.shape) if isinstance(theirs, Tensor) else f"a {type(theirs).__name__}"
            return f"of rows {tuple(rows.shape)} its forward returns {returned}"
        ours = through_experts(rows, index, weights, found.count, partial(found.compute, found.module))
        if torch.allclose(theirs, ours, rounding, rounding * float(ours.abs().max())):
            return None
        return "its forward does not return the sum of what its experts make of a row, each times its weight"
    return (
        f"its forward does not run with rows, the experts of each and their weights ({type(error).__name__}: {error})"
    )


def _part(found: FoundExperts, rows: Tensor, counts: Tensor, first: int) -> Tensor:
    weights = {key: p.detach()[first : first + len(counts)] for key, p in found.module.named_parameters()}
    out: Tensor = functional_call(_Computing(found), {f"module.{key}": w for key, w in weights.items()}, (rows, counts))
    return out


def _runs(found: FoundExperts, width: int) -> bool:
    weight = next(found.module.parameters())
    half = found.count // 2
    counts = torch.bincount(torch.arange(_ROWS) % half, minlength=half)
    rows = weight.detach().new_zeros(_ROWS, width)
    try:
        with _quiet(found.module):
            part = _part(found, rows, counts, 0)
    except Exception:  # anybody's code
        return False
    return isinstance(part, Tensor) and part.shape == rows.shape


def _widths(own: Mapping[str, Tensor]) -> list[int]:
    return list(dict.fromkeys(size for parameter in own.values() for size in parameter.shape[1:]))


class _Computing(nn.Module):
    def __init__(self, found: FoundExperts) -> None:
        super().__init__()
        self.module, self.compute = found.module, found.compute

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.compute(self.module, rows, counts)


def _taking_part(out_SD: Tensor, module: nn.Module, rows_SD: Tensor) -> Tensor:
    """What has been made of rows; of none, with the graph that it may lack: other ranks wait for gradients of these."""
    if len(rows_SD):
        return out_SD
    taking: Tensor = _TakesPart.apply(out_SD, rows_SD, *module.parameters())  # type: ignore[no-untyped-call]
    return taking


class _TakesPart(torch.autograd.Function):
    """Its first argument; the others get zeros as gradients, so that whoever waits for them gets something."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, out: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return out.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        others = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad[1:]  # type: ignore[attr-defined]
        return grad, *(torch.zeros_like(x) if w else None for x, w in zip(others, wanted, strict=True))


def _by_method(module: nn.Module, rows_SD: Tensor, counts_M: Tensor) -> Tensor:
    out: Tensor = module.compute_sorted(rows_SD, counts_M)  # type: ignore[operator]
    return _taking_part(out, module, rows_SD)


@contextmanager
def _counting(module: nn.Module, count: int) -> Iterator[None]:
    """A context in which a module that knows how many experts it has, knows of those that are here."""
    whole = vars(module).get("num_experts")
    if not isinstance(whole, int) or whole == count:
        yield
        return
    module.num_experts = count  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_experts = whole  # type: ignore[assignment]


@contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """A context without gradients and without random numbers, that leaves no trace."""
    training = {inner: inner.training for inner in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for inner, mode in training.items():
            inner.training = mode


def _arguments(module: nn.Module) -> str | None:
    """``None`` if a module is called with three things, else what it is called with."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return None if len(positional) == 3 and not needed else f"({', '.join([*positional, *needed])})"
