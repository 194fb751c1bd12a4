"""Weights that live on another arrangement of the ranks than the rest of a module, and the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_5d.data_parallel.peers import Spread
from lightning_5d.mesh import ExpertView


def view_of(parameter: nn.Parameter, views: Iterable[ExpertView]) -> ExpertView | None:
    """The arrangement that a parameter lives on, ``None`` for the usual one."""
    if not isinstance(parameter, DTensor):
        return None
    return next((view for view in views if view.covers(parameter.device_mesh)), None)


def modules_apart(root: nn.Module, views: Sequence[ExpertView]) -> dict[nn.Module, ExpertView]:
    """The modules that hold weights of another arrangement, each with it.

    Args:
        root: Its parameters are as other axes have placed them.
        views: The other arrangements.

    Raises:
        ValueError: If such a module also holds weights that live as usual, is the root, or shares a weight with another one.
    """
    found: dict[nn.Module, ExpertView] = {}
    holders: dict[nn.Parameter, str] = {}
    for name, module in root.named_modules():
        views_here = {
            view for parameter in module.parameters(recurse=False) if (view := view_of(parameter, views)) is not None
        }
        if not views_here:
            continue
        view = views_here.pop()
        usual = [key for key, parameter in module.named_parameters() if view_of(parameter, views) is not view]
        if module is root or views_here or usual:
            what = "it is the root" if module is root else f"these do not: {', '.join(usual)}"
            raise ValueError(
                f"{name or type(module).__name__} holds weights that live on {view.size} ranks each, and {what}. Put such weights into a"
                " module of their own."
            )
        for parameter in module.parameters(recurse=False):
            if parameter in holders:
                raise ValueError(
                    f"{holders[parameter]} and {name} share a weight that lives on {view.size} ranks, which cannot be sharded twice."
                    " Let each have its own."
                )
            holders[parameter] = name
        found[module] = view
    return found


def evenly(spread: Spread) -> Callable[[nn.Parameter], Shard]:
    """Along which dimension a weight apart is sharded: the first one, of those that the ranks divide, else the very first.

    Such weights may have fewer rows on a rank than ranks share them, like one expert on each; then some would have all, and others nothing.
    """
    ranks = 1 if spread.shard is None else spread.shard.size()

    def dimension(parameter: nn.Parameter) -> Shard:
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return Shard(next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), 0))

    return dimension
