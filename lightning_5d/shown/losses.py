"""Losses that compare each element with a target: each rank does its part, and they are then summed or averaged."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction as legacy

from lightning_5d.shown.elementwise import elementwise
from lightning_5d.shown.registry import EVERY
from lightning_5d.shown.tensor import ShownTensor

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # as the operations of ATen number their reductions


def reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction that a loss is asked for in the old way or the new one."""
    if size_average is None and reduce is None:
        return reduction
    return legacy.legacy_get_string(size_average, reduce)


@EVERY.answers(
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div,
    F.poisson_nll_loss, F.soft_margin_loss,
)  # fmt: skip
def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    how = reduction_of(given.get("size_average"), given.get("reduce"), given.get("reduction", "mean"))
    if how not in ("mean", "sum", "batchmean"):
        return NotImplemented
    each = func(
        **(
            given | {"size_average": None, "reduce": None, "reduction": "none"}
            if "reduce" in inspect.signature(func).parameters
            else given | {"reduction": "none"}
        )
    )
    if how == "batchmean":
        return each.sum() / given["input"].shape[0]
    return each.mean() if how == "mean" else each.sum()


@EVERY.handles(
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.mse_loss.default, aten.smooth_l1_loss.default,
    aten.huber_loss.default, aten.soft_margin_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default, aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
)  # fmt: skip
def _loss_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    how = given.get("reduction", _MEAN)
    if how == _NONE:
        return elementwise(func, args, kwargs)
    if "grad_output" in given:
        return NotImplemented
    each: ShownTensor = elementwise(func, (), given | {"reduction": _NONE})
    if each is NotImplemented:
        return NotImplemented
    return aten.mean.default(each) if how == _MEAN else aten.sum.default(each)
