"""Layers that have some of the columns of a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_5d.tensor_parallel.arguments import first_positional
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.forwards import (
    Forward,
    LinearForward,
    nothing,
    uncompiled,
)
from lightning_5d.tensor_parallel.pieces import Pieces
from lightning_5d.tensor_parallel.regions import column, enter, head, join, leave
from lightning_5d.tensor_parallel.sequence import SequenceCut


class ColumnForward(LinearForward):
    """A column layer inside a region whose door is somewhere else.

    Args:
        module: The layer.
        axis: The ranks.
        whole: Makes its output whole, if that is asked for.
    """

    def __init__(self, module: nn.Module, axis: TensorAxis, whole: WholeFeatures | None = None) -> None:
        super().__init__(module, axis, None)
        self._whole = whole

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = None if torch.compiler.is_compiling() or len(args) != 1 or kwargs else self.layer
        if layer is None or not torch.is_grad_enabled() or not self.plain(args[0]):
            out = self.run(*args, **kwargs)
        else:
            out = column(args[0], *self.weight_and_bias(), layer)
        return out if self._whole is None else uncompiled(self._whole, out)


class WholeFeatures:
    """Puts the features of all ranks together.

    Args:
        axis: The ranks.
        index: Places of the whole's features among those of all ranks, where they have another order.
    """

    def __init__(self, axis: TensorAxis, index: Tensor | None) -> None:
        self._axis, self._index = axis, index

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeFeatures:
        return self

    def __reduce__(self) -> Any:
        return nothing, ()

    def __call__(self, out: Tensor) -> Tensor:
        """The whole features, of this rank's."""
        out = join(out, Pieces(self._axis, out.ndim - 1, out.shape[-1] * self._axis.size))
        return out if self._index is None else out.index_select(-1, self._index.to(out.device))


class Doors:
    """The column layers of a region that is entered at each of them.

    Those that get the same tensor share one entry.

    Args:
        axis: The ranks.
        sequence: Where the sequence is cut.
        columns: The column layers.
    """

    def __init__(self, axis: TensorAxis, sequence: SequenceCut | None, columns: Sequence[nn.Module]) -> None:
        self._axis, self._sequence, self._columns = axis, sequence, tuple(columns)
        self._last: tuple[Tensor, int, bool, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Doors:
        memo[id(self)] = new = Doors(self._axis, self._sequence, [copy.deepcopy(m, memo) for m in self._columns])
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"_axis": None, "_sequence": None, "_columns": (), "_last": None}

    def enter(self, x: Tensor) -> Tensor:
        """The entered tensor."""
        key = (x._version, torch.is_grad_enabled())
        if self._last is not None and self._last[0] is x and self._last[1:3] == key:
            return self._last[3]
        pieces = None if self._sequence is None else self._sequence.pieces(x)
        inside = enter(x, self._axis, pieces, parameters_of(self._columns))
        self._last = (x, *key, inside)
        return inside

    def forget(self) -> None:
        """Comes at the end of the region."""
        self._last = None


class OwnDoorForward(LinearForward):
    """A column layer that enters its input itself.

    Args:
        module: The layer.
        axis: The ranks.
        sequence: Where the sequence is cut.
        doors: Shared with the other columns of the region; ``None`` for a layer alone.
        whole: Makes its output whole, if that is asked for; this rank then goes on with its piece of the sequence.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: TensorAxis,
        sequence: SequenceCut | None,
        doors: Doors | None = None,
        whole: WholeFeatures | None = None,
    ) -> None:
        super().__init__(module, axis, sequence)
        self._doors = doors if doors is not None else Doors(axis, sequence, [module])
        self._alone, self._whole = doors is None, whole

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (x, *rest), names = first_positional(self.module, args, kwargs)
        inside = uncompiled(self._doors.enter, x)
        if self._alone:
            self._doors.forget()
        layer = None if torch.compiler.is_compiling() or rest or names else self.layer
        if layer is None or not torch.is_grad_enabled() or not self.plain(inside):
            out = self.run(inside, *rest, **names)
        else:
            out = column(inside, *self.weight_and_bias(), layer)
        return out if self._whole is None else uncompiled(self._put_together, out)

    def _put_together(self, out: Tensor) -> Tensor:
        if self._whole is not None:
            out = self._whole(out)
        return out if self.sequence is None else self.sequence.take(out)


class HeadForward(LinearForward):
    """The layer whose output is spread over the vocabulary.

    Args:
        module: The layer.
        axis: The ranks.
        vocabulary: Words, without padding.
    """

    def __init__(self, module: nn.Module, axis: TensorAxis, vocabulary: int) -> None:
        super().__init__(module, axis, None)
        self._vocabulary = vocabulary

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (x, *rest), names = first_positional(self.module, args, kwargs)
        if rest or names:
            raise TypeError(f"An output head takes one tensor, and got {len(rest) + len(names)} more arguments.")
        return uncompiled(self._run, x)

    def _run(self, x: Tensor) -> Any:
        from lightning_5d.tensor_parallel.vocabulary import VocabularyShard

        layer = self.layer
        if layer is not None and self.plain(x):
            local = head(x, *self.weight_and_bias(), layer, self.axis)
        else:
            local = self.run(enter(x, self.axis))
        return VocabularyShard.wrap(local, vocabulary=self._vocabulary, axis=self.axis)


class EmbeddingForward(Forward):
    """An embedding of which this rank has some of the words: others are zero here, and the sum over the ranks has them all.

    Args:
        module: An `nn.Embedding`.
        axis: The ranks.
    """

    def __init__(self, module: nn.Embedding, axis: TensorAxis) -> None:
        super().__init__(module, axis, None)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (ids,), _ = first_positional(self.module, args, kwargs)
        return uncompiled(self._run, ids)

    def _run(self, ids: Tensor) -> Tensor:
        if type(self.module).forward is nn.Embedding.forward:
            return self._looked_up(ids)
        # Gemma's scales what it looks up: what a class does beside that, it does with whole vectors.
        with _Lookups(self.module.weight, self._looked_up):
            out: Tensor = self.original(ids)
        return out

    def _looked_up(self, ids: Tensor) -> Tensor:
        module: Any = self.module
        weight: Tensor = module.weight
        rows = weight.shape[0]
        local = ids - rows * self.axis.rank
        absent = (local < 0) | (local >= rows)
        padding = None if module.padding_idx is None else module.padding_idx - rows * self.axis.rank
        if padding is not None and not 0 <= padding < rows:
            padding = None
        partial = F.embedding(local.masked_fill(absent, 0), weight, padding, sparse=module.sparse)
        return leave(partial.masked_fill(absent.unsqueeze(-1), 0), self.axis)


class _Lookups(TorchFunctionMode):
    """Has lookups in one table done by something else."""

    def __init__(self, weight: Any, lookup: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._weight, self._lookup = weight, lookup

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and args[1] is self._weight:
            return self._lookup(args[0])
        return func(*args, **(kwargs or {}))


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The weights and biases that layers hold now, each once."""
    found = [
        parameter
        for module in modules
        for name in ("weight", "bias")
        if (parameter := module._parameters.get(name)) is not None
    ]
    return list(dict.fromkeys(found))
