"""What one stage hands to the next: any nest of tensors, taken apart for sending and put together again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from lightning_5d.parallelism import Parallelized
from lightning_5d.whole_length import length_on, mark

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a payload as the receiver has to know it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        trained: Whether its gradient is sent back.
        whole: Where it is a piece of a sequence, the length of the whole.
        form: What an axis has said about it, if it is one of its tensors as a plain one; see `Forms`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    whole: int | None = None
    form: tuple[int, Hashable] | None = None


class Forms:
    """Tensors that only some axis understands, as plain ones and back.

    Args:
        axes: The axes at work, in the same order on all ranks.
    """

    def __init__(self, axes: Sequence[Parallelized] = ()) -> None:
        self._axes = [axis for axis in axes if type(axis).plain_form is not Parallelized.plain_form]

    def plain(self, tensor: Tensor) -> tuple[Tensor, tuple[int, Hashable] | None]:
        """A tensor as it travels, and which axis makes it again from what; ``None`` for one that is plain."""
        if type(tensor) is Tensor:
            return tensor, None
        for index, axis in enumerate(self._axes):
            if (found := axis.plain_form(tensor)) is not None:
                return found[0], (index, found[1])
        return tensor, None

    def again(self, plain: Tensor, form: tuple[int, Any] | None) -> Tensor:
        """What it was, on the stage that has got it."""
        if form is None:
            return plain
        index, description = form
        axis = self._axes[index]
        return axis.from_plain_form(plain, description)


NO_FORMS = Forms()


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """A payload without the values of its tensors.

    Attributes:
        leaves: Its tensors, and what is not a tensor as it is.
        tree: How they are nested; ``None`` for a tensor on its own.
    """

    leaves: tuple[Leaf | Any, ...]
    tree: TreeSpec | None = None

    @property
    def tensors(self) -> tuple[Leaf, ...]:
        """The tensors alone."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Leaf))

    @property
    def trained(self) -> tuple[Leaf, ...]:
        """The tensors whose gradient is sent back."""
        return tuple(leaf for leaf in self.tensors if leaf.trained)

    def together(self, tensors: Sequence[Tensor], forms: Forms = NO_FORMS) -> Any:
        """The payload with these tensors."""
        for tensor, leaf in zip(tensors, self.tensors, strict=True):
            if leaf.whole is not None:
                mark(tensor, leaf.whole)
        tensors = [forms.again(tensor, leaf.form) for tensor, leaf in zip(tensors, self.tensors, strict=True)]
        if self.tree is None:
            return tensors[0]
        rest = iter(tensors)
        return tree_unflatten([next(rest) if isinstance(leaf, Leaf) else leaf for leaf in self.leaves], self.tree)

    def fits(self, other: PayloadSpec) -> bool:
        """Whether the other payload can travel where this one is expected: it asks for gradients only where this one does."""
        if self is other:
            return True
        if len(self.leaves) != len(other.leaves) or self.tree != other.tree:
            return False
        return all(_leaf_fits(mine, theirs) for mine, theirs in zip(self.leaves, other.leaves, strict=True))

    def __str__(self) -> str:
        return ", ".join(
            f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" if isinstance(leaf, Leaf) else repr(leaf)
            for leaf in self.leaves
        )


def take_apart(payload: Any, stage: int, forms: Forms = NO_FORMS) -> tuple[list[Tensor], PayloadSpec]:
    """The tensors of a payload, and the rest of it.

    Args:
        payload: What the last block of a stage returned.
        stage: That stage, for the message.
        forms: Makes plain tensors of those that only some axis understands.

    Raises:
        TypeError: If something in it is neither a tensor nor a plain constant.
    """
    if isinstance(payload, Tensor):
        plain, form = forms.plain(payload)
        return [plain], PayloadSpec((_leaf_of(plain, form),))
    leaves, tree = tree_flatten(payload)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    strangers = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_CONSTANTS))]
    if strangers or not tensors:
        raise TypeError(_not_tensors(payload, stage))
    sent = [forms.plain(tensor) for tensor in tensors]
    described = iter([_leaf_of(plain, form) for plain, form in sent])
    spec = PayloadSpec(tuple(next(described) if isinstance(leaf, Tensor) else leaf for leaf in leaves), tree)
    return [plain for plain, _ in sent], spec


def _leaf_of(tensor: Tensor, form: tuple[int, Hashable] | None) -> Leaf:
    return Leaf(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, length_on(tensor), form)


def _leaf_fits(mine: Any, theirs: Any) -> bool:
    if not (isinstance(mine, Leaf) and isinstance(theirs, Leaf)):
        return type(mine) is type(theirs) and bool(mine == theirs)
    same = (mine.shape, mine.dtype, mine.whole) == (theirs.shape, theirs.dtype, theirs.whole)
    return same and mine.form == theirs.form and (mine.trained or not theirs.trained)


def _not_tensors(payload: Any, stage: int) -> str:
    named, _ = tree_flatten_with_path(payload)
    wrong = [
        f"{keystr(path) or 'the payload'} is a {type(leaf).__name__}"
        for path, leaf in named
        if not isinstance(leaf, (Tensor, *_CONSTANTS))
    ]
    what = "; ".join(wrong) or f"it is {payload!r}, without any tensor"
    return (
        f"The last block of stage {stage} returns something that cannot be sent to stage {stage + 1}: {what}. A block at a cut may"
        " return tensors, nested in tuples, lists and dicts, and plain constants; switch off caches (use_cache=False), or move"
        " the cut (split=[...]) to a block that returns tensors."
    )
