"""Between sharded state in memory and whole tensors in a file.

A checkpoint of a parallel run is the file one process would have written: plain tensors under plain names, optimizer state by
parameter index. So it can be read with or without `FiveD`, and under another layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_5d.checkpoint.forms import Formed, Forms, is_elementwise, whole_tensor
from lightning_5d.names import plain_name
from lightning_5d.parallelism import StoredForm


def gather(state: Any, *, keep: bool) -> Any:
    """Whole tensors from sharded ones, on the CPU; every rank calls it with the same structure.

    Args:
        state: Nested mappings and sequences of tensors and anything else.
        keep: Whether this rank keeps the values. Where not, tensors come back on the meta device: same names, shapes and
            dtypes, no memory.

    Returns:
        The same structure without any `DTensor`.
    """
    if isinstance(state, DTensor | Formed):
        whole = whole_tensor(state)
        if not keep:
            return whole.detach().to("meta")
        # On one rank, and where the tensor is replicated, it is no new memory.
        stored = state.stored if isinstance(state, Formed) else state
        own = stored.to_local() if isinstance(stored, DTensor) else stored
        return whole.detach().to("cpu", copy=whole.data_ptr() == own.data_ptr())
    if isinstance(state, Tensor):
        # A copy: the file must not change when training goes on while it is written.
        return state.detach().to("cpu", copy=True) if keep else state.detach().to("meta")
    if isinstance(state, Mapping):
        items = {key: gather(value, keep=keep) for key, value in state.items()}
        return items if type(state) is dict else like_mapping(state, items)
    if isinstance(state, list | tuple) and type(state) in (list, tuple):
        return type(state)(gather(value, keep=keep) for value in state)
    return state


def place_like(value: Tensor, like: Tensor, form: StoredForm | None = None) -> Tensor:
    """A whole tensor cut to the shards of `like`, without communication; plain where `like` is plain."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    local = value.to(like.device)
    if form is not None:
        local = form.store(local)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def place_module_state(state: Mapping[str, Any], module: nn.Module, forms: Forms | None = None) -> dict[str, Any]:
    """A module's whole state dict cut to this rank's shards, ready for ``module.load_state_dict``.

    Blocks may be wrapped (compiled, checkpointed) here and not where the state comes from, or the reverse. Shapes that do not fit
    are passed through whole, so that ``load_state_dict`` names them as it always does.

    Raises:
        RuntimeError: If a weight that is stored in another form has not the shape that a checkpoint of this module has.
    """
    by_name = {} if forms is None else forms.by_name
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    targets = {plain_name(name): tensor for name, tensor in named}
    wrapped = {plain_name(key): key for key in module.state_dict()}
    placed: dict[str, Any] = {}
    for key, value in state.items():
        plain = plain_name(key)
        like, form = targets.get(plain), by_name.get(plain)
        if isinstance(value, Tensor) and like is not None:
            shape = like.shape if form is None else form.whole_shape(like.shape)
            if value.shape == shape:
                value = place_like(value, like, form)
            elif form is not None:
                raise RuntimeError(
                    f"Error(s) in loading state_dict for {type(module).__name__}:\n\tsize mismatch for {plain}: copying a param"
                    f" with shape {value.shape} from checkpoint, the shape in current model is {shape}."
                )
        placed[wrapped.get(plain, key)] = value
    return placed


def with_plain_names(state: Mapping[str, Any]) -> Any:
    """A module's state dict under the names its entries have when nothing is wrapped."""
    return like_mapping(state, {plain_name(key): value for key, value in state.items()})


def place_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, forms: Mapping[int, StoredForm] | None = None
) -> dict[str, Any]:
    """An optimizer's whole state dict cut to this rank's shards, ready for ``optimizer.load_state_dict``.

    State tensors of their parameter's shape (momentum, variance) are cut as the parameter is; others (step counts) stay whole.

    Args:
        state: Of one process.
        optimizer: Of this rank.
        forms: Those of parameters that are stored in another form than in a checkpoint, by id.

    Raises:
        ValueError: If the groups hold other numbers of parameters than the optimizer's.
    """
    saved = [len(group["params"]) for group in state["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if saved != mine:
        raise ValueError(
            f"The checkpoint's optimizer has groups of {saved} parameters, this one has {mine}: the module or its"
            " `configure_optimizers` is not the one that was saved."
        )
    parameters: dict[Any, Tensor] = {}
    for saved_group, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        parameters.update(zip(saved_group["params"], group["params"], strict=True))
    placed = {
        index: {
            key: _place_entry(key, value, parameters[index], (forms or {}).get(id(parameters[index])))
            for key, value in entries.items()
        }
        for index, entries in state["state"].items()
    }
    return {**state, "state": placed}


def _place_entry(key: str, value: Any, parameter: Tensor, form: StoredForm | None) -> Any:
    shape = parameter.shape if form is None else form.whole_shape(parameter.shape)
    return place_like(value, parameter, form) if is_elementwise(key, value, shape) else value


def like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Entries in a mapping of the original's type."""
    # state_dict() returns an OrderedDict with a `_metadata` attribute that load_state_dict reads.
    copy = type(original)(items)  # type: ignore[call-arg]
    if hasattr(original, "_metadata"):
        copy._metadata = original._metadata  # type: ignore[attr-defined]
    return copy


def contains_sharded(module: nn.Module) -> bool:
    """Whether any of the module's parameters is a `DTensor`."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())
