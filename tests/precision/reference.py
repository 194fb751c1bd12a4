"""One process by hand, in plain torch: fp32 masters, 16-bit copies of them, a loss scale. No Lightning, no `lightning_5d`."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.modules import TinyLM

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
EPS = 1e-4
"""One that fp16 can hold: AdamW's default is zero there."""


@dataclass
class Run:
    """What a run leaves: by step the mean loss, the unscaled gradients and the scale; in the end the weights."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    precision: str,
    batches: list[Tensor],
    ranks: int,
    accumulate: int,
    clip: float | None,
    scale: float = 1.0,
    growth_interval: int = 2000,
    state_dtype: torch.dtype | None = None,
) -> Run:
    """Steps over microbatches that come step by step, within a step by accumulation index, within that by rank."""
    run = Run()
    masters = TinyLM()
    if precision in TRUE:
        masters = masters.to(TRUE[precision])
    compute = copy.deepcopy(masters).to(MIXED[precision]) if precision in MIXED else masters
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, eps=EPS)
    names = [name for name, _ in masters.named_parameters()]
    good = 0
    per_step = ranks * accumulate
    for start in range(0, len(batches) - per_step + 1, per_step):
        with torch.no_grad():
            for mine, theirs in zip(compute.parameters(), masters.parameters(), strict=True):
                mine.copy_(theirs)
        sums = dict.fromkeys(names, 0.0)
        losses = []
        for batch in batches[start : start + per_step]:
            logits = compute(batch[:, :-1])
            if precision in MIXED:
                logits = logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            losses.append(loss.item())
            scaled = loss / accumulate
            scaled = (scaled.float() if scaled.dtype in MIXED.values() else scaled) * scale
            for name, grad in zip(names, torch.autograd.grad(scaled, list(compute.parameters())), strict=True):
                sums[name] += grad.double() / ranks / scale
        run.losses.append(sum(losses) / len(losses))
        for name, parameter in masters.named_parameters():
            parameter.grad = sums[name].to(parameter.dtype)
        run.gradients.append({name: p.grad.clone() for name, p in masters.named_parameters()})
        if all(p.grad.isfinite().all() for p in masters.parameters()):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
            _widen(optimizer)
            optimizer.step()
            _narrow(optimizer, state_dtype)
            good += 1
            if good == growth_interval:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
        run.scales.append(scale)
    run.weights = {name: p.detach().clone() for name, p in masters.named_parameters()}
    return run


def _widen(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(parameter.dtype)


def _narrow(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    for state in optimizer.state.values() if dtype else ():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(dtype)
