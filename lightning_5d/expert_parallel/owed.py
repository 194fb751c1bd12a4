"""What a rank owes those whose gradients go through its experts, in a microbatch of its own that has no loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.repeated_runs import is_repeated


# [Note: no loss on one rank]
# A rank whose microbatch has weight zero has no loss to start from: it is 0/0, and no factor makes a gradient of NaN vanish. Gradients of
# ranks whose microbatches count go through its experts all the same, and wait for it there. So its backward starts, with zeros, where the
# blocks with experts end. Not where the experts end: FSDP2 gathers the weights of a block when a gradient comes to its output.
class OwedBackward:
    """Notes what leaves blocks with experts.

    Args:
        root: The user's module, as all axes have left it.
        layers: The experts in it.
    """

    def __init__(self, root: nn.Module, layers: Sequence[FoundExperts]) -> None:
        self._outputs: list[Tensor] = []
        blocks = dict.fromkeys(_block(root, layer.name) for layer in layers)
        self._handles: list[RemovableHandle] = [block.register_forward_hook(_Note(self._outputs)) for block in blocks]

    def clear(self) -> None:
        """Forgets what it has noted."""
        self._outputs.clear()

    def outputs(self) -> tuple[Tensor, ...]:
        """What has left these blocks since then, with graphs."""
        return tuple(self._outputs)

    def close(self) -> None:
        """Takes the hooks off."""
        self.clear()
        for handle in self._handles:
            handle.remove()


class _Note:
    """A hook. That of a copy of the module notes nothing."""

    def __init__(self, outputs: list[Tensor] | None) -> None:
        self._outputs = outputs

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outputs is not None and module.training and not is_repeated():
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            self._outputs.extend(leaf for leaf in leaves if leaf.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Note:
        return _Note(None)

    def __reduce__(self) -> Any:
        return _Note, (None,)


def _block(root: nn.Module, name: str) -> nn.Module:
    """The outermost unit of FSDP2 around experts, without the root; what the experts are in if there is none."""
    inner = name.split(".")
    around = [root.get_submodule(".".join(inner[:depth])) for depth in range(1, len(inner))]
    return next((module for module in around if isinstance(module, FSDPModule)), around[-1] if around else root)
