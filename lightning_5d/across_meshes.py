"""Clipping by torch's own functions, where gradients lie over several arrangements of ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_OTHERS = ("lightning", "lightning_5d", "pytorch_lightning")


# [Note: gradients over several meshes]
# Experts live on other ranks than the weights around them. torch.nn.utils.clip_grad_norm_ and clip_grad_value_ give all gradients of a dtype to one
# call, which torch refuses for DTensors of several meshes (checked with 2.13). Here such a call is made once for each mesh, and of norms that are put
# together each is made whole before. What torch takes by itself is left to it, so nothing changes its meaning.
class AcrossMeshes(TorchFunctionMode):
    """A context in which torch clips gradients whatever ranks they lie over.

    Only calls are touched that would raise: those of a list with tensors over several meshes, or with plain ones among them, which are taken for the
    same on all ranks.

    Args:
        stages: Stages of the pipeline. With several, torch's functions that clip do not come here (see
            `lightning_5d.pipeline_parallel.whole_gradients`), and such a call is an error still, but one that says what to do.

    Attributes:
        is_looking: It looks at no operation that it takes the place of nothing for.
    """

    is_looking = False

    def __init__(self, stages: int = 1) -> None:
        super().__init__()
        self._stages = stages

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = _APART.get(func)
        if run is None or not args or not _are_mixed(args[0]):
            return func(*args, **(kwargs or {}))
        if self._stages > 1:
            raise MisconfigurationException(
                f"A norm that is put together by hand is that of one of {self._stages} stages alone. Call trainer.strategy.gradient_norm(), or"
                " torch.nn.utils.get_total_norm and clip_grad_norm_, which know of stages."
            )
        return run(func, *args, **(kwargs or {}))


def clipping_by_hand(module: pl.LightningModule, stages: int = 1) -> AbstractContextManager[Any]:
    """What code of a user's that may clip gradients runs in: nothing where torch does it alone or there is no such code, as a mode costs each call.

    Args:
        module: The user's, with its parameters as they are between steps.
        stages: Stages of the pipeline.
    """
    callbacks = getattr(getattr(module, "_trainer", None), "callbacks", ())
    by_hand = not module.automatic_optimization or any(map(_has_own_hooks, (module, *callbacks)))
    return AcrossMeshes(stages) if by_hand and _are_mixed(list(module.parameters())) else nullcontext()


def _has_own_hooks(owner: Any) -> bool:
    hooks = (getattr(owner, name, None) for name in _HOOKS)
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] not in _OTHERS for hook in hooks if hook)


def _by_mesh(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor] | None:
    """Calls a function of a list for the tensors of each mesh, and puts what it gives into their order."""
    found: dict[int, Tensor] = {}
    for places in _places(tensors):
        some = func([tensors[place] for place in places], *args, **kwargs)
        if some is not None:
            found.update(zip(places, some, strict=True))
    return [found[place] for place in range(len(tensors))] if found else None


def _stack(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    whole: dict[int, Tensor] = {}
    for places in _places(tensors):
        # Together: a collective for each mesh, not for each tensor.
        stacked = func([tensors[place] for place in places])
        whole.update(zip(places, stacked.full_tensor() if isinstance(stacked, DTensor) else stacked, strict=True))
    result: Tensor = func([whole[place] for place in range(len(tensors))], *args, **kwargs)
    return result


_APART: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _by_mesh,
    torch._foreach_mul_: _by_mesh,
    torch._foreach_clamp_min_: _by_mesh,
    torch._foreach_clamp_max_: _by_mesh,
    torch.stack: _stack,
}


def _are_mixed(tensors: Any) -> bool:
    if not isinstance(tensors, list | tuple) or not any(isinstance(tensor, DTensor) for tensor in tensors):
        return False
    return len({_mesh_of(tensor) for tensor in tensors}) > 1


def _places(tensors: Sequence[Tensor]) -> list[list[int]]:
    places: dict[Hashable, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(_mesh_of(tensor), []).append(place)
    return list(places.values())


def _mesh_of(tensor: Any) -> Hashable:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
