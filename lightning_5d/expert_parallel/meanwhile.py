"""What is computed while tokens are on their way to experts: as if it were computed beside their call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Private; checked with torch 2.13.
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

Meanwhile = Callable[[], None]


# [Note: operations on the way]
# The way to experts and back is one operation to those who look at operations, and none of them is on inside of it. What is computed meanwhile is
# none of that operation, so those are on again who were. Where one follows each tensor that is made, as in a first step, what comes of it would be
# a tensor from nowhere while the operation runs: then nothing is computed meanwhile. The context axis redirects attention in every step, and torch's
# default device is such a one, too.
def is_looked_at(hidden: Tensor) -> bool:
    """Whether somebody looks at each operation on these hidden states now."""
    return type(hidden) is not Tensor or any(
        getattr(mode, "is_looking", not isinstance(mode, DeviceContext))
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


def as_now(meanwhile: Meanwhile) -> Meanwhile:
    """Has something run with those in place who are told of operations now."""
    if not torch._C._is_torch_function_mode_enabled():
        return meanwhile
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def run() -> None:
        # Not entered a second time: torch's default device would forget what it was before.
        for mode in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]
        try:
            meanwhile()
        finally:
            for _ in modes:
                _pop_mode()  # type: ignore[no-untyped-call]

    return run
