"""Autograd functions whose backward has no graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Any]


def first_derivatives(what: str, without: str) -> Callable[[Backward], Backward]:
    """Marks a backward that refuses to be differentiated: it says so where second derivatives are asked for.

    Args:
        what: What has none, for the message: what a person knows of it.
        without: The plugin without which there are some.
    """

    # torch's `once_differentiable` would not do: it lets a backward pass to which no gradient comes, as an entry's, and complains later.
    def marked(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def refusing(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"A backward with create_graph=True came to {what}, which have no second derivatives. Compute them without {without}."
                )
            return backward(ctx, *grads)

        return refusing

    return marked


of_tensor_axis = first_derivatives("layers on the tensor axis", "TensorParallel")
of_spread_experts = first_derivatives("experts on other ranks", "ExpertParallel")
