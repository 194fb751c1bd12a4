"""Floating-point operations that a model needs, whatever the run does besides: recomputation and communication do not count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.throughput import _CUDA_FLOPS, get_available_flops
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GROUPED = torch.ops.aten._grouped_mm
_UNCOUNTED: AbstractContextManager[None] = nullcontext()


class ModelFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, under it, what a forward and its backward take; the backward need not run.

    Each matrix product costs its own size again for each of its factors that needs a gradient, attention twice its own; so the
    backward is counted from the forward, and what is run again in a backward is not (PaLM, arXiv:2204.02311, appendix B). Under
    `torch.no_grad` only the forward counts.

    Attributes:
        total: Floating-point operations so far.
        paused: Counts nothing while it is true.
        share: The part of each operation that counts.
        ratio: What backward takes of operations now, as a multiple of their forward; ``None`` for what their operands tell.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0
        self.paused = False
        self.share = 1.0
        self.ratio: int | None = None

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused:
            return out
        forward = forward_flops(func, args, kwargs, out)
        if forward:
            ratio = self.ratio
            if ratio is None:
                ratio = backward_ratio(func, args) if torch.is_grad_enabled() else 0
            self.add(forward, ratio)
        return out

    def add(self, forward: int, ratio: int) -> None:
        """Counts an operation.

        Args:
            forward: What its forward takes.
            ratio: What its backward takes, as a multiple of that.
        """
        self.total += self.share * forward * (1 + ratio)

    @contextmanager
    def shared(self, shares: Mapping[nn.Module, float]) -> Iterator[None]:
        """A context in which only a part of what is done in some modules counts, as other ranks do the same.

        Args:
            shares: That part, from 0 to 1. It is also that of modules inside that are not named.
        """
        before: list[float] = []

        def enter(module: nn.Module, args: Any) -> None:
            before.append(self.share)
            self.share = shares[module]

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.share = before.pop()

        handles = [module.register_forward_pre_hook(enter) for module in shares]
        handles += [module.register_forward_hook(leave, always_call=True) for module in shares]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def shared_attention(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> Iterator[None]:
    """A context in which ranks compute attention over the parts that each of them holds: it counts as one process would count it.

    How they do that is up to them: whatever else is computed inside does not count.

    Args:
        query: (B, H, s, D), this rank's part.
        key: (B, K, s, D), this rank's part.
        value: (B, K, s, D), this rank's part.
        ranks: How many hold the whole sequence.
    """
    batch, heads, tokens, size = query.shape
    keys, values = (batch, heads, ranks * tokens, size), (batch, heads, ranks * tokens, value.shape[-1])
    forward = int(sdpa_flop_count(query.shape, keys, values))  # type: ignore[no-untyped-call]
    with counted_as(forward, 2 if any(tensor.requires_grad for tensor in (query, key, value)) else 0):
        yield


@contextmanager
def counted_as(forward: int, backward_ratio: int) -> Iterator[None]:
    """A context whose operations count as so many, however they are computed: what an autograd function does is not seen to have a backward.

    Args:
        forward: Floating-point operations of the forward.
        backward_ratio: Those of the backward, as a multiple of it.
    """
    counters = _counters()
    for counter in counters:
        counter.add(forward, backward_ratio if torch.is_grad_enabled() else 0)
        counter.paused = True
    try:
        yield
    finally:
        for counter in counters:
            counter.paused = False


def counted_with_backward(*factors: Tensor) -> AbstractContextManager[None]:
    """A context for an autograd function that computes products: their backward counts, too, which is not seen inside of it.

    Args:
        factors: What it multiplies; each of them that needs a gradient costs one more product.
    """
    counters = _counters()
    return _with_backward(counters, factors) if counters else _UNCOUNTED


@contextmanager
def _with_backward(counters: Sequence[ModelFlops], factors: Sequence[Tensor]) -> Iterator[None]:
    ratio = sum(factor.requires_grad for factor in factors) if torch.is_grad_enabled() else 0
    before = [counter.ratio for counter in counters]
    for counter in counters:
        counter.ratio = ratio
    try:
        yield
    finally:
        for counter, value in zip(counters, before, strict=True):
            counter.ratio = value


def _counters() -> list[ModelFlops]:
    # Private; checked with torch 2.13.
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, ModelFlops) and not mode.paused]


def forward_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call of an operation; 0 for those without a formula (elementwise ones)."""
    packet = getattr(func, "_overloadpacket", None)
    if packet is _CPU_ATTENTION:  # torch 2.13 has no formula for the CPU's kernel
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]
    if (
        packet is _GROUPED
    ):  # nor for products of groups, whose rows are in one of the first factor's dimensions or the other
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def backward_ratio(func: Any, args: tuple[Any, ...]) -> int:
    """The backward's floating-point operations as a multiple of the forward's."""
    factors = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim >= 2]
    needed = [factor for factor in factors[-2:] if factor.requires_grad]
    if "attention" in func._schema.name:
        # Four products of the size of the forward's two, less those of a query, key or value that needs none.
        return 2 if any(factor.requires_grad for factor in factors[:3]) else 0
    return len(needed)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The most that a device can do per second, from Lightning's table of devices; ``None`` where it has none.

    Args:
        device: The device.
        dtype: The dtype of matrix products.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        if "h200" in name and "nvl" not in name:
            # The H100's compute with other memory. Lightning 2.6.6 does not find it by the name the driver gives, and has
            # the figures for sparse matrices. (Private; checked with that version.)
            table = _CUDA_FLOPS["h100 sxm"]
            fast = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
            return table.get("tfloat32" if fast else dtype)
    return get_available_flops(device, dtype)
