"""What leaves a door: which outputs are shown whole, and whether the others are the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.apart import Apart
from lightning_5d.context_parallel.arguments import Entering, is_cache, mapped
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.lengths import Keys, Path
from lightning_5d.context_parallel.shown import SequenceShard, is_shown


class Leaving:
    """What becomes of the outputs of one door.

    | shape, s being this rank's tokens and B the rows | is |
    |---|---|
    | named in `keys` | shown along what they say, or not |
    | (B, s, …) of 3 dimensions and more | shown along 1 |
    | (B, H, s, …) of 4 dimensions, H not s | shown along 2 |
    | (B, s) | shown along 1; not floats, if a weight of the module has a dimension of that size: they may be features |
    | (B * s, …) | shown, its rows being tokens of all sequences one after the other |
    | anything else | not shown |

    What is not shown must be the same on all ranks: that is looked at in the first call and, ever more rarely, in later ones. What is
    not becomes `Apart`, which is an error to whoever uses it.

    Args:
        name: The door's name.
        module: The door.
        keys: What the person says about dimensions.
    """

    def __init__(self, name: str, module: nn.Module, keys: Keys) -> None:
        self._name, self._keys = name, keys
        self._module = module
        self._calls: dict[tuple[Any, ...], int] = {}
        self._apart: set[tuple[Any, ...]] = set()

    def __call__(self, output: Any, inside: Inside, entering: Entering) -> Any:
        """The output as code of the user's level sees it. All ranks call it together."""
        plain: dict[Path, Tensor] = {}

        def show(path: Path, value: Any) -> Any:
            if is_cache(value):
                raise MisconfigurationException(
                    f"{self._name} returned keys and values of its tokens, of which each rank has a part. Call it with use_cache=False, or generate"
                    " outside of a step."
                )
            if not isinstance(value, Tensor) or is_shown(value):
                return value
            dim = self._dimension(path, value, inside, entering)
            if dim is None:
                plain[path] = value
                return value
            if dim == "rows":
                local = value.unflatten(0, (entering.rows, inside.sequence.cut.local))  # type: ignore[no-untyped-call]
                return SequenceShard.wrap(local, dim=1, sequence=inside.sequence).flatten(0, 1)
            return SequenceShard.wrap(value, dim=dim, sequence=inside.sequence)

        shown = mapped(output, show)
        if not plain:
            return shown
        apart = self._compared(plain, inside)
        return mapped(shown, lambda path, value: apart.get(path, value)) if apart else shown

    def _dimension(self, path: Path, value: Tensor, inside: Inside, entering: Entering) -> Any:
        local, rows, shape = inside.sequence.cut.local, entering.rows, value.shape
        where = (self._name, *path)
        if where in self._keys and path != ():
            dim = self._keys.dimension(where, value)
            if dim is not None and shape[dim] != local:
                raise MisconfigurationException(
                    f"Output {'.'.join(path)} of {self._name} has {shape[dim]} entries along dimension {dim}, which ContextParallel(keys=…) names, and"
                    f" this rank has {local} tokens. Name another dimension, or None if it has no sequence."
                )
            return dim
        if entering.dim != 1 and value.ndim > entering.dim and shape[entering.dim] == local:
            return entering.dim
        if value.ndim >= 3 and shape[1] == local and shape[0] in (rows, 1):
            return 1
        if value.ndim == 4 and shape[2] == local and shape[0] in (rows, 1):
            return 2
        if value.ndim == 2 and shape[1] == local and shape[0] in (rows, 1):
            return None if value.is_floating_point() and self._has_width(local) else 1
        return "rows" if value.ndim and shape[0] == rows * local and local > 1 else None

    def _has_width(self, size: int) -> bool:
        return any(size in parameter.shape for parameter in self._module.parameters())

    def _compared(self, plain: dict[Path, Tensor], inside: Inside) -> dict[Path, Apart]:
        kinds = {path: (path, value.shape[1:], value.dtype, torch.is_grad_enabled()) for path, value in plain.items()}
        signature = tuple(kinds.values())
        calls = self._calls[signature] = self._calls.get(signature, 0) + 1
        if calls & (calls - 1) == 0:
            different = _different(list(plain.values()), inside)
            self._apart |= {kinds[path] for path, differs in zip(plain, different, strict=True) if differs}
        return {
            path: Apart.of(value, self._reason(path, value, inside))
            for path, value in plain.items()
            if kinds[path] in self._apart
        }

    def _reason(self, path: Path, value: Tensor, inside: Inside) -> str:
        cut = inside.sequence.cut
        module = f"{self._name} ({type(self._module).__name__})"
        what = f"Output {'.'.join(path)} of {module}" if path else f"What {module} returned"
        if value.ndim == 2 and value.shape[1] == cut.local:
            fix = (
                f"Its {cut.local} columns may be tokens or features: say so with ContextParallel(keys={{{'.'.join((self._name, *path))!r}: 1}}), or None"
                " for features."
            )
        elif value.ndim == 0:
            fix = (
                "Losses and means over tokens are right in training_step, where sequences are whole: return what they are made of, one entry per token."
                " Losses inside of a model are right if labels are passed as labels or targets. Router losses that"
                " transformers' load_balancing_loss_func computes are right in FiveD; leave others out (output_router_logits=False)."
            )
        else:
            fix = "Return one entry per token (the hidden states), and pick or average tokens in training_step, where sequences are whole."
        return (
            f"{what}, of shape {tuple(value.shape)}, was made of"
            f" {cut.local} of the {cut.length} tokens on each rank of the context axis, and is another one on each. {fix}"
        )


def _different(values: list[Tensor], inside: Inside) -> list[bool]:
    """Which tensors are not the same on all ranks, in one exchange."""
    # To the bit: what ranks compute alike, or sum up together, is; a router's small loss on top of a large one may differ by less than
    # any tolerance.
    prints = torch.stack([_fingerprint(value.detach()) for value in values])
    largest, smallest = inside.sequence.axis.sum(torch.stack([prints, -prints]), "max").unbind()
    return (largest != -smallest).any(1).tolist()


def _fingerprint(value: Tensor) -> Tensor:
    """Numbers that are others for other values: a sum, one of sizes, and two with weights."""
    if value.is_complex():
        value = torch.view_as_real(value)
    # Not every accelerator has float64.
    flat = value.flatten().to(torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32)
    flat = torch.nan_to_num(flat, nan=3.14e7, posinf=1e30, neginf=-1e30)
    weights = torch.linspace(1, 2, flat.numel(), dtype=flat.dtype, device=flat.device)
    first = flat[:1].sum()
    return torch.stack([flat.sum(), flat.abs().sum(), (flat * weights).sum(), first, first.new_tensor(value.numel())])
