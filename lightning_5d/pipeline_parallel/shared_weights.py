"""Weights that several stages use: equal values and summed gradients on all ranks that hold them."""

# [Note: shared weights]
# A tied embedding is used by the first stage and the last, and in a bidirectional pipeline every stage lies on two ranks. Each
# owner adds up what its own uses of the weight contribute to the gradient; the sum over the owners is the gradient. Owners
# make the same update from it, so their values stay equal. Owners differ in their place along the pipeline only, so they
# hold the same shard of the weight, and sum shard by shard, each over its own pipeline.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_5d.checkpoint.full_state import gather
from lightning_5d.gradients import give_gradient, values_of
from lightning_5d.mesh import ParallelMesh
from lightning_5d.names import plain_name
from lightning_5d.parallelism import Problem

_BUCKET_BYTES = 64 * 2**20
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Owners:
    """Ranks that hold the same weights.

    Attributes:
        ranks: Along the pipeline.
        weights: First names of the weights, in the module's order.
        group: Those ranks.
    """

    ranks: tuple[int, ...]
    weights: tuple[str, ...]
    group: dist.ProcessGroup


class SharedWeights:
    """The weights of a cut module that other ranks of the pipeline hold as well.

    All ranks of a pipeline make it together.

    Args:
        module: The module, before or after it is cut.
        first_names: Each name of each parameter of the whole module, in order, and the parameter's first name.
        owners: Each name of each parameter of the whole module and the stages that use it.
        placement: For each copy of the parameters, the rank of each stage along the pipeline.
        mesh: The ranks by axis.
    """

    def __init__(
        self,
        module: nn.Module,
        first_names: Mapping[str, str],
        owners: Mapping[str, Sequence[int]],
        placement: Sequence[Sequence[int]],
        mesh: ParallelMesh,
    ) -> None:
        group = mesh.line("pp")
        self._module, self._first_names = module, first_names
        self._rank = dist.get_rank(group)
        stages_of = {plain_name(name): stages for name, stages in owners.items()}
        ranks_of = {
            name: tuple(sorted({placed[stage] for placed in placement for stage in stages_of[name]}))
            for name in dict.fromkeys(first_names.values())
        }
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in ranks_of.items():
            if len(ranks) > 1:
                by_ranks.setdefault(ranks, []).append(name)
        world = dist.get_process_group_ranks(group)
        self._owners: list[_Owners] = []
        for ranks in sorted(by_ranks):  # in one order everywhere: a rank may be in several
            if self._rank not in ranks:
                continue
            members = [world[rank] for rank in ranks]
            own = group
            if len(members) < len(world):
                own = dist.new_group(members, timeout=mesh.timeout, use_local_synchronization=True)
            self._owners.append(_Owners(ranks, tuple(by_ranks[ranks]), own))
        self._counted_by = {name: ranks[0] for name, ranks in ranks_of.items()}
        self._known: dict[int, tuple[Tensor, bool]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """First names of the weights of this rank that others hold as well."""
        return tuple(name for owners in self._owners for name in owners.weights)

    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        """See `lightning_5d.parallelism.Parallelized.gradient_axes`: of several owners the first one counts a gradient."""
        known = self._known.get(id(parameter))
        if known is None or known[0] is not parameter:
            self._known = {
                id(found): (found, self._counted_by.get(name, self._rank) == self._rank)
                for name, found in self.parameters().items()
            }
            known = self._known.get(id(parameter), (parameter, True))
        return ("pp",) if known[1] else None

    def owners_of(self, parameter: Tensor) -> int:
        """How many ranks of the pipeline hold a parameter of this rank."""
        owners = self._shared_with(parameter)
        return 1 if owners is None else len(owners.ranks)

    def group_of(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """The ranks that hold a parameter of this rank, this one included; ``None`` if no other does."""
        owners = self._shared_with(parameter)
        return None if owners is None else owners.group

    def _shared_with(self, parameter: Tensor) -> _Owners | None:
        if not self._owners:
            return None
        names = {name for name, found in self.parameters().items() if found is parameter}
        return next((owners for owners in self._owners if not names.isdisjoint(owners.weights)), None)

    # [Note: groups of shared weights]
    # What a stage lists in `configure_optimizers` may differ between owners: a tied embedding is `embed.weight` on the first stage
    # and only `head.weight` on the last, which may be of another group, and what lists `self.embed.parameters()` finds nothing on the
    # last. In one process the weight is in one group. The first owner that lists it says which.
    def settle_groups(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        """Puts each weight into the group that it has on its first owner; all of them call it, when optimizers are made.

        Returns:
            What cannot be settled.
        """
        parameters = self.parameters()
        homes = {
            id(parameter): (number, group)
            for number, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        problems = []
        for owners in self._owners:
            mine = {
                name: (homes[key][0], _options(homes[key][1]))
                for name in owners.weights
                if (key := id(parameters[name])) in homes
            }
            everyone: list[dict[str, tuple[int, Mapping[str, Any]]]] = [{}] * len(owners.ranks)
            dist.all_gather_object(everyone, mine, group=owners.group)
            for name in owners.weights:
                wanted = next((theirs[name] for theirs in everyone if name in theirs), None)
                if wanted is None or mine.get(name) == wanted:
                    continue
                number, options = wanted
                groups = optimizers[number].param_groups if number < len(optimizers) else []
                target = next((group for group in groups if _options(group) == options), None)
                if target is None:
                    problems.append(_unsettled(name, owners.ranks, mine.get(name), options))
                    continue
                _move(parameters[name], name, homes.get(id(parameters[name]), (0, None))[1], target)
        return problems

    @torch.no_grad()
    def synchronize(self) -> None:
        """Gives all owners the first one's values; all of them call it."""
        parameters = self.parameters()
        for owners in self._owners:
            for bucket in _buckets([(name, parameters[name]) for name in owners.weights]):
                values = [values_of(parameter) for _, parameter in bucket]
                flat = torch.cat([value.detach().reshape(-1) for value in values])
                dist.broadcast(flat, group=owners.group, group_src=0)
                for value, new in zip(values, torch.split(flat, [value.numel() for value in values]), strict=True):
                    value.detach().copy_(new.view(value.shape))

    @torch.no_grad()
    def check_equal(self) -> None:
        """Compares the owners' values; all of them call it.

        Raises:
            MisconfigurationException: On all owners, if they differ, with the names.
        """
        parameters = self.parameters()
        for owners in self._owners:
            sums = [_fingerprint(values_of(parameters[name])) for name in owners.weights]
            mine = torch.stack(sums)
            low, high = mine.clone(), mine.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=owners.group)
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=owners.group)
            different = [name for name, same in zip(owners.weights, (low == high).tolist(), strict=True) if not same]
            if different:
                listed = ", ".join(different[:5]) + (", …" if len(different) > 5 else "")
                raise MisconfigurationException(
                    f"Ranks {', '.join(map(str, owners.ranks))} of the pipeline share {listed}, and have different values. Weights that"
                    " several stages use must change on all of them alike: do it on every rank, or load a checkpoint."
                )

    def check_chosen(self, chosen: Sequence[Tensor], *, together: bool = True) -> None:
        """Compares which weights each owner is about to change; all of them call it.

        Args:
            chosen: Parameters of this rank, any.
            together: All owners of any weight of this rank come. Otherwise those of the chosen ones alone.

        Raises:
            MisconfigurationException: On all owners, if they differ, with the names.
        """
        parameters = self.parameters()
        ids = {id(parameter) for parameter in chosen}
        for owners in self._owners:
            flags = [int(id(parameters[name]) in ids) for name in owners.weights]
            if not together and not any(flags):
                continue
            both = torch.tensor(
                [flags, [1 - flag for flag in flags]], device=values_of(parameters[owners.weights[0]]).device
            )
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=owners.group)
            different = [name for name, count in zip(owners.weights, both.sum(0).tolist(), strict=True) if count > 1]
            if different:
                raise MisconfigurationException(
                    f"Ranks {', '.join(map(str, owners.ranks))} of the pipeline share {', '.join(different[:5])}, and the gradient would change"
                    " on some of them only. Give it on all ranks, under each of its names."
                )

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums gradients over the owners, in place; all of them call it, once per optimizer step.

        An owner without gradient counts as zero and gets the sum; where none has one, there is none after it.

        Raises:
            TypeError: For sparse gradients.
        """
        if not self._owners:
            return
        parameters = self.parameters()
        pending = [
            (bucket, *_send(bucket, owners.group))
            for owners in self._owners
            for bucket in _buckets(
                [(name, parameters[name]) for name in owners.weights if parameters[name].requires_grad]
            )
        ]
        for bucket, flat, work in pending:
            if work is not None:
                work.wait()
            _take(bucket, flat)

    def parameters(self) -> dict[str, Tensor]:
        """All parameters of this rank, each by its first name in the whole module."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            plain = plain_name(name)
            found[self._first_names.get(plain, plain)] = parameter
        return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = gather({k: v for k, v in group.items() if k not in ("params", "param_names")}, keep=True)
    return found


def _move(parameter: Tensor, name: str, source: dict[str, Any] | None, target: dict[str, Any]) -> None:
    text = name
    if source is not None:
        index = next(index for index, each in enumerate(source["params"]) if each is parameter)
        del source["params"][index]
        if "param_names" in source:
            text = source["param_names"].pop(index)
    target["params"].append(parameter)
    if "param_names" in target:
        target["param_names"].append(text)


def _unsettled(
    name: str, ranks: Sequence[int], mine: tuple[int, Mapping[str, Any]] | None, wanted: Mapping[str, Any]
) -> Problem:
    have = {} if mine is None else mine[1]
    differing = {key: (have.get(key, "nothing"), value) for key, value in wanted.items() if have.get(key) != value}
    listed = ", ".join(f"{key}={theirs} and {key}={own}" for key, (own, theirs) in list(differing.items())[:3])
    return Problem(
        f"{name} is shared by ranks {', '.join(map(str, ranks))} of the pipeline, whose optimizers have it with {listed}.",
        "Let configure_optimizers make the same groups on every stage, also those that are empty there.",
    )


Bucket = Sequence[tuple[str, Tensor]]


def _buckets(weights: Bucket) -> Iterator[Bucket]:
    """Weights of one dtype, some tens of megabytes at a time; the same ones on all owners."""
    by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, parameter in weights:
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    for members in by_dtype.values():
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, parameter in members:
            # Full sizes: shards may be of unequal length, and owners must agree.
            nbytes = parameter.numel() * parameter.element_size()
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, parameter))
            size += nbytes
        yield bucket


def _send(bucket: Bucket, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    """Begins the sum of a bucket's gradients, followed by the number of owners that have one for each weight."""
    locals_ = [values_of(parameter) for _, parameter in bucket]
    dtype = torch.float32 if locals_[0].dtype in _HALF else locals_[0].dtype
    device = locals_[0].device
    parts, used = [], []
    for (name, parameter), local in zip(bucket, locals_, strict=True):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"The gradient of {name} is sparse, and the weight is shared by several ranks of the pipeline. Use"
                " sparse=False for its embedding."
            )
        used.append(float(parameter.grad is not None))
        grad = torch.zeros(local.shape, device=device) if parameter.grad is None else values_of(parameter.grad)
        parts.append(grad.reshape(-1).to(dtype))
    flat = torch.cat([*parts, torch.tensor(used, dtype=dtype, device=device)])
    return flat, dist.all_reduce(flat, group=group, async_op=True)


def _take(bucket: Bucket, flat: Tensor) -> None:
    sizes = [values_of(parameter).numel() for _, parameter in bucket]
    *sums, used = torch.split(flat, [*sizes, len(bucket)])
    for (_, parameter), total, is_used in zip(bucket, sums, used.tolist(), strict=True):
        if is_used:
            give_gradient(parameter, total)


def _fingerprint(values: Tensor) -> Tensor:
    """A number that equal values have in common, and others hardly."""
    wide = values.detach().double() if values.device.type != "mps" else values.detach().float()
    flat = torch.nan_to_num(wide.reshape(-1))
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype).remainder_(65521.0)
    return (flat * weights).sum()
