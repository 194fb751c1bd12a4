"""Shared experts are computed while tokens are on their way to their experts, and nothing else of a run is another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from lightning_5d import ContextParallel, ExpertParallel, FiveD, TensorParallel, ZeRO
from lightning_5d.expert_parallel import dispatch
from lightning_5d.expert_parallel.door import ExpertDoor, _as_one_operation
from lightning_5d.expert_parallel.host_exchange import HostTokenExchange
from lightning_5d.expert_parallel.meanwhile import as_now, is_looked_at
from lightning_5d.expert_parallel.moe import MoE
from lightning_5d.models import LanguageModel
from tests.expert_parallel.adapted import changed
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, fit

EXPERTS = ["out", "in", "experts", "out", "in"]
EXPERTS_BACKWARD = ["out", "in", "out", "in"]
FORWARD = ["out", "shared", "in", "experts", "out", "in"]
BACKWARD = ["out", "in", "out", "shared'", "in"]
LAYERS = 2
MIXTURE = mixture(shared=1, shared_gate=True)


def _rows() -> Dealt:
    return Dealt(Rows(8, 6), 4)


def _noted(events: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return call(*args, **kwargs)

    return noting


@contextmanager
def _watched(events: list[str], together: bool, messages: bool) -> Iterator[None]:
    """Notes when rows set out and arrive, and what is computed."""
    shared = MoE._shared

    def noting(block: MoE, x: Tensor) -> Tensor:
        events.append("shared")
        out = shared(block, x)
        if out.requires_grad:
            out.register_hook(lambda grad: events.append("shared'"))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoE, "_shared", noting)
        patch.setattr(LanguageModel, "training_step", _noted(events, "step", LanguageModel.training_step))
        patch.setattr(ExpertDoor, "_compute", _noted(events, "experts", ExpertDoor._compute))
        for name, method in (("out", "start"), ("in", "wait")):
            patch.setattr(dispatch._Crossing, method, _noted(events, name, getattr(dispatch._Crossing, method)))
        if not together:
            patch.setattr(ExpertDoor, "travels", lambda door, hidden: False)
        if messages:
            patch.setattr(HostTokenExchange, "connect", classmethod(lambda cls, group: None))
        yield


def only_shared(module: LanguageModel) -> None:
    """Nothing before the first layer needs a gradient, and none of its other experts."""
    module.requires_grad_(False)
    for layer in module.decoder.layers:
        layer.mlp.shared_experts.requires_grad_(True)


class ByHand(LanguageModel):
    """Steps by itself, and so inside of what lets torch clip gradients over several arrangements of ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}


def by_hand() -> ByHand:
    torch.manual_seed(0)
    return ByHand(decoder=MIXTURE().hparams["decoder"])


def _run(
    rank: int, plugins: tuple[Any, ...], make: Callable[[], Any], messages: bool, together: bool, **strategy: Any
) -> tuple[Any, list[str]]:
    """What a run gives, and the events of its last step."""
    events: list[str] = []
    with _watched(events, together, messages):
        found = fit(rank, make, _rows, partial(FiveD, *plugins, **strategy), devices=2, limit_val_batches=0)
    assert len(found["losses"]) == 2
    last = len(events) - events[::-1].index("step")
    return found, events[last:]


def _events(
    rank: int,
    *plugins: Any,
    make: Callable[[], Any] = MIXTURE,
    messages: bool = False,
    **strategy: Any,
) -> tuple[list[str], list[str]]:
    """Those of a run, and those of one that computes one thing after the other, and gives the same to the last bit."""
    found, events = _run(rank, plugins, make, messages, True, **strategy)
    other, in_turn = _run(rank, plugins, make, messages, False, **strategy)
    assert _same(found, other)
    return events, in_turn


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _each(rank: int, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: _events(rank, *plugins, **options) for name, (plugins, options) in cases.items()}


CASES: dict[str, Any] = {
    "shared memory": ((ExpertParallel(2),), {}),
    "messages": ((ExpertParallel(2, capacity_factor=1.0), ZeRO(stage=3)), {"messages": True}),
    "tensor": ((ExpertParallel(2), TensorParallel(2)), {}),
    "context": ((ExpertParallel(2), ContextParallel(2)), {}),
    "by hand": ((ExpertParallel(2),), {"make": by_hand}),
}


def test_shared_experts_are_computed_between_start_and_arrival(ranks: RankPool) -> None:
    for each in ranks(2, _each, CASES, **SEPARATE):
        for name, (events, in_turn) in each.items():
            assert events == FORWARD * LAYERS + BACKWARD * LAYERS, name
            assert in_turn == (["shared", *EXPERTS]) * LAYERS + [*EXPERTS_BACKWARD, "shared'"] * LAYERS, name


def test_they_are_in_layers_that_run_again(ranks: RankPool) -> None:
    modes = {mode: ((ExpertParallel(2),), {"activation_checkpointing": mode}) for mode in ("full", "selective")}
    for each in ranks(2, _each, modes, **SEPARATE):
        for name, (events, _) in each.items():
            assert events == FORWARD * LAYERS + (FORWARD + BACKWARD) * LAYERS, name


def test_a_layer_that_runs_again_for_shared_experts_alone_has_nothing_under_way(ranks: RankPool) -> None:
    options = {"make": partial(changed, only_shared), "activation_checkpointing": "full"}
    for each in ranks(2, _each, {"only shared": ((ExpertParallel(2),), options)}, **SEPARATE):
        events, _ = each["only shared"]
        assert events == ["shared", *EXPERTS, *FORWARD, *FORWARD, *BACKWARD, "shared'", "shared"]


class Seen(TorchFunctionMode):
    """Keeps the names of operations."""

    def __init__(self, is_looking: bool) -> None:
        super().__init__()
        self.is_looking, self.names = is_looking, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_see_what_is_computed_meanwhile_and_nothing_of_the_way() -> None:
    x = torch.ones(2, 3)
    assert not is_looked_at(x)
    outer, inner = Seen(False), Seen(False)
    with outer, inner:
        beside = as_now(lambda: x.sin())  # type: ignore[arg-type,return-value]

        def way(hidden: Tensor) -> Tensor:
            beside()
            return hidden.cos()

        _as_one_operation(x, way)
        x.tan()
        assert not is_looked_at(x)
        with Seen(True):
            assert is_looked_at(x)
    for mode in (outer, inner):
        assert mode.names == ["_as_one_operation", "sin", "tan"]


def test_a_default_device_is_one_for_what_is_computed_meanwhile() -> None:
    x, made = torch.ones(2, 3), list[Tensor]()
    with torch.device("meta"):
        assert not is_looked_at(x)
        beside = as_now(lambda: made.append(torch.ones(2)))

        def way(hidden: Tensor) -> Tensor:
            beside()
            return hidden

        _as_one_operation(x, way)
        made.append(torch.ones(2))
    made.append(torch.ones(2))
    assert [tensor.device.type for tensor in made] == ["meta", "meta", "cpu"]
    assert _device.CURRENT_DEVICE is None
