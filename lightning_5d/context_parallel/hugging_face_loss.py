"""Losses that a model computes inside of a door: of its tokens' outputs, against labels that came in whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.arguments import mapped
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.lengths import Path
from lightning_5d.context_parallel.shown import SequenceShard, is_shown

_ATTRIBUTE = "_loss_function"

LOSSES = frozenset(
    {
        F.cross_entropy,
        F.nll_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
    }
)
"""Losses of an ``input`` against a ``target``, both with an entry per token."""


def answer_loss(inside: Inside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of this rank's outputs against whole labels, as it is of the whole sequence: the same on all ranks.

    Args:
        inside: The open door, whose calls into torch are looked at.
        func: What was called.
        args: Its arguments.
        kwargs: Those by name.

    Returns:
        The loss; `NotImplemented` if it is another call, or labels are as local as the outputs are.

    Raises:
        MisconfigurationException: If the labels were shifted against the outputs, over a cut.
    """
    if func not in LOSSES:
        return NotImplemented
    named = dict(zip(("input", "target"), args, strict=False)) | {
        key: kwargs[key] for key in ("input", "target") if key in kwargs
    }
    outputs, target = named.get("input"), named.get("target")
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor) or is_shown(outputs):
        return NotImplemented
    shown = _shown(outputs, target, inside)
    if shown is None:
        return NotImplemented
    with inside.at_user_level():
        if args:
            return func(shown, *args[1:], **kwargs)
        return func(**{**kwargs, "input": shown})


def _shown(outputs: Tensor, target: Tensor, inside: Inside) -> Tensor | None:
    cut = inside.sequence.cut
    # Where the tokens are among dimensions: (B * S, …), (B, S, …) or, for classes in between, (B, V, S).
    if target.ndim == 1 and outputs.ndim and target.shape[0] != outputs.shape[0]:
        for less in (0, 1):
            rows, rest = divmod(outputs.shape[0], max(1, cut.local - less))
            if rest == 0 and target.shape[0] == rows * (cut.length - less):
                if less:
                    raise _shifted(inside, outputs, target)
                local = outputs.unflatten(0, (rows, cut.local))  # type: ignore[no-untyped-call]
                return SequenceShard.wrap(local, dim=1, sequence=inside.sequence).flatten(0, 1)
        return None
    if target.ndim >= 2:
        dim = 2 if outputs.ndim > target.ndim else 1
        if target.shape[1] == cut.length and outputs.ndim > dim and outputs.shape[dim] == cut.local:
            return SequenceShard.wrap(outputs, dim=dim, sequence=inside.sequence)
        if target.shape[1] == cut.length - 1 and outputs.ndim > dim and outputs.shape[dim] == cut.local - 1:
            raise _shifted(inside, outputs, target)
    return None


def _shifted(inside: Inside, outputs: Tensor, target: Tensor) -> MisconfigurationException:
    return MisconfigurationException(
        f"{inside.name} shifts its outputs {tuple(outputs.shape)} against labels {tuple(target.shape)} by itself, but each rank has its"
        f" {inside.sequence.cut.local} of {inside.sequence.cut.length} tokens there, and one target would be lost at each cut. Shift and compute the loss in"
        " training_step, where sequences are whole."
    )


class WholeSequenceLoss:
    """What stands for the ``loss_function`` of a Hugging Face model: the same function, of whole sequences.

    Args:
        module: The model.
        inside: Tells which door is open.
    """

    def __init__(self, module: nn.Module, inside: Callable[[], Inside | None]) -> None:
        self._module, self._inside = module, inside
        self._before = vars(module).get(_ATTRIBUTE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss. Tensors with this rank's tokens are shown whole to it; labels are."""
        inside, function = self._inside(), self.original
        if inside is None or inside.paused:
            return function(*args, **kwargs)
        local = inside.sequence.cut.local

        def show(path: Path, value: Any) -> Any:
            tokens = isinstance(value, Tensor) and not is_shown(value) and value.ndim >= 2 and value.shape[1] == local
            return SequenceShard.wrap(value, dim=1, sequence=inside.sequence) if tokens else value

        with inside.at_user_level():
            args, kwargs = mapped((args, kwargs), show)
            return function(*args, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own."""
        with self._out_of_the_way():
            function: Callable[..., Any] = self._module.loss_function  # type: ignore[assignment]
        return function

    def install(self) -> None:
        """Puts it in place."""
        vars(self._module)[_ATTRIBUTE] = self

    def close(self) -> None:
        """Gives the model its own back, unless somebody has set another one since."""
        if vars(self._module).get(_ATTRIBUTE) is self:
            self._put_back()

    @contextmanager
    def _out_of_the_way(self) -> Iterator[None]:
        now = vars(self._module).get(_ATTRIBUTE)
        self._put_back()
        try:
            yield
        finally:
            if now is not None:
                vars(self._module)[_ATTRIBUTE] = now

    def _put_back(self) -> None:
        if self._before is None:
            vars(self._module).pop(_ATTRIBUTE, None)
        else:
            vars(self._module)[_ATTRIBUTE] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the model belongs to nobody's step.
        return self.original

    def __reduce__(self) -> Any:
        return _itself, (self.original,)


def _itself(value: Any) -> Any:
    return value


def has_loss_function(module: nn.Module) -> bool:
    """Whether a module is a Hugging Face model whose loss can be set (checked with transformers 5.24)."""
    found = getattr(type(module), "loss_function", None)
    return isinstance(found, property) and found.fset is not None and isinstance(module, nn.Module)


def wrap_losses(root: nn.Module, inside: Callable[[], Inside | None]) -> list[WholeSequenceLoss]:
    """Puts `WholeSequenceLoss` in place of the losses of all models in a module."""
    losses = [WholeSequenceLoss(module, inside) for module in root.modules() if has_loss_function(module)]
    for loss in losses:
        loss.install()
    return losses
