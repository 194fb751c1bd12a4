"""The door of a layer's experts: what runs in place of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_5d.expert_parallel.dispatch import Capacity, kept_by_capacity, through_experts
from lightning_5d.expert_parallel.exchange import TokenExchange
from lightning_5d.expert_parallel.found import Compute, FoundExperts
from lightning_5d.expert_parallel.load import LayerLoad
from lightning_5d.expert_parallel.row_ranks import RowRanks
from lightning_5d.expert_parallel.rows import through_rows
from lightning_5d.hidden_operations import hidden_operations
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
        self._has_parts, self._capacity, self._number = has_parts, capacity, number
        self._whole: Mapping[str, Tensor] | None = None
        self._names = tuple(inspect.signature(self.original).parameters)
        layer.module.__dict__["forward"] = self

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the experts' own forward: ``(hidden_ND, index_NK, weights_NK) -> (N, D)``."""
        hidden, index, weights = (*args, *(kwargs[name] for name in self._names[len(args) : 3]))
        index_NK, weights_NK = index.reshape(-1, index.shape[-1]), weights.reshape(-1, weights.shape[-1])
        real_N, kept_NK = self._ranks.real(len(index_NK)), None
        if self._capacity is not None:
            whole = self._ranks.choices(index_NK, weights_NK)
            kept_NK = self._ranks.part(kept_by_capacity(*whole, self.layer.count, self._capacity))
        if self._load.counting and self._ranks.is_first:
            self._load.add_choices(index_NK, real_N, kept_NK)
        if self._exchange is None and not self._has_parts and kept_NK is None:
            with self._own_numbers(hidden.device):
                out: Tensor = self.run(*args, **kwargs)
            return out
        is_cut = self._ranks.is_cut
        if real_N is not None and kept_NK is None and not (is_cut and self._has_parts):
            # Padding has somewhere to go as well, and nobody misses it. Not where other ranks, which may have none, get this rank's choices.
            kept_NK = real_N[:, None].expand_as(index_NK)
        axis = None if self._whole is not None else self._axis
        hidden_ND = hidden.reshape(-1, hidden.shape[-1])
        run = partial(
            through_rows,
            index_NK=index_NK,
            weights_NK=weights_NK,
            kept_NK=kept_NK,
            experts=self._through,
            axis=axis,
            is_cut=is_cut,
            has_parts=self._has_parts,
        )
        out = _as_one_operation(hidden_ND, run)
        # Not a view of itself: FSDP2, whose group the experts may be, warns of views.
        return out if out.shape == hidden.shape else out.view_as(hidden)

    def _through(self, hidden: Tensor, index: Tensor, weights: Tensor, kept: Tensor | None) -> Tensor:
        compute, exchange = partial(self._compute, self.layer.compute), self._exchange
        if self._whole is None:
            try:
                return through_experts(hidden, index, weights, self.layer.count, compute, exchange, kept, self._number)
            except RuntimeError as error:
                error.add_note(f"It was in the experts {self.layer.name}.")
                raise
        with self._swapped(self._whole):
            return through_experts(hidden, index, weights, self.layer.count, compute, None, kept)

    def _compute(self, compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
        with self._own_numbers(rows.device):
            return compute(self.module, rows, counts)

    # [Note: random numbers of experts]
    # Ranks of a microbatch draw from one stream, and have different rows in their experts: as many as come. So each has a stream of its own
    # in there, of a seed that is one number of the shared stream and the rank's place, and the shared stream goes on alike on all. What
    # backward runs again finds the shared stream as it was, and so draws the same.
    @contextmanager
    def _own_numbers(self, device: torch.device) -> Iterator[None]:
        place = None
        if self.layer.may_draw and self.module.training:
            place = self._ranks.place(spread=self._exchange is not None or self._has_parts)
        if place is None:
            yield
            return
        with hidden_operations():
            # Of the CPU's generator, whatever the device is: nothing waits for it.
            number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        with Seeded(generators(device), own_seed(number, place)):
            yield

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
    def _swapped(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        own = dict(self.module._parameters)
        for key, tensor in whole.items():
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
