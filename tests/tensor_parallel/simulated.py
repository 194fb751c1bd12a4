"""All ranks of a tensor axis in one process, by batch: inside a region the batch holds every rank's copy, one after the other.

Weights stay whole parameters and parts are taken from them under autograd, so that gradients are those of whole weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_5d.tensor_parallel.layout import TensorLayout


@contextmanager
def simulated(root: nn.Module, layout: TensorLayout, size: int) -> Iterator[None]:
    """The module computes as `size` ranks with that layout would, and with whole sequences."""
    undo: list[Callable[[], Any]] = []

    def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        undo.append(lambda: module.__dict__.pop("forward"))

    def before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

        undo.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)

    def after(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        undo.append(module.register_forward_hook(lambda m, args, out: change(out)).remove)

    def copies(x: Tensor) -> Tensor:
        return torch.cat([x] * size)

    def total(x: Tensor) -> Tensor:
        return torch.stack(x.chunk(size)).sum(0)

    def whole_features(x: Tensor) -> Tensor:
        return torch.cat(x.chunk(size), -1)

    def own_features(x: Tensor) -> Tensor:
        return torch.cat([part.chunk(size, -1)[rank] for rank, part in enumerate(x.chunk(size))])

    names = {id(module): name for name, module in root.named_modules()}
    for module in root.modules():
        cut = {
            own: rows
            for own, _ in module.named_parameters(recurse=False)
            if (rows := layout.weights.get(f"{names[id(module)]}.{own}"))
        }
        if not cut or names[id(module)] in (*layout.heads, *layout.embeddings):
            continue

        def on_every_rank(x: Tensor, module: nn.Module = module, cut: dict[str, Any] = cut) -> Tensor:
            results = []
            for rank, part in enumerate(x.chunk(size)):
                own = {name: rows.part(module.get_parameter(name), rank, size) for name, rows in cut.items()}
                if isinstance(module, nn.Linear):
                    # A bias that is whole belongs to a row layer, and is added once.
                    bias = own.get("bias", module.bias if not rank else None)
                    results.append(F.linear(part, own["weight"], bias))
                else:
                    results.append(_call(module, own, part))
            return torch.cat(results)

        replace(module, on_every_rank)
    for region in layout.regions:
        if region.door == "module":
            before(root.get_submodule(region.name), copies)
        for name in region.columns:
            column = root.get_submodule(name)
            if region.door == "layers":
                before(column, copies)
            if name in layout.gathered:
                after(
                    column,
                    lambda x, again=region.door == "module": copies(whole_features(x)) if again else whole_features(x),
                )
        for name in region.rows:
            row = root.get_submodule(name)
            if name in layout.split:
                before(row, own_features if region.door == "module" else lambda x: own_features(copies(x)))
            after(row, total)
        for (name, attribute), value in region.attributes.items():
            owner = root.get_submodule(name)
            undo.append(partial(setattr, owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, value)
    for name in layout.heads:
        head = root.get_submodule(name)
        rows = layout.weights[f"{name}.weight"]

        def logits(x: Tensor, head: Any = head, rows: Any = rows) -> Tensor:
            parts = [
                F.linear(
                    x,
                    rows.part(head.weight, rank, size),
                    None if head.bias is None else rows.part(head.bias, rank, size),
                )
                for rank in range(size)
            ]
            return torch.cat(parts, -1)[..., : rows.whole]

        replace(head, logits)
    for name in layout.embeddings:
        table = root.get_submodule(name)
        before(table, lambda ids: ids)
        stored = layout.weights[f"{name}.weight"]
        assert torch.equal(stored.restore(stored.store(table.weight)), table.weight)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def _call(module: nn.Module, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """A module's own forward with other weights; the replaced one stands aside meanwhile."""
    replaced = module.__dict__.pop("forward")
    try:
        result: Tensor = functional_call(module, own, (x,))
        return result
    finally:
        module.__dict__["forward"] = replaced
