"""Precision under `FiveD`: dtypes of weights and compute, loss scaling, steps that are left out, clipping over all axes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_5d.across_meshes import clipping_by_hand
from lightning_5d.gradients import clip_by_norm, clip_by_value
from lightning_5d.loss_scaling import LossScaler, LossScaling
from lightning_5d.module_casting import ModuleCasting
from lightning_5d.nonfinite import NonfiniteNorms
from lightning_5d.optimizer_state import narrow_states, widen_states
from lightning_5d.parallelism import Dtypes, Problem, raise_problems

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_5d.strategy import FiveD

# Dtype of the weights, and what modules compute in where that is another one.
_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "64-true": (torch.float64, None),
}

PRECISIONS = tuple(_DTYPES)
"""Lightning's precision strings that `FiveD` runs."""

_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_STATE_DTYPES = (torch.bfloat16, torch.float16)


class FiveDPrecision(Precision):
    """Lightning's precision plugin for `FiveD`: the same strings, with clipping and loss scaling that know every mesh axis.

    | string | weights, gradients, optimizer states | modules compute in | loss scaling |
    |---|---|---|---|
    | ``32-true``, ``64-true``, ``bf16-true`` | that dtype | the same | off |
    | ``16-true`` | fp16 | the same | on |
    | ``bf16-mixed`` | fp32, sharded as ZeRO says | bf16 copies of the weights | off |
    | ``16-mixed`` | fp32, sharded as ZeRO says | fp16 copies of the weights | on |

    `FiveD` puts this in place of Lightning's own plugin of the same string. On CPU, Lightning turns ``Trainer(precision=
    "16-mixed")`` into ``bf16-mixed`` with a warning; give ``Trainer(plugins=FiveDPrecision("16-mixed"))`` there.

    Args:
        precision: One of `PRECISIONS`, or Lightning's short words for them (``"bf16"``, 16, ``None`` for the default).
        loss_scaling: Settings of dynamic loss scaling, ``None`` for none; ``"auto"`` scales where modules compute in fp16.
        optimizer_state_dtype: Keeps the optimizers' states (momentum, variance) in this 16-bit dtype between steps. A step
            itself runs on fp32 copies of them.
        autocast: Mixed precision by autocast: whole weights stay in fp32, single operations cast them.

    Attributes:
        scaler: The loss scale, or ``None`` without loss scaling.

    Raises:
        MisconfigurationException: For another string, or options that do not go with it; lists all problems.
    """

    def __init__(
        self,
        precision: str | int | None = "32-true",
        *,
        loss_scaling: LossScaling | Literal["auto"] | None = "auto",
        optimizer_state_dtype: torch.dtype | str | None = None,
        autocast: bool = False,
    ) -> None:
        precision = "32-true" if precision is None else _ALIASES.get(str(precision), precision)
        state_dtype = (
            getattr(torch, optimizer_state_dtype, optimizer_state_dtype)
            if isinstance(optimizer_state_dtype, str)
            else optimizer_state_dtype
        )
        raise_problems(_problems(precision, loss_scaling, state_dtype, autocast))
        self.precision = precision  # type: ignore[assignment]
        self.weights_dtype, self.compute_dtype = _DTYPES[str(precision)]
        self.autocast = autocast
        self.optimizer_state_dtype: torch.dtype | None = state_dtype  # type: ignore[assignment]
        half = torch.float16 in (self.weights_dtype, self.compute_dtype)
        if isinstance(loss_scaling, LossScaling):
            self.scaler: LossScaler | None = LossScaler(loss_scaling)
        elif loss_scaling == "auto" and half:
            # Where the loss itself is fp16, so is the scale that backward starts with.
            self.scaler = LossScaler(LossScaling() if self.compute_dtype else LossScaling(init_scale=32768.0))
        else:
            self.scaler = None
        self.nonfinite = NonfiniteNorms()
        self._strategy: FiveD | None = None
        self._casting: ModuleCasting | None = None
        self._clipping: AbstractContextManager[Any] = nullcontext()

    def attach(self, strategy: FiveD) -> None:
        """Tells the plugin whose mesh to use; called by `FiveD`.

        Raises:
            MisconfigurationException: If it belongs to another `FiveD` already.
        """
        if self._strategy is not None and self._strategy is not strategy:
            raise MisconfigurationException(
                "This FiveDPrecision object already belongs to another FiveD, and with it goes the loss scale of that run. Make a"
                " new FiveDPrecision(...) for each Trainer."
            )
        self._strategy = strategy

    def fresh(self) -> FiveDPrecision:
        """A new plugin with the same settings, for another Trainer."""
        settings = None if self.scaler is None else self.scaler.settings
        return FiveDPrecision(
            str(self.precision),
            loss_scaling=settings,
            optimizer_state_dtype=self.optimizer_state_dtype,
            autocast=self.autocast,
        )

    # Dtypes

    @property
    def dtypes(self) -> Dtypes:
        """What the axes have to provide for."""
        if self.compute_dtype is None or self.autocast:
            return Dtypes()
        return Dtypes(compute=self.compute_dtype, reduce=torch.float32)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self._strategy is None:
            # Another strategy would scale the loss and never divide the gradients.
            raise MisconfigurationException(
                f'FiveDPrecision("{self.precision}") works under FiveD only, and this Trainer has another strategy. Give'
                f' Trainer(strategy=FiveD(...)), or precision="{self.precision}" in place of the plugin.'
            )
        if self.compute_dtype is not None:
            # Masters are fp32 whatever dtype the weights came in (a pretrained model in bf16, say).
            convert = partial(_to_dtype, dtype=self.weights_dtype, only=_STATE_DTYPES)
        elif self.weights_dtype == torch.float32:
            return module
        else:
            # `module.to(dtype)` would take the imaginary part off complex tensors.
            convert = partial(_to_dtype, dtype=self.weights_dtype)
        converted: nn.Module = module._apply(convert)  # type: ignore[no-untyped-call]
        return converted

    def cast_activations(self, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Takes care of the activations where modules compute in another dtype than fp32; called before axes are applied."""
        if self._casting is not None:
            self._casting.remove()
            self._casting = None
        compute = self.dtypes.compute
        if compute is not None:
            self._casting = ModuleCasting(module, blocks, compute)

    @override
    def convert_input(self, data: Any) -> Any:
        if self.compute_dtype is not None or self.weights_dtype == torch.float32:
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
        if self.compute_dtype is None:
            with self.tensor_init_context():
                yield
            return
        with ExitStack() as contexts:
            # Over weights that are cast already this leaves matrix products as they are. It brings mixed operands together
            # and sends losses to fp32. Without its cache, which would outlive weights that a step of the user's changes.
            contexts.enter_context(torch.autocast(self._device_type, dtype=self.compute_dtype, cache_enabled=False))
            if self._casting is not None:
                contexts.enter_context(self._casting.step())
            yield

    @contextmanager
    @override
    def train_step_context(self) -> Generator[None, None, None]:
        module = None if self._strategy is None else self._strategy.lightning_module
        manual = module is not None and not module.automatic_optimization
        with self.forward_context(), self._clipping if manual else nullcontext():
            yield

    @property
    def _device_type(self) -> str:
        return self._strategy.root_device.type if self._strategy is not None else "cpu"

    # Backward

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        # Hooks see the loss as the user returned it.
        tensor = super().pre_backward(tensor, module)
        return tensor if self.scaler is None else self.scaler.scale_loss(tensor)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        if self.compute_dtype is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        with self.backward_context():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @contextmanager
    def backward_context(self) -> Generator[None, None, None]:
        """What a backward needs that runs inside a step, where autocast would reach the backward's own operations."""
        with ExitStack() as contexts:
            contexts.enter_context(torch.autocast(self._device_type, enabled=False))
            if self._casting is not None:
                contexts.enter_context(self._casting.paused())
            yield

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        with self._clipping:
            return super().post_backward(tensor, module)

    # Optimizer steps

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        raise_problems(self._optimizer_problems(optimizers))
        if self._strategy is not None:
            self._clipping = clipping_by_hand(self._strategy.connected_module, self._strategy.mesh.size("pp"))
        return super().connect(model, optimizers, lr_schedulers)

    def _optimizer_problems(self, optimizers: Iterable[Optimizer]) -> list[Problem]:
        problems = []
        for optimizer in optimizers:
            name = type(optimizer).__name__
            lost = [group["eps"] for group in optimizer.param_groups if _vanishes(group, self.weights_dtype)]
            if lost:
                what = f"{name}(eps={lost[0]:g}) divides by zero, as {lost[0]:g} is 0 in {self.weights_dtype}."
                problems.append(Problem(what, "Use eps=1e-4, or precision 16-mixed, which steps in fp32."))
            if not isinstance(optimizer, LBFGS):
                continue
            if self.scaler is not None:
                what = "LBFGS runs several backwards in a step, and loss scaling checks gradients once before it."
                problems.append(Problem(what, "Use another optimizer, or precision bf16-mixed or 32-true."))
            if self.optimizer_state_dtype is not None:
                what = f"LBFGS keeps lists of whole vectors, which are not kept in {self.optimizer_state_dtype}."
                problems.append(Problem(what, "Leave optimizer_state_dtype out, or use another optimizer."))
        return problems

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        try:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        except _StepLeftOutError as left_out:
            return left_out.result
        finally:
            self.settle_states(optimizer)

    def step_again(self, optimizer: Any, default_dtype: torch.dtype) -> None:
        """Steps on gradients that are final, perhaps inside of a user's step, with the numbers of a step outside of it."""
        with torch.autocast(self._device_type, enabled=False), _default_dtype(default_dtype):
            if self.optimizer_state_dtype is not None:
                widen_states(optimizer)
            optimizer.step()
            self.settle_states(optimizer)

    def settle_states(self, optimizer: Any) -> None:
        """Brings an optimizer's states to the dtype they rest in, if that is another than their parameters'."""
        if self.optimizer_state_dtype is not None:
            narrow_states(optimizer, self.optimizer_state_dtype)

    @override
    def _wrap_closure(self, model: pl.LightningModule, optimizer: Steppable, closure: Callable[[], Any]) -> Any:
        # Optimizers call the closure before they change anything, so raising in it leaves no trace of the step.
        result = closure()
        self._after_closure(model, optimizer)
        if self._strategy is not None and self._strategy.skipping:
            raise _StepLeftOutError(result)
        if self.optimizer_state_dtype is not None:
            widen_states(optimizer)
        return result

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Steppable) -> None:
        strategy = self._strategy
        if strategy is None:
            super()._after_closure(model, optimizer)
            return
        # Gradients become final here, so that hooks, clipping and the step all see the same ones.
        strategy.finalize_gradients(optimizer)
        with self._clipping:
            super()._after_closure(model, optimizer)
        strategy.last_gradients_known()
        if not strategy.skipping:
            strategy.parameters_will_change()

    @override
    def _clip_gradients(
        self,
        model: pl.LightningModule | nn.Module,
        optimizer: Steppable,
        clip_val: int | float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        if self._strategy is None or not self._strategy.skipping:
            super()._clip_gradients(model, optimizer, clip_val, gradient_clip_algorithm)

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
        self._strategy.prepare_clipping(optimizer)
        norm = self._strategy.norm_to_clip(optimizer, parameters, float(clip_val))
        if self.scaler is None:  # which leaves such steps out
            self.nonfinite.look_at(norm)
        clip_by_norm(parameters, float(clip_val), norm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self._strategy is not None:
            self._strategy.prepare_clipping(optimizer)
        clip_by_value(self.main_params(optimizer), float(clip_val))

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        if self._strategy is not None and self._strategy.skipped_steps.attempts:
            state["skipped_steps"] = self._strategy.skipped_steps.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and "loss_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["loss_scaler"])
        if self._strategy is not None and "skipped_steps" in state_dict:
            self._strategy.skipped_steps.load_state_dict(state_dict["skipped_steps"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The scale of a run without `FiveD`, in the words of `torch.amp.GradScaler`.
        saved = checkpoint.get(MixedPrecision.__qualname__)
        if self.scaler is not None and isinstance(saved, Mapping) and "scale" in saved:
            self.scaler.load_state_dict(
                {"scale": saved["scale"], "growth_tracker": saved.get("_growth_tracker", 0)},
            )


class _StepLeftOutError(Exception):
    """Leaves an optimizer's step before it changes anything; never reaches the user."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def around_backward(plugin: Precision) -> Callable[[], AbstractContextManager[None]] | None:
    """Makes the context of a backward inside of a step, where a precision needs one."""
    return plugin.backward_context if isinstance(plugin, FiveDPrecision) and plugin.compute_dtype is not None else None


def fived_precision(plugin: Precision) -> tuple[FiveDPrecision, list[Problem]]:
    """The plugin of the same precision for `FiveD`, and what is wrong with that precision.

    Lightning makes a plugin of its own for strategies it does not know; only the string in it matters here, and the settings
    of its gradient scaler.
    """
    if isinstance(plugin, FiveDPrecision):
        return plugin, []
    precision = str(plugin.precision)
    if precision not in PRECISIONS:
        what = f"precision={precision!r} is not available under FiveD."
        return FiveDPrecision(), [Problem(what, f"Use one of {', '.join(PRECISIONS)}.")]
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return FiveDPrecision(precision), []
    settings = LossScaling(
        init_scale=float(scaler.get_scale()),
        growth_factor=float(scaler.get_growth_factor()),
        backoff_factor=float(scaler.get_backoff_factor()),
        growth_interval=int(scaler.get_growth_interval()),
    )
    return FiveDPrecision(precision, loss_scaling=settings), []


def _problems(precision: Any, loss_scaling: Any, state_dtype: Any, autocast: Any) -> list[Problem]:
    problems = []
    if not isinstance(precision, str) or precision not in _DTYPES:
        what = f"precision={precision!r} is not available under FiveD."
        problems.append(Problem(what, f"Use one of {', '.join(PRECISIONS)}."))
    elif autocast and _DTYPES[precision][1] is None:
        what = f"autocast=True says nothing for precision={precision!r}, which computes in the weights' dtype."
        problems.append(Problem(what, "Use bf16-mixed or 16-mixed, or leave autocast out."))
    if loss_scaling is not None and loss_scaling != "auto" and not isinstance(loss_scaling, LossScaling):
        problems.append(Problem(f"loss_scaling={loss_scaling!r} is unknown.", 'Give LossScaling(...), "auto" or None.'))
    if state_dtype is not None and state_dtype not in _STATE_DTYPES:
        what = f"optimizer_state_dtype={state_dtype!r} is no 16-bit dtype."
        problems.append(Problem(what, "Use torch.bfloat16, or leave it out for the weights' dtype."))
    return problems


def _vanishes(group: Mapping[str, Any], dtype: torch.dtype) -> bool:
    eps = group.get("eps")
    return isinstance(eps, float) and eps > 0 and not group.get("fused") and not float(torch.tensor(eps, dtype=dtype))


def _to_dtype(tensor: Tensor, dtype: torch.dtype, only: tuple[torch.dtype, ...] = ()) -> Tensor:
    if not tensor.is_floating_point() or (only and tensor.dtype not in only):
        return tensor
    return tensor.to(dtype)


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
