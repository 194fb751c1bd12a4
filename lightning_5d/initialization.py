"""Initial values that do not depend on the layout.

Weights that exist when `FiveD` sees them are kept, and rank 0's values are everyone's. Weights still on the meta device are
filled module by module, at full size, from a generator seeded by the run's seed and the module's name, and cut to the local
shard at once: a value is a function of seed and name, never of rank, and the peak is one module.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_5d.names import plain_name
from lightning_5d.parallelism import StoredForm

_BROADCAST_BUCKET_BYTES = 64 * 1024 * 1024


def run_seed() -> int:
    """The seed that `lightning.seed_everything` set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def module_seed(seed: int, name: str) -> int:
    """A 63-bit seed from the run's seed and a module's fully-qualified name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Sets the CPU's generator, and that of the device if it is another."""
    # Not `torch.manual_seed`: it looks for every kind of device there is, and through the whole call stack, each time.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def meta_tensors(module: nn.Module) -> list[str]:
    """Names of the module's parameters and buffers that are on the meta device."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


def synchronize_values(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Gives every rank of the group the values of its first rank: parameters and buffers that exist.

    Args:
        module: A module with plain (not yet sharded) tensors, the same structure on every rank.
        group: The ranks; the whole world if ``None``.
    """
    if dist.get_world_size(group) == 1:
        return
    seen: set[int] = set()
    tensors: list[Tensor] = []
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors.append(tensor.detach())
    # Checked with torch 2.13: the coalesced broadcast that DDP uses; it groups by dtype and writes in place.
    source = dist.get_global_rank(group, 0) if group is not None else 0
    everyone = dist.group.WORLD if group is None else group
    if tensors and everyone is not None:
        dist._broadcast_coalesced(everyone, tensors, _BROADCAST_BUCKET_BYTES, source)


def materialize(
    module: nn.Module,
    device: torch.device,
    seed: int | None = None,
    forms: Mapping[str, StoredForm] | None = None,
) -> None:
    """Moves every meta tensor of the module to the device, with values from seed and name.

    Tensors may already be sharded (`DTensor`): each rank then makes the whole of one module at a time and keeps its shard.

    Args:
        module: Any module; parts that are not on the meta device are left alone.
        device: Where the values go.
        seed: The run's seed; `run_seed()` if ``None``.
        forms: Those of weights that ranks store in another form than one process has them in, by name.

    Raises:
        ValueError: If a module has meta tensors but no way to set them (``reset_parameters()``, or ``_init_weights`` of
            an enclosing Hugging Face model); names every such tensor.
    """
    if not meta_tensors(module):
        return
    seed = run_seed() if seed is None else seed
    filled: dict[int, Tensor] = {}
    orphans: list[str] = []
    for name, owner, initialize in _owners(module):
        own = {**owner._parameters, **owner._buffers}
        meta = {key: tensor for key, tensor in own.items() if tensor is not None and tensor.is_meta}
        if all(id(tensor) in filled for tensor in meta.values()):  # tied to a module that has been filled
            for key, tensor in meta.items():
                _replace(owner, key, filled[id(tensor)])
            continue
        if initialize is None:
            orphans += [f"{name}.{key}" if name else key for key in meta]
            continue
        plain = plain_name(name)
        of_key = {key: (forms or {}).get(f"{plain}.{key}" if plain else key) for key in meta}
        values = _initial_values(owner, initialize, device, module_seed(seed, plain), of_key)
        for key, tensor in meta.items():
            if id(tensor) not in filled:
                form = of_key[key]
                value = values[key] if form is None else form.store(values[key])
                filled[id(tensor)] = _placed(value, tensor, device)
            _replace(owner, key, filled[id(tensor)])
    if orphans:
        raise ValueError(
            f"{len(orphans)} tensors are on the meta device and nothing says how to fill them: {', '.join(orphans[:10])}"
            f"{', …' if len(orphans) > 10 else ''}. Give the modules that own them a `reset_parameters()` method that sets"
            " all their parameters and buffers, or build the module without `empty_init=True`."
        )


def _owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None] | None]]:
    """Modules that own meta tensors, with the function that initializes one, if there is any."""
    enclosing: dict[str, Callable[[nn.Module], None]] = {}
    for name, owner in module.named_modules():
        # Hugging Face models initialize their parts from the outside, by one method for all of them.
        initializer = getattr(owner, "_init_weights", None)
        if callable(initializer):
            enclosing[name] = initializer
        tensors = [*owner._parameters.values(), *owner._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            continue
        own = getattr(type(owner), "reset_parameters", None) or getattr(type(owner), "_reset_parameters", None)
        outer = [prefix for prefix in enclosing if not prefix or name == prefix or name.startswith(prefix + ".")]
        if outer:
            yield name, owner, enclosing[max(outer, key=len)]
        else:
            yield name, owner, own


def _initial_values(
    owner: nn.Module,
    initialize: Callable[[nn.Module], None],
    device: torch.device,
    seed: int,
    forms: Mapping[str, StoredForm | None],
) -> dict[str, Tensor]:
    """Full-size values of a module's own tensors, made on a copy so that the original may be sharded."""
    twin = _shallow_copy(owner)
    object.__setattr__(twin, "_parameters", dict(owner._parameters))
    object.__setattr__(twin, "_buffers", dict(owner._buffers))
    # Children are copied whole: an initializer that also sets them must not touch the originals.
    children = {key: _empty_copy(child, device) for key, child in owner._modules.items() if child is not None}
    object.__setattr__(twin, "_modules", children)
    for key, parameter in owner._parameters.items():
        if parameter is not None and parameter.is_meta:
            form = forms.get(key)
            shape = parameter.shape if form is None else form.whole_shape(parameter.shape)
            empty = torch.empty(shape, dtype=parameter.dtype, device=device)
            twin._parameters[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for key, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            twin._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    devices = [device.index or 0] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        seed_generators(seed, device)
        initialize(twin)
    values = {**twin._parameters, **twin._buffers}
    return {key: tensor.detach() for key, tensor in values.items() if tensor is not None}


def _empty_copy(child: nn.Module, device: torch.device) -> nn.Module:
    """The same module with tensors of its own, down to the last one inside."""
    if not any(True for _ in child.parameters()):
        return child
    twin = _shallow_copy(child)
    parameters = {
        key: None if p is None else nn.Parameter(_own(p, device), p.requires_grad)
        for key, p in child._parameters.items()
    }
    buffers = {key: None if b is None else _own(b, device) for key, b in child._buffers.items()}
    modules = {key: None if m is None else _empty_copy(m, device) for key, m in child._modules.items()}
    for name, tensors in (("_parameters", parameters), ("_buffers", buffers), ("_modules", modules)):
        object.__setattr__(twin, name, tensors)
    return twin


def _shallow_copy(module: nn.Module) -> nn.Module:
    # Not by `copy`: sharded modules refuse that, or are constructed anew (FSDP2 in torch 2.13).
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    return twin


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return tensor.detach().clone()


def _placed(full: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """The full value as `like` is placed: a parameter stays a parameter, a shard a shard."""
    value = full
    if isinstance(like, DTensor):
        # No source rank: every rank has made the same values, so nothing needs to be sent.
        value = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    if isinstance(like, nn.Parameter):
        return nn.Parameter(value, requires_grad=like.requires_grad)
    return value.to(device)


def _replace(owner: nn.Module, key: str, value: Tensor) -> None:
    if key in owner._parameters:
        owner._parameters[key] = value if isinstance(value, nn.Parameter) else nn.Parameter(value)
    else:
        owner._buffers[key] = value
