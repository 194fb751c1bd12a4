"""Precision under `FiveD`: dtypes of weights and compute, and clipping over all axes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.gradients import clip_by_norm, clip_by_value
from lightning_5d.nonfinite import NonfiniteNorms
from lightning_5d.parallelism import Problem

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_5d.strategy import FiveD

_WEIGHTS: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}

PRECISIONS = tuple(_WEIGHTS)
"""Lightning's precision strings that `FiveD` runs."""


class FiveDPrecision(Precision):
    """Lightning's precision plugin for `FiveD`: the same strings, with clipping that knows every mesh axis.

    ``"bf16-mixed"`` runs the step under autocast and keeps weights, gradients and optimizer states in float32; the ``-true``
    ones keep everything in one dtype. `FiveD` puts this in place of Lightning's own plugin of the same string.

    Args:
        precision: One of `PRECISIONS`.

    Raises:
        ValueError: For another string.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _WEIGHTS:
            raise ValueError(
                f"precision={precision!r} is not available under FiveD. Use one of {', '.join(PRECISIONS)}."
            )
        self.precision = precision  # type: ignore[assignment]
        self.weights_dtype = _WEIGHTS[precision]
        self.nonfinite = NonfiniteNorms()
        self._strategy: FiveD | None = None

    def attach(self, strategy: FiveD) -> None:
        """Tells the plugin whose mesh to use; called by `FiveD`."""
        self._strategy = strategy

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.weights_dtype == torch.float32:
            return module
        # `module.to(dtype)` would take the imaginary part off complex tensors.
        convert = partial(_to_dtype, dtype=self.weights_dtype)
        converted: nn.Module = module._apply(convert)  # type: ignore[no-untyped-call]
        return converted

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision.endswith("-mixed") or self.weights_dtype == torch.float32:
            return data
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=self.weights_dtype)

    @contextmanager
    @override
    def tensor_init_context(self) -> Generator[None, None, None]:
        with _default_dtype(self.weights_dtype):
            yield

    @contextmanager
    @override
    def module_init_context(self) -> Generator[None, None, None]:
        with self.tensor_init_context():
            yield

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        if self.precision == "bf16-mixed":
            device_type = self._strategy.root_device.type if self._strategy is not None else "cpu"
            with torch.autocast(device_type, dtype=torch.bfloat16):
                yield
        else:
            with self.tensor_init_context():
                yield

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Steppable) -> None:
        # Gradients become final here, so that hooks, clipping and the step all see the same ones.
        if self._strategy is not None:
            self._strategy.finalize_gradients(optimizer)
        super()._after_closure(model, optimizer)
        if self._strategy is not None:
            self._strategy.parameters_will_change()

    @override
    def teardown(self) -> None:
        self.nonfinite.settle()
        super().teardown()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = list(self.main_params(optimizer))
        if self._strategy is None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
            return
        norm = self._strategy.norm_to_clip(optimizer, parameters)
        self.nonfinite.look_at(norm)  # what clipping makes of it is NaN
        clip_by_norm(parameters, float(clip_val), norm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self.main_params(optimizer), float(clip_val))


def fived_precision(plugin: Precision) -> tuple[FiveDPrecision, list[Problem]]:
    """The plugin of the same precision for `FiveD`, and what is wrong with that precision.

    Lightning makes a plugin of its own for strategies it does not know; only the string in it matters here.
    """
    if isinstance(plugin, FiveDPrecision):
        return plugin, []
    precision = str(plugin.precision)
    if precision in PRECISIONS:
        return FiveDPrecision(precision), []
    what = f"precision={precision!r} is not available under FiveD."
    return FiveDPrecision(), [Problem(what, f"Use one of {', '.join(PRECISIONS)}.")]


def _to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
