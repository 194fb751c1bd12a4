"""Norms and clipping by the functions of torch and Lightning, where each rank has the gradients of its own stages."""

# [Note: gradients by hand]
# `torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)` in a hook sees the gradients of one stage, and its number looks like any
# other. So while a module trains in stages, the functions that people take norms and clip with are replaced, in place: whoever has
# imported them before has the replacement, and nobody has it afterwards. A call is one of all ranks, also of those that have none of the
# parameters. Ranks first compare what they are about to do. Where they have given parts of the model, they look whether those parts
# belong to one call of one process: `for p in self.parameters(): clip_grad_norm_([p], 1.0)` comes by on each stage with another weight.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grads as lightning_grads
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad as torch_clipping

from lightning_5d.gradients import clip_by_value, clip_factor, global_norms, scale_gradients, values_of
from lightning_5d.names import plain_name
from lightning_5d.pipeline_parallel.parts_of_calls import Given, counted_by, problem_of
from lightning_5d.replaced_functions import replaced_inside, replaced_wholly

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.pipeline_parallel.pipelined import Pipelined
    from lightning_5d.pipeline_parallel.shared_weights import SharedWeights
    from lightning_5d.steps import ParallelSteps


class WholeGradients:
    """What takes the place of functions for gradients while a module trains in stages.

    Args:
        strategy: Whose gradients they are.
        pipeline: Its pipeline.
        host_group: All ranks, on a backend for the host.
    """

    def __init__(self, strategy: ParallelSteps, pipeline: Pipelined, host_group: dist.ProcessGroup) -> None:
        self._strategy, self._pipeline, self._group = strategy, pipeline, host_group
        self._originals: dict[str, Callable[..., Any]] = {}
        self._as_before = False
        self._calls = 0
        self._known_calls: dict[tuple[int, ...], list[Given]] = {}

    @contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """A context in which calls of those functions come here."""
        with ExitStack() as contexts:
            for function, mine in (
                (torch_clipping.clip_grad_norm_, self.clip_grad_norm_),
                (torch_clipping._get_total_norm, self.get_total_norm),
                (torch_clipping._clip_grads_with_norm_, self.clip_grads_with_norm_),
                (torch_clipping.clip_grad_value_, self.clip_grad_value_),
            ):
                self._originals[function.__name__] = contexts.enter_context(replaced_inside(function, "func", mine))
            whole = contexts.enter_context(replaced_wholly(lightning_grads.grad_norm, self.grad_norm))
            self._originals["grad_norm"] = whole
            yield

    # What is called in their place

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """See `torch.nn.utils.clip_grad_norm_`."""
        name = "clip_grad_norm_"
        if self._as_before or isinstance(parameters, Tensor):
            return self._original(name, parameters, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        parameters = list(parameters)
        if self._are_others(name, parameters):
            return self._original(name, parameters, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        what = f"{name}(max_norm={float(max_norm):g}, norm_type={float(norm_type):g})"
        norm = self._norm(what, parameters, float(norm_type), error_if_nonfinite)
        scale_gradients(parameters, clip_factor(float(max_norm), norm))
        return norm

    def get_total_norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """See `torch.nn.utils.get_total_norm`."""
        if self._as_before or isinstance(tensors, Tensor):
            return self._original("_get_total_norm", tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        what = f"get_total_norm(norm_type={float(norm_type):g})"
        return self._norm(what, self._parameters_of(list(tensors)), float(norm_type), error_if_nonfinite)

    def clip_grads_with_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> None:
        """See `torch.nn.utils.clip_grads_with_norm_`."""
        name = "_clip_grads_with_norm_"
        if self._as_before or isinstance(parameters, Tensor):
            self._original(name, parameters, max_norm, total_norm, foreach)
            return
        parameters = list(parameters)
        if self._are_others("clip_grads_with_norm_", parameters):
            self._original(name, parameters, max_norm, total_norm, foreach)
            return
        self._begin(f"clip_grads_with_norm_(max_norm={float(max_norm):g})", parameters)
        norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        scale_gradients(parameters, clip_factor(float(max_norm), norm))

    def clip_grad_value_(
        self, parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        """See `torch.nn.utils.clip_grad_value_`; each rank may call it by itself, once gradients of shared weights are complete."""
        if self._as_before or isinstance(parameters, Tensor):
            self._original("clip_grad_value_", parameters, clip_value, foreach)
            return
        parameters = list(parameters)
        if self._are_others("clip_grad_value_", parameters):
            self._original("clip_grad_value_", parameters, clip_value, foreach)
            return
        if self._shared.names:
            self._complete()
            self._shared.check_chosen(parameters)
        clip_by_value(parameters, float(clip_value))

    @torch.no_grad()
    def grad_norm(self, module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
        """See `lightning.pytorch.utilities.grad_norm`; all ranks get all keys."""
        p = float(norm_type)
        named = {plain_name(name): found for name, found in module.named_parameters() if found.grad is not None}
        if self._are_others("grad_norm", list(named.values())):
            return self._originals["grad_norm"](module, norm_type, group_separator)  # type: ignore[no-any-return]
        given = self._begin(f"grad_norm(norm_type={p:g})", named.values(), {id(x): n for n, x in named.items()})
        mine = {first: parameter for first, parameter in self._named.items() if parameter.grad is not None}
        counted = counted_by(given, self._mesh.by_stage)
        place = self._mesh.rank("pp")
        groups = [[mine[first]] if at == place and first in mine else [] for first, (at, _) in counted.items()]
        if not groups:
            return {}
        found = global_norms(groups, self._mesh, p, self._axes_of_others).to(torch.get_default_dtype())
        norms = {
            f"grad_{p}_norm{group_separator}{name}": norm
            for (_, name), norm in zip(counted.values(), found, strict=True)
        }
        return {**norms, f"grad_{p}_norm_total": found.norm(p)}

    # How

    def _norm(self, what: str, parameters: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
        self._begin(what, parameters)
        exact = global_norms([parameters], self._mesh, norm_type, self._strategy.gradient_axes)[0]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = exact.to(grads[0].real.dtype if grads else torch.get_default_dtype())
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients of all stages is non-finite, so it cannot be clipped. Leave"
                " error_if_nonfinite=True out to scale the gradients by it anyway."
            )
        return norm

    def _begin(self, what: str, parameters: Iterable[Tensor], names: dict[int, str] | None = None) -> list[Given]:
        """Where all ranks come together: what each of them has given, once it is known to make sense."""
        self._strategy.settle_step()
        trainer = self._strategy.connected_module.trainer
        self._calls += 1
        at = (what, trainer.current_epoch, trainer.fit_loop.batch_idx, self._calls)
        given = self._given(parameters, names)
        met: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(met, (at, hash(given), self._is_incomplete), group=self._group)
        if any(not isinstance(each, tuple) or each[0] != at for each in met):
            raise MisconfigurationException(_parted(met))
        if any(incomplete for _, _, incomplete in met):
            raise MisconfigurationException(_incomplete(what))
        key = tuple(digest for _, digest, _ in met)
        if key not in self._known_calls:
            everyone: list[Any] = [None] * len(met)
            dist.all_gather_object(everyone, given, group=self._group)
            problem = None if names is not None else problem_of(everyone, self._mesh.by_stage)
            if problem is not None:
                raise MisconfigurationException(f"{what}: {problem}")
            self._known_calls[key] = everyone
        self._strategy.sum_up_gradients()
        return self._known_calls[key]

    def _given(self, parameters: Iterable[Tensor], names: dict[int, str] | None) -> Given:
        chosen = {id(parameter): parameter for parameter in parameters}
        # An empty shard neither has a norm nor can be told from another one.
        held = {id(x): first for first, x in self._named.items() if names is not None or _has_elements(x)}
        listed = tuple((held[key], (names or held)[key]) for key in held if key in chosen)
        mine = frozenset(first for first, _ in listed)
        groups = []
        for number, optimizer in enumerate(self._strategy.optimizers):
            of_groups = [
                frozenset(held[id(parameter)] for parameter in group["params"] if id(parameter) in held)
                for group in optimizer.param_groups
            ]
            groups += [(number, index) for index, group in enumerate(of_groups) if group == mine]
            groups += [(number, -1)] if mine == frozenset().union(*of_groups) else []
        return Given(listed, frozenset(held.values()), frozenset(groups))

    def _are_others(self, name: str, parameters: Sequence[Tensor]) -> bool:
        """Whether these are parameters of another module, which this one is nothing to."""
        own = {id(parameter) for parameter in self._named.values()}
        strange = [parameter for parameter in parameters if id(parameter) not in own]
        if strange and len(strange) < len(parameters):
            raise MisconfigurationException(
                f"{name} was given {len(strange)} tensors that are no parameters of the module on this rank, beside"
                f" {len(parameters) - len(strange)} that are. Ask for self.parameters() anew in each step: a list made before training"
                " holds those of other stages, too."
            )
        return bool(strange)

    def _parameters_of(self, grads: Sequence[Tensor]) -> list[Tensor]:
        by_key: dict[Any, Tensor] = {}
        for parameter in self._named.values():
            if parameter.grad is not None:
                by_key.update(dict.fromkeys(_keys(parameter.grad), parameter))
        found = [next((by_key[key] for key in _keys(grad) if key in by_key), None) for grad in grads]
        if any(parameter is None for parameter in found):
            raise MisconfigurationException(
                "get_total_norm was given tensors that are no gradients of the module's parameters. Under a pipeline each rank has those of"
                " its own stages, and only gradients are known to belong together: give [p.grad for p in ... if p.grad is not None], or"
                " call trainer.strategy.gradient_norm(). For the norm of something else on this rank alone there is"
                " torch.linalg.vector_norm."
            )
        return [parameter for parameter in found if parameter is not None]

    def _original(self, name: str, tensors: Any, *args: Any) -> Any:
        """The function as torch has it: of one tensor, which other stages have nothing of, or of other people's."""
        if isinstance(tensors, Tensor) and not self._as_before:
            shared = [
                x
                for x in self._named.values()
                if (tensors is x or tensors is x.grad) and self._shared.group_of(x) is not None
            ]
            if shared:
                self._complete()
            if name != "_get_total_norm":
                self._shared.check_chosen(shared, together=False)
        before, self._as_before = self._as_before, True
        try:
            return self._originals[name](tensors, *args)
        finally:
            self._as_before = before

    def _complete(self) -> None:
        if self._is_incomplete:
            raise MisconfigurationException(_incomplete("Clipping"))
        self._strategy.sum_up_gradients()

    @property
    def _is_incomplete(self) -> bool:
        """Whether other ranks have summands of this rank's gradients that come with a later microbatch."""
        alone = self._mesh.size("pp") == dist.get_world_size() and not self._shared.names
        return not (alone or self._pipeline.window_ends)

    @property
    def _shared(self) -> SharedWeights:
        return self._pipeline.shared_weights

    @property
    def _mesh(self) -> ParallelMesh:
        return self._strategy.mesh

    @property
    def _named(self) -> dict[str, Tensor]:
        """This rank's parameters by the first name that each has in the whole module."""
        return self._shared.parameters()

    def _axes_of_others(self, parameter: Tensor) -> list[str] | None:
        """As `FiveD.gradient_axes`, where stages know by themselves who counts it."""
        axes = ["pp"]
        for applied in self._strategy.parallelized:
            if applied is self._pipeline:
                continue
            of_axis = applied.gradient_axes(parameter)
            if of_axis is None:
                return None
            axes += of_axis
        return axes


def _has_elements(parameter: Tensor) -> bool:
    return parameter.grad is not None and values_of(parameter.grad).numel() > 0


def _keys(grad: Tensor) -> list[Any]:
    """What a gradient is known by: itself, or its memory where it was detached."""
    if grad.layout != torch.strided or not values_of(grad).numel():
        return [id(grad)]
    return [id(grad), (values_of(grad).data_ptr(), grad.shape, grad.dtype)]


def _parted(met: Sequence[Any]) -> str:
    places = []
    for rank, each in enumerate(met):
        if not isinstance(each, tuple):
            places.append(f"rank {rank} has not called it")
            continue
        what, epoch, batch, calls = each[0]
        places.append(f"rank {rank} is at {what}, call {calls}, in batch {batch} of epoch {epoch}")
    return (
        "Functions for gradients need all ranks of a pipeline, as each has a part of the model, and the ranks have parted:"
        f" {'; '.join(places)}. Call them on every rank, in the same order, also where a rank has none of the parameters."
    )


def _incomplete(what: str) -> str:
    return (
        f"{what} comes before the last microbatch of an optimizer step, when gradients are not added up over ranks. Use"
        " on_before_optimizer_step, where they are complete."
    )
