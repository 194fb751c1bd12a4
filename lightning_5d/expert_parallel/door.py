"""The door of a layer's experts: what runs in place of their forward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_5d.expert_parallel.dispatch import Capacity, is_of_somebody, kept_by_capacity, through_experts
from lightning_5d.expert_parallel.exchange import TokenExchange
from lightning_5d.expert_parallel.experts import compute_experts
from lightning_5d.expert_parallel.found import Compute, FoundExperts
from lightning_5d.expert_parallel.load import LayerLoad
from lightning_5d.expert_parallel.meanwhile import Meanwhile, as_now, is_looked_at
from lightning_5d.expert_parallel.row_ranks import RowRanks
from lightning_5d.expert_parallel.rows import through_rows
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.recomputation import CheckpointedForward
from lightning_5d.replaced_forward import AroundForward
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.random_regions import Seeded, generators, own_seed


# [Note: one operation]
# The context axis follows in the first step along which dimensions tokens lie, operation by operation. Rows of several ranks that are sorted
# by expert are nothing that it knows, and what it made of them was wrong where there are as many features as tokens, or a multiple of them.
# So the whole way is one operation to it, and to whoever else looks at operations, whose output lies as its input does.
def _as_one_operation(hidden_ND: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    if has_torch_function_unary(hidden_ND):
        out: Tensor = handle_torch_function(_as_one_operation, (hidden_ND,), hidden_ND, run)
        return out
    return run(hidden_ND)


class ExpertDoor(AroundForward):
    """Lets each token of a layer go to where its experts are, and counts where tokens go.

    Where experts are not spread and take all tokens, the layer's own forward runs.

    Args:
        layer: The experts.
        ranks: The ranks that have rows of the same microbatch.
        load: Where tokens are counted.
        exchange: The ranks that hold different experts; ``None`` if each has all.
        axis: The ranks of the tensor axis; ``None`` if there is one, or if it has nothing to do with experts.
        has_parts: Whether each of these has a part of every expert.
        capacity: A limit on the tokens of an expert, if there is one.
        number: The layer's among those of the whole module.
    """

    def __init__(
        self,
        layer: FoundExperts,
        ranks: RowRanks,
        load: LayerLoad,
        exchange: TokenExchange | None,
        axis: TensorAxis | None,
        *,
        has_parts: bool,
        capacity: Capacity | None,
        number: int = 0,
    ) -> None:
        super().__init__(layer.module)
        self.layer = layer
        self._ranks, self._load, self._exchange, self._axis = ranks, load, exchange, axis
        self._has_parts, self._number = has_parts, number
        self._decide = None if capacity is None else partial(kept_by_capacity, experts=layer.count, capacity=capacity)
        self._whole: Mapping[str, Tensor] | None = None
        self._names = tuple(inspect.signature(self.original).parameters)
        self._called = f"{layer.name}({', '.join(self._names[:3])})"
        # The block of this package leaves nothing to nobody, and its experts raise at what is none.
        self._may_choose_none = layer.compute is not compute_experts
        layer.module.__dict__["forward"] = self

    def travels(self, hidden: Tensor) -> bool:
        """Whether these hidden states will be on their way to experts for a time, in which the call computes something else if asked to."""
        if self._exchange is None or self._whole is not None or is_looked_at(hidden):
            return False
        # A block that backward runs again ends with the last tensor that it has to save, which must not be one of what is computed on the way.
        saves = hidden.requires_grad or any(weight.requires_grad for weight in self.module.parameters())
        return saves or not torch.is_grad_enabled()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, meanwhile: Meanwhile | None = None, **kwargs: Any) -> Tensor:
        """As the experts' own forward: ``(hidden_ND, index_NK, weights_NK) -> (N, D)``.

        Args:
            args: Those of the experts' own forward.
            meanwhile: Called once, while tokens travel; for those that `travels` only.
            kwargs: As `args`.
        """
        given = (*args, *(kwargs.get(name) for name in self._names[len(args) : 3]))
        if self._exchange is None and not self._has_parts and self._decide is None:
            self._look(*given)
            device = given[0].device if isinstance(given[0], Tensor) else torch.device("cpu")
            if (blanked := self._without_padding(*given)) is not None:
                args, kwargs = blanked, {}
            with self._own_numbers(device):
                out: Tensor = self.run(*args, **kwargs)
            return out
        hidden, index, weights = given
        index_NK, weights_NK = self._choices(hidden, index, weights)
        kept_NK = self._ranks.kept(index_NK, weights_NK, self._decide)
        if self._load.counting and self._ranks.is_first:
            self._load.add_choices(index_NK, self._ranks.real(len(index_NK)), kept_NK)
        is_cut = self._ranks.is_cut
        if self._decide is None and is_cut and self._has_parts:
            # Padding goes along where other ranks, which may have none, get this rank's choices.
            kept_NK = None
        axis = None if self._whole is not None else self._axis
        hidden_ND = hidden.reshape(-1, hidden.shape[-1])
        run = partial(
            through_rows,
            index_NK=index_NK,
            weights_NK=weights_NK,
            kept_NK=kept_NK,
            experts=partial(self._through, meanwhile=meanwhile and as_now(meanwhile)),
            axis=axis,
            is_cut=is_cut,
            has_parts=self._has_parts,
        )
        out = _as_one_operation(hidden_ND, run)
        # Not a view of itself: FSDP2, whose group the experts may be, warns of views.
        return out if out.shape == hidden.shape else out.view_as(hidden)

    def _look(self, hidden: Any, index: Any, *_: Any) -> None:
        """Counts choices of experts that compute by themselves, and may be called with anything."""
        if not (self._load.counting and self._ranks.is_first):
            return
        if isinstance(hidden, Tensor) and isinstance(index, Tensor) and _are_choices(hidden, index):
            index_NK = _by_row(hidden, index)
            self._load.add_choices(index_NK, self._ranks.real(len(index_NK)))

    def _without_padding(self, hidden: Any, index: Any, weights: Any) -> tuple[Tensor, Any, Tensor] | None:
        """What experts that compute by themselves get, with tokens of zeros for padding; ``None`` where there is none.

        Padding may hold anything, and zero times that is a gradient of weights.
        """
        if not all(isinstance(x, Tensor) for x in (hidden, index, weights)) or not _are_choices(hidden, index):
            return None
        real_N = self._ranks.real(math.prod(hidden.shape[:-1]))
        if real_N is None or weights.numel() != index.numel():
            return None
        blank = [
            torch.where(real_N.view(*x.shape[:-1], 1), x, 0) for x in (hidden, weights.view(*hidden.shape[:-1], -1))
        ]
        return blank[0], index, blank[1].view_as(weights)

    def _choices(self, hidden: Any, index: Any, weights: Any) -> tuple[Tensor, Tensor]:
        """The experts of each row and their weights, both (N, K); a router of one expert per token may leave K out.

        Raises:
            TypeError: If something is no tensor.
            ValueError: If the experts of rows are no whole numbers, or there are not as many of anything as rows.
        """
        if not all(isinstance(x, Tensor) for x in (hidden, index, weights)):
            kinds = ", ".join(type(x).__name__ for x in (hidden, index, weights))
            raise TypeError(f"{self._called} got {kinds}: experts that are spread over ranks take three tensors.")
        if not _are_choices(hidden, index) or weights.numel() != index.numel():
            got = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in (hidden, index, weights))
            raise ValueError(
                f"{self._called} got {got}: experts that are spread over ranks take rows (N, D), K experts of each (N, K) as whole numbers, and as many"
                " weights (N, K)."
            )
        index_NK = _by_row(hidden, index)
        return index_NK, weights.reshape(index_NK.shape)

    def _through(
        self,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        kept: Tensor | None,
        meanwhile: Meanwhile | None,
    ) -> Tensor:
        compute, count = partial(self._compute, self.layer.compute), self.layer.count
        if self._may_choose_none:
            with hidden_operations():
                chosen = is_of_somebody(index, count)
                if not bool(chosen.all()):
                    kept = chosen if kept is None else kept & chosen
                    index = index.clamp(0, count - 1)
        exchange = self._exchange if self._whole is None else None
        with self._swapped():
            return through_experts(
                hidden, index, weights, count, compute, exchange, kept, self._number, meanwhile, self._naming
            )

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            error.add_note(f"It was in the experts {self.layer.name}.")
            raise

    # [Note: experts alone that are computed again]
    # A forward that keeps its inputs only, of the experts and not of what is around them, is what this one has taken the place of. It then
    # keeps the rows that have arrived: what experts make of them is computed again, and nothing is sent again.
    def _compute(self, compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
        with self._own_numbers(rows.device):
            # Weights of all experts are not there any more when backward comes.
            if isinstance(self.previous, CheckpointedForward) and self._whole is None:
                again: Tensor = self.previous.recomputed(partial(compute, self.module), rows, counts)
                return again
            return compute(self.module, rows, counts)

    # [Note: random numbers of experts]
    # Ranks of a microbatch draw from one stream, and have different rows in their experts: as many as come. So each has a stream of its own
    # in there, of a seed that is one number of the shared stream and the rank's place, and the shared stream goes on alike on all. What
    # backward runs again finds the shared stream as it was, and so draws the same.
    def _own_numbers(self, device: torch.device) -> AbstractContextManager[Any]:
        place = None
        if self.layer.may_draw and self.module.training:
            place = self._ranks.place(spread=self._exchange is not None or self._has_parts)
        if place is None:
            return nullcontext()
        with hidden_operations():
            # Of the CPU's generator, whatever the device is: nothing waits for it.
            number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return Seeded(generators(device), own_seed(number, place))

    @contextmanager
    def alone(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which this rank computes by itself.

        Args:
            whole: The stacked weights of all experts, by name.
        """
        self._whole = whole
        try:
            yield
        finally:
            self._whole = None

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        if self._whole is None:
            yield
            return
        own = dict(self.module._parameters)
        for key, tensor in self._whole.items():
            present = own[key]
            dtype = tensor.dtype if present is None else present.dtype
            self.module._parameters[key] = torch.nn.Parameter(tensor.to(dtype), requires_grad=False)
        try:
            yield
        finally:
            self.module._parameters.update(own)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled copy can be looked at, and not be run.
        return {"module": self.module, "previous": self.previous}


def _are_choices(hidden: Tensor, index: Tensor) -> bool:
    """Whether these can be the experts of rows: some for each, as whole numbers."""
    if index.is_floating_point() or index.dtype == torch.bool or hidden.ndim < 2:
        return False
    if hidden.ndim == index.ndim == 2:
        return len(hidden) == len(index)
    return index.shape == hidden.shape[:-1] or index.shape[:-1].numel() == hidden.shape[:-1].numel()


def _by_row(hidden: Tensor, index: Tensor) -> Tensor:
    if hidden.ndim == index.ndim:
        return index.reshape(-1, index.shape[-1])
    return index.reshape(-1, 1 if index.shape == hidden.shape[:-1] else index.shape[-1])
