"""The balance losses that Hugging Face's models add to theirs: over the tokens of all ranks, as one process would compute them.

Legend: L layers, N rows of this rank, E experts, K of them for each token.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.replaced_forward import AroundForward

_NAME = "load_balancing_loss_func"
_PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")
_ALONE = Counted()

BalanceLoss = Callable[..., Any]


def balance_loss(logits_LNE: Sequence[Tensor], top_k: int, mask: Tensor | None, counted: Counted) -> Tensor:
    """``E * sum_e f_e P_e``, f being the share of tokens that choose an expert and P their mean probability for it, over all layers as one.

    f is of the tokens of all data ranks, P of a microbatch's, so that the mean over data ranks is the loss of all.

    Args:
        logits_LNE: What the routers say, layer by layer.
        top_k: Experts of each token.
        mask: Which tokens count, any shape of N entries; all if ``None``.
        counted: Which ranks have other tokens.

    Returns:
        A scalar, the same on all ranks of a microbatch.

    Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6, as transformers sums it up over layers; Qiu et al., "Demons in the
    Detail" (2025), for f over all ranks.
    """
    first = logits_LNE[0]
    experts, rows = first.shape[-1], first.shape[0]
    # Not torch's default dtype, which is another one in double and in true half precision.
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    counts_E = torch.zeros(experts, dtype=dtype, device=first.device)
    probabilities_E, tokens = torch.zeros_like(counts_E), counts_E.new_zeros(1)
    counts_N = _counts(rows, mask, counted.real(rows), counts_E)
    for logits_NE in logits_LNE:
        probability_NE = torch.softmax(logits_NE.to(first.device), dim=-1)
        chosen_NK = torch.topk(probability_NE.detach(), top_k, dim=-1).indices
        counts_E.scatter_add_(0, chosen_NK.flatten(), counts_N.repeat_interleave(top_k))
        probabilities_E = probabilities_E + counts_N @ probability_NE.to(dtype)
        tokens = tokens + counts_N.sum()
    total = counted.sum(torch.cat([counts_E, tokens]), "global")
    mine = counted.sum(tokens, "microbatch")
    # Whole numbers: at least one, where no token counts, leaves all others as they are.
    share_E = total[:-1] / total[-1].clamp(min=1)
    probability_E = counted.sum_of_microbatch(probabilities_E) / mine.clamp(min=1)
    return experts * (share_E * probability_E).sum()


def _counts(rows: int, mask: Tensor | None, real: Tensor | None, like: Tensor) -> Tensor:
    counts_N = like.new_ones(rows) if mask is None else mask.reshape(-1).to(like)
    return counts_N if real is None else counts_N * real.to(like)


# [Note: the name in the module of a model]
# Models compute this loss by a function that they look up among the globals of the module of their code. While the forward of a model of ours
# runs, another one is there under that name, which for other threads does what the function itself does. Before and after, nothing is to be
# seen of it.
class RouterLosses:
    """Makes the models in a module compute their balance losses over the tokens of all ranks, in steps, until `close`.

    f is about the tokens of all data ranks, which in steps have to call a model equally often. Outside of steps (samples of text on one rank)
    models compute as they do.

    Args:
        root: The user's module.
        counted: Which ranks have which tokens.

    Attributes:
        models: Names of the models.
        unknown: Names of models whose balance loss is computed by another formula, and is left as it is: over each rank's tokens alone.
    """

    def __init__(self, root: nn.Module, counted: Counted) -> None:
        self._around: list[_Balanced] = []
        self._counted, self._in_step = counted, False
        self.models: list[str] = []
        self.unknown: list[str] = []
        for name, module in root.named_modules():
            found = _balance_losses(module)
            if not found:
                continue
            known = [place for place in found if is_known(place[_NAME])]
            (self.models if len(known) == len(found) else self.unknown).append(name or type(module).__name__)
            if known:
                self._around.append(_Balanced(module, known, self))

    @property
    def counted(self) -> Counted | None:
        """Over which ranks a loss is summed now; ``None`` outside of steps."""
        return self._counted if self._in_step else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around each step, and around what backward runs again of one: there, losses are of all ranks."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def close(self) -> None:
        """Takes everything off the models again."""
        for each in self._around:
            each.remove()
        self._around = []


def is_known(function: Any) -> bool:
    """Whether a function computes what `balance_loss` does in one process; it is tried."""
    try:
        if tuple(inspect.signature(function).parameters) != _PARAMETERS:
            return False
        generator = torch.Generator().manual_seed(0)
        logits = tuple(torch.randn(6, 4, generator=generator) for _ in range(2))
        for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 1]])):
            theirs = function(logits, 4, 2, mask)
            if not torch.allclose(theirs, balance_loss(logits, 2, mask, _ALONE), rtol=1e-5):
                return False
    except Exception:
        return False
    return True


class _Balanced(AroundForward):
    """A model's forward, during which its balance loss is another one."""

    def __init__(self, module: nn.Module, places: list[dict[str, Any]], losses: RouterLosses) -> None:
        super().__init__(module)
        self._places = places
        self._losses: RouterLosses | None = losses
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        counted = None if self._losses is None else self._losses.counted
        if counted is None:
            return self.run(*args, **kwargs)
        with ExitStack() as stack:
            for place in self._places:
                stack.enter_context(_in_place(place, counted))
            return self.run(*args, **kwargs)

    def remove(self) -> None:
        """Gives the model its own forward back, unless somebody else has put one around this one."""
        self._losses = None
        self.take_off()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the model belongs to nobody's step.
        new = super().__deepcopy__(memo)
        new._losses = None
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "previous": self.previous, "_places": [], "_losses": None}


class _Replacement:
    """What stands under the name of a balance loss while a model's forward runs."""

    def __init__(self, previous: BalanceLoss, counted: Counted) -> None:
        self.previous = previous
        self._counted = counted
        self._thread = threading.get_ident()

    def __call__(self, gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        """As the function in its place."""
        if threading.get_ident() != self._thread or not isinstance(gate_logits, tuple) or not gate_logits:
            return self.previous(gate_logits, num_experts, top_k, attention_mask)
        return balance_loss(gate_logits, top_k, attention_mask, self._counted)


@contextmanager
def _in_place(place: dict[str, Any], counted: Counted) -> Iterator[None]:
    mine = _Replacement(place[_NAME], counted)
    place[_NAME] = mine
    try:
        yield
    finally:
        _taken_out(place, mine)


def _taken_out(place: dict[str, Any], mine: _Replacement) -> None:
    """Another thread may have put one of its own around this one since."""
    if place[_NAME] is mine:
        place[_NAME] = mine.previous
        return
    around = place[_NAME]
    while isinstance(around, _Replacement):
        if around.previous is mine:
            around.previous = mine.previous
            return
        around = around.previous


def _balance_losses(module: nn.Module) -> list[dict[str, Any]]:
    """The globals of modules in which a model's forward looks for its balance loss; none for what is no such model."""
    found: list[dict[str, Any]] = []
    for kind in type(module).__mro__:
        forward = inspect.unwrap(vars(kind)["forward"]) if "forward" in vars(kind) else None
        code = getattr(forward, "__code__", None)
        if code is None or _NAME not in code.co_names:
            continue
        place = forward.__globals__  # type: ignore[union-attr]
        if callable(place.get(_NAME)) and all(place is not other for other in found):
            found.append(place)
    return found
