"""Between the state of ranks that hold different stages of a module and the state of the whole module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_5d.checkpoint.forms import Formed, whole_tensor
from lightning_5d.checkpoint.full_state import gather
from lightning_5d.checkpoint.parameter_groups import Group, Joined, join_groups
from lightning_5d.mesh import ParallelMesh
from lightning_5d.names import plain_name
from lightning_5d.parallelism import StoredForm

_BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))
"""What torch's learning-rate schedules (2.13) keep for each parameter group."""

_NOBODY = ""
"""In the place of the name of a parameter that no checkpoint has."""

Order = Callable[[Sequence[Sequence[Any]]], Sequence[Any]]
"""Of the keys of each rank: all of them in one order."""


class _Outline(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Stages:
    """The ranks that hold the stages of one module, and the names the whole module has.

    Weights of several stages are held by several ranks, with equal values; the first one's count.

    Attributes:
        group: The ranks along the pipeline.
        device: Where its messages are.
        keys: Keys of the whole module's state dict, in order.
        first_names: Each name of each parameter of the whole module, in order, and the first name of that parameter.
    """

    group: dist.ProcessGroup
    device: torch.device
    keys: tuple[str, ...]
    first_names: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module, mesh: ParallelMesh) -> Stages:
        """To be called before the module is cut.

        Args:
            module: The whole module.
            mesh: The ranks by axis.
        """
        keys = tuple(plain_name(key) for key in module.state_dict())
        return cls(mesh.line("pp"), mesh.device, keys, first_names(module))

    def module_state(self, state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """The whole module's state from that of the stages; every rank calls it.

        Args:
            state: This rank's, under plain names, maybe sharded.
            keep: Whether this rank keeps the values; elsewhere tensors come back on the meta device.
        """
        position = {key: index for index, key in enumerate(self.keys)}
        return self._collect(state, lambda lists: _in_order(lists, position), keep=keep)

    def by_parameter(self, values: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """One value for each parameter of the whole module, by its first name; every rank calls it.

        Args:
            values: This rank's, by parameter name, maybe sharded, such as gradients.
            keep: As for `module_state`.
        """
        named = {self._first(name): value for name, value in values.items()}
        return self._collect(named, lambda lists: _in_order(lists, self._positions()), keep=keep)

    def optimizer_state(
        self, state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module, *, keep: bool
    ) -> dict[str, Any]:
        """The state dict of the optimizer that one process would have; every rank calls it.

        Args:
            state: This rank's state dict, maybe sharded.
            optimizer: Whose it is.
            module: The module whose parameters it changes.
            keep: As for `module_state`.

        Raises:
            ValueError: If the optimizer has parameters that the module does not have.
        """
        names = self._names(optimizer, module)
        joined = self._joined(optimizer, names, module)
        numbers = joined.numbers
        by_index = {
            index: name
            for group, group_names in zip(state["param_groups"], names, strict=True)
            for index, name in zip(group["params"], group_names, strict=True)
        }
        flat: dict[tuple[Any, Any], Any] = {}
        for index, entries in state["state"].items():
            key = by_index.get(index, index)
            if key is None:
                continue
            flat[key, None] = None  # a parameter may have a state that is empty
            flat.update(
                {(key, entry): value for entry, value in entries.items()} if isinstance(entries, Mapping) else {}
            )
        found = self._collect(flat, lambda lists: _by_number(lists, numbers), keep=keep)
        whole: dict[Any, dict[str, Any]] = {}
        for (key, entry), value in found.items():
            of_key = whole.setdefault(numbers.get(key, key), {})
            if entry is not None:
                of_key[entry] = value
        groups = []
        for group in joined.groups:
            own = {} if group.own_names is None else {"param_names": [group.own_names[name] for name in group.names]}
            groups.append({**group.options, **own, "params": [numbers[name] for name in group.names]})
        others = {key: gather(value, keep=keep) for key, value in state.items() if key not in ("state", "param_groups")}
        return {**others, "state": whole, "param_groups": groups}

    def scheduler_state(self, state: Any, optimizer: Optimizer, module: nn.Module) -> Any:
        """The state of the learning-rate schedule that one process would have, from this rank's; every rank calls it."""
        joined = self._joined(optimizer, self._names(optimizer, module), module)
        everyone = self._gathered(state)
        return _joined_schedules(everyone, joined.places, len(joined.groups))

    def own_scheduler_state(self, state: Any, optimizer: Optimizer, module: nn.Module) -> Any:
        """A whole schedule's state cut to the groups that this rank has; every rank calls it."""
        joined = self._joined(optimizer, self._names(optimizer, module), module)
        return _own_schedule(state, joined.places[dist.get_rank(self.group)], len(joined.groups))

    def missing_and_unexpected(self, state: Mapping[str, Any], module: nn.Module) -> tuple[list[str], list[str]]:
        """Keys that the whole module has and a state dict has not, and the reverse."""
        mine = {plain_name(key): None for key in module.state_dict()}
        given = {plain_name(key) for key in state}
        needed = dict.fromkeys([*self.keys, *mine])
        return [key for key in needed if key not in given], [key for key in state if plain_name(key) not in needed]

    def own_module_state(self, state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
        """What this rank needs of a whole module's state, and what nobody needs."""
        mine = {plain_name(key) for key in module.state_dict()}
        elsewhere = set(self.keys) - mine
        return {key: value for key, value in state.items() if plain_name(key) not in elsewhere}

    def own_optimizer_state(
        self,
        state: Mapping[str, Any],
        optimizer: Optimizer,
        module: nn.Module,
        forms: Mapping[int, StoredForm] | None = None,
    ) -> dict[str, Any]:
        """A whole optimizer's state dict cut to the parameters that this rank holds; every rank calls it.

        Args:
            state: The whole one.
            optimizer: This rank's.
            module: The module whose parameters it changes.
            forms: Those of parameters that are stored in another form than in a checkpoint, by id.

        Raises:
            ValueError: If the groups hold other numbers of parameters than those of the optimizers on all stages together, or a
                parameter's state is that of another.
        """
        names = self._names(optimizer, module)
        joined = self._joined(optimizer, names, module)
        saved = [len(group["params"]) for group in state["param_groups"]]
        wanted = [len(group.names) for group in joined.groups]
        if saved != wanted:
            raise ValueError(
                f"The checkpoint's optimizer has groups of {saved} parameters, this one has {wanted} on all stages together: the"
                " module or its `configure_optimizers` is not the one that was saved."
            )
        known = {
            name: index
            for group, whole in zip(joined.groups, state["param_groups"], strict=True)
            for name, index in zip(group.names, whole["params"], strict=True)
        }
        groups, entries, number = [], dict[Any, Any](), 0
        numbered = set(known.values())
        parameters = {self._first(name): parameter for name, parameter in module.named_parameters()}
        entries.update({key: value for key, value in state["state"].items() if key not in numbered})
        for place, group_names in zip(joined.places[dist.get_rank(self.group)], names, strict=True):
            whole = dict(state["param_groups"][place])
            if "param_names" in whole:
                texts = dict(zip(whole["params"], whole["param_names"], strict=True))
                whole["param_names"] = [texts[known[n]] if n is not None else _NOBODY for n in group_names]
            whole["params"] = list(range(number, number + len(group_names)))
            for name in group_names:
                if name is not None and known[name] in state["state"]:
                    entries[number] = state["state"][known[name]]
                    form = (forms or {}).get(id(parameters[name]))
                    shape = parameters[name].shape
                    _check_shapes(name, entries[number], shape if form is None else form.whole_shape(shape))
                number += 1
            groups.append(whole)
        return {**state, "state": entries, "param_groups": groups}

    def _names(self, optimizer: Optimizer, module: nn.Module) -> list[list[str | None]]:
        """First names of the optimizer's parameters, by group; ``None`` for one without elements in the place of others."""
        known = {id(parameter): name for name, parameter in module.named_parameters()}
        names: list[list[str | None]] = []
        for group in optimizer.param_groups:
            names.append([])
            for parameter in group["params"]:
                name = known.get(id(parameter))
                if name is None and parameter.numel() > 0:
                    raise ValueError(
                        f"The optimizer has a parameter of shape {tuple(parameter.shape)} that {type(module).__name__} does not"
                        " have, so it is unknown which stage of the pipeline it belongs to. Assign it to the module in __init__."
                    )
                names[-1].append(None if name is None else self._first(name))
        return names

    def _joined(self, optimizer: Optimizer, names: Sequence[Sequence[str | None]], module: nn.Module) -> Joined:
        under_first = {plain_name(name) for name, _ in module.named_parameters()}
        groups = []
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            texts = group.get("param_names")
            own = None if texts is None else {n: t for n, t in zip(group_names, texts, strict=True) if n is not None}
            held = tuple(name for name in group_names if name is not None)
            placed = tuple(name for name in held if name in under_first)
            groups.append(Group(gather(options, keep=True), held, placed, own))
        return join_groups(self._gathered(groups), self._positions())

    def _collect(self, values: Mapping[Any, Any], order: Order, *, keep: bool) -> dict[Any, Any]:
        """All entries of all ranks; tensors travel one at a time, to those ranks that keep them."""
        outlines = {key: _outline(value) for key, value in values.items()}
        everyone = self._gathered((keep, outlines))
        me = dist.get_rank(self.group)
        keepers = [rank for rank, (keeps, _) in enumerate(everyone) if keeps]
        owners: dict[Any, int] = {}
        for rank, (_, theirs) in enumerate(everyone):
            for key in theirs:
                owners.setdefault(key, rank)
        found: dict[Any, Any] = {}
        for key in order([list(theirs) for _, theirs in everyone]):
            owner = owners[key]
            outline = everyone[owner][1][key]
            if not isinstance(outline, _Outline):
                found[key] = outline
            elif owner == me:
                found[key] = self._hand_out(values[key], [rank for rank in keepers if rank != me], keep=keep)
            elif keep:
                found[key] = self._receive(outline, owner)
            else:
                found[key] = torch.empty(outline.shape, dtype=outline.dtype, device="meta")
        return found

    def _hand_out(self, value: Tensor | Formed, keepers: Sequence[int], *, keep: bool) -> Tensor:
        if not keepers:
            whole: Tensor = gather(value, keep=keep)
            return whole
        whole = whole_tensor(value).detach().to(self.device)
        if whole.numel():
            for rank in keepers:
                dist.send(_bytes(whole.contiguous()), group=self.group, group_dst=rank)
        return gather(whole, keep=keep)  # type: ignore[no-any-return]

    def _receive(self, outline: _Outline, owner: int) -> Tensor:
        whole = torch.empty(outline.shape, dtype=outline.dtype, device=self.device)
        if whole.numel():
            dist.recv(_bytes(whole), group=self.group, group_src=owner)
        return whole.cpu()

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _positions(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(dict.fromkeys(self.first_names.values()))}

    def _first(self, name: str) -> str:
        plain = plain_name(name)
        return self.first_names.get(plain, plain)


def first_names(module: nn.Module) -> dict[str, str]:
    """Each name of each parameter, in order, and the first name that the same parameter has."""
    first: dict[int, str] = {}
    return {
        plain_name(name): first.setdefault(id(parameter), plain_name(name))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _joined_schedules(states: Sequence[Any], places: Sequence[Sequence[int]], count: int) -> Any:
    first = states[0]
    if isinstance(first, list):
        return [_joined_schedules(each, places, count) for each in zip(*states, strict=True)]
    if not isinstance(first, dict):
        return first
    found = {}
    for key, value in first.items():
        if key not in _BY_GROUP or not isinstance(value, list):
            found[key] = _joined_schedules([state[key] for state in states], places, count)
            continue
        whole: list[Any] = [None] * count
        for state, mine in zip(states, places, strict=True):
            for place, each in zip(mine, state[key], strict=True):
                whole[place] = each
        found[key] = whole
    return found


def _own_schedule(state: Any, places: Sequence[int], count: int) -> Any:
    if isinstance(state, list):
        return [_own_schedule(each, places, count) for each in state]
    if not isinstance(state, dict):
        return state
    return {
        key: [value[place] for place in places]
        if key in _BY_GROUP and isinstance(value, list) and len(value) == count
        else _own_schedule(value, places, count)
        for key, value in state.items()
    }


def _check_shapes(name: str, entries: Any, wanted: Sequence[int]) -> None:
    if not isinstance(entries, Mapping):
        return
    shapes = {tuple(value.shape) for value in entries.values() if isinstance(value, Tensor) and value.ndim > 0}
    if len(shapes) == 1 and (shape := shapes.pop()) != tuple(wanted) and len(shape) == len(wanted):
        raise ValueError(
            f"The checkpoint's optimizer state at the place of {name}, of shape {tuple(wanted)}, is of shape {shape}. A"
            " checkpoint numbers parameters in the order of `configure_optimizers`, which a pipeline infers from that of its"
            " stages: list parameters as the module does, or load into the layout that saved it."
        )


def _outline(value: Any) -> Any:
    """What there is to know about a tensor beforehand; anything else itself, with tensors inside of it whole."""
    if isinstance(value, Formed) or (isinstance(value, Tensor) and value.layout == torch.strided):
        return _Outline(tuple(value.shape), value.dtype)
    return gather(value, keep=True)


def _bytes(tensor: Tensor) -> Tensor:
    # Backends do not send all dtypes.
    return tensor.view(-1).view(torch.uint8)


def _in_order(lists: Sequence[Sequence[Any]], position: Mapping[Any, int]) -> list[Any]:
    """All keys by their position; one that has none comes after the one it follows in its own list."""
    places: dict[Any, tuple[int, int]] = {}
    for keys in lists:
        place = (-1, 0)
        for key in keys:
            place = (position[key], 0) if key in position else (place[0], place[1] + 1)
            places.setdefault(key, place)
    return sorted(places, key=places.__getitem__)


def _by_number(lists: Sequence[Sequence[tuple[Any, Any]]], numbers: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    keys = dict.fromkeys(key for keys in lists for key in keys)
    return sorted(keys, key=lambda key: numbers.get(key[0], -1))
