"""Recomputing activations changes memory and nothing else."""

import copy
import gc
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_5d import ActivationCheckpointing, FiveD, ParallelPlan, RunContext, ZeRO
from lightning_5d.activation_checkpointing import Checkpointed, restore
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.models.activations import block_activation_bytes
from lightning_5d.models.decoder import Decoder, DecoderConfig, rotary_angles
from lightning_5d.plan import find_plan
from lightning_5d.verify import Parity, verify
from tests.modules import TinyLM, batches, loader
from tests.ranks.pool import RankPool
from tests.trainers import quiet, zero

SEPARATE = {"backend": None, "timeout": 50.0}
SEPARATE = {"backend": None, "timeout": 50.0}
FULL, SELECTIVE, HALF = (
    ActivationCheckpointing(),
    ActivationCheckpointing("selective"),
    ActivationCheckpointing(memory_budget=0.5),
)
MODES = [FULL, SELECTIVE, HALF]
Make = Callable[[], nn.Module]


def apply(module: nn.Module, options: ActivationCheckpointing | None) -> Checkpointed | None:
    if options is None:
        return None
    problems = options.validate(RunContext(1, 1, "cpu", "32-true", {}, module))
    assert not problems, problems
    return Checkpointed(module, options, find_plan(module))


def trained(
    make: Make, options: ActivationCheckpointing | None, steps: int = 2, device: str = "cpu"
) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses, the state after some steps, all gradients of the last one, and where the generators are afterwards."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = make().to(device)
    apply(module, options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 5, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = [torch.rand(3).tolist(), random.random(), float(np.random.rand())]
    gradients = {f"grad {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return [*losses, after], {**module.state_dict(), **gradients}


def check_equal(make: Make, options: ActivationCheckpointing, steps: int = 2) -> None:
    expected, found = trained(make, None, steps), trained(make, options, steps)
    assert found[0] == expected[0]
    assert set(found[1]) == set(expected[1])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.5)
        return x + F.dropout(F.silu(x), 0.3)


class RandomDepth(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * random.random()) + torch.tanh(super().forward(x) * float(np.random.rand()))


class Normalizing(nn.Module):
    """A running mean, and the power iteration of a spectral norm, whose vectors the forward itself changes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.linear(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(F.relu(self.up(x), inplace=True)).mul_(2.0))


@pytest.mark.parametrize(
    "mode", [*MODES, ActivationCheckpointing(every=2)], ids=lambda mode: f"{mode.mode}{mode.every}"
)
@pytest.mark.parametrize("block", [Dropping, RandomDepth, Normalizing, InPlace])
def test_losses_gradients_buffers_and_generators_are_those_without(
    block: Callable[[], nn.Module], mode: ActivationCheckpointing
) -> None:
    check_equal(lambda: Stack(block), mode)


class Attending(nn.Module):
    """Attention as an operation that draws (dropout inside), then a dropout that draws after it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.qkv = dropout, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(-2)
        return x + F.dropout(out.sin(), 0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("mode", [*MODES, ActivationCheckpointing(memory_budget=0.9)])
@pytest.mark.parametrize("block", [Dropping, Normalizing, lambda: Attending(0.4), lambda: Attending(0.0)])
def test_an_accelerator_draws_its_numbers_again(block: Callable[[], nn.Module], mode: ActivationCheckpointing) -> None:
    device = str(torch.accelerator.current_accelerator())
    expected, found = (trained(lambda: Stack(block), options, 2, device) for options in (None, mode))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_is_kept_and_random_operations_are_not(dropout: float) -> None:
    check_equal(lambda: Stack(lambda: Attending(dropout)), SELECTIVE)
    everything = ActivationCheckpointing("selective", save=("native_dropout", "bernoulli_", "rand_like", "empty_like"))
    check_equal(lambda: Stack(lambda: Attending(dropout)), everything)


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.rand_like(x).add(self.up(x)).sin(), 0.5)


def test_asking_to_keep_a_random_operation_does_not_shift_what_draws_after_it() -> None:
    check_equal(lambda: Stack(Seeded), ActivationCheckpointing("selective", save=("aten.rand_like", "matmul")))


def run_under_autocast(make: Make, options: ActivationCheckpointing | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = make()
    apply(module, options)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(torch.randn(4, 5, 8)).float().square().mean()
    loss.backward()  # outside, as Lightning does
    return {"loss": loss.detach(), **{name: p.grad for name, p in module.named_parameters()}}


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_blocks_called_twice_under_autocast(mode: ActivationCheckpointing) -> None:
    found = run_under_autocast(lambda: Twice(Dropping), mode)
    expected = run_under_autocast(lambda: Twice(Dropping), None)
    # A weight that is cast once per call instead of once per step sums its gradients in another order.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)


class Talkative(nn.Module):
    """Keyword arguments, tuples, numbers, None, a list that the block appends to, and a mapping as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, int], *, shift: dict[str, Any], seen: list[Tensor], off: None = None) -> Any:
        x, power = pair
        y = torch.tanh(self.up(x) * (1 + len(seen))) ** power + shift["by"][0]
        seen.append(y.mean())
        return {"out": (y, "text"), "aux": seen[-1]}


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Talkative() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.layers:
            found = layer((x, 2), shift={"by": [x.mean()]}, seen=seen)
            x = found["out"][0]
        return x + torch.stack(seen).sum() + found["aux"] + len(seen)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_arguments_and_results_of_any_form(mode: ActivationCheckpointing) -> None:
    check_equal(Talking, mode)


def test_an_input_that_is_written_to_before_backward_is_noticed() -> None:
    module = Stack(Dropping, 2)
    apply(module, FULL)
    x = torch.randn(2, 5, 8, requires_grad=True) * 1
    y = module(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


class Overwriting(nn.Module):
    """Writes to its own input, which may be kept as it is, but not be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.up(x.clone()))
        return x.sin()


def test_a_block_that_writes_to_its_input_is_right_or_refused() -> None:
    check_equal(lambda: Stack(Overwriting), ActivationCheckpointing(memory_budget=1.0))
    for mode in (FULL, SELECTIVE):
        with pytest.raises(RuntimeError, match="inplace"):
            trained(lambda: Stack(Overwriting), mode)


def test_a_graph_may_be_gone_through_twice() -> None:
    module = Stack(Normalizing, 2)
    apply(module, FULL)
    loss = module(torch.randn(4, 5, 8)).square().mean()
    first = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(module.parameters()))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.runs = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.up(x))


def test_without_gradients_a_block_runs_once_and_nothing_is_held() -> None:
    module = Stack(Counted, 2)
    apply(module, HALF)
    with torch.no_grad():
        module(torch.randn(2, 5, 8))
    with torch.inference_mode():
        module(torch.randn(2, 5, 8))
    assert [layer.runs for layer in module.layers] == [2, 2]  # type: ignore[union-attr]


def test_a_frozen_block_before_the_first_trained_one_is_not_recomputed() -> None:
    module = Stack(Counted, 3)
    apply(module, FULL)
    module.layers[0].requires_grad_(False)
    module.layers[2].requires_grad_(False)
    module(torch.randn(2, 5, 8)).sum().backward()
    assert [layer.runs for layer in module.layers] == [1, 2, 2]  # type: ignore[union-attr]


def test_names_classes_copies_and_pickles_stay_as_they_were() -> None:
    torch.manual_seed(0)
    plain = Stack(Dropping)
    module = copy.deepcopy(plain)
    apply(module, SELECTIVE)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in plain.named_modules()]
    assert all(type(layer) is Dropping for layer in module.layers)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    again = pickle.loads(pickle.dumps(copied))
    for other in (copied, again):
        torch.manual_seed(1)
        found = other(torch.ones(2, 5, 8))
        torch.manual_seed(1)
        torch.testing.assert_close(found, plain(torch.ones(2, 5, 8)), rtol=0, atol=0)
        found.sum().backward()
    restore(again)
    assert "forward" not in again.layers[0].__dict__


class Live(TorchDispatchMode):
    """Bytes of the storages that operations under it have made and that are still alive."""

    def __init__(self, apart_from: nn.Module) -> None:
        super().__init__()
        self._foreign = {p.untyped_storage()._cdata for p in apart_from.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._foreign:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def now(self, collect: bool = True) -> int:
        if collect:
            gc.collect()
        return sum(size for reference, size in self._made.values() if not reference.expired())


def held_by_blocks(decoder: Decoder, options: ActivationCheckpointing | None, batch: int, tokens: int) -> int:
    applied = apply(decoder, options)
    config = decoder.config
    cos_sin = rotary_angles(torch.arange(tokens)[None], config.head_size, config.rope_theta)

    leaf = torch.ones(batch, tokens, config.hidden_size, requires_grad=True)

    def forward() -> Tensor:
        y = leaf * 1
        for layer in decoder.layers:
            y = layer(y, *cos_sin)
        return y

    forward()  # where a mode measures
    with Live(decoder) as live:
        y = forward()
    held = live.now() - y.untyped_storage().nbytes()
    if applied is not None and applied.budget is not None:
        assert held == applied.budget.kept
        assert held <= applied.budget.share * applied.budget.saved
    return held


DECODERS = [
    DecoderConfig.preset("demo", num_layers=2),
    DecoderConfig(hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=4),
]


@pytest.mark.parametrize("config", DECODERS, ids=["demo", "other"])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 64), (3, 17)])
@pytest.mark.parametrize(("mode", "recomputed"), [(None, "none"), (SELECTIVE, "selective"), (FULL, "full")])
def test_saved_bytes_are_those_of_the_formula(
    config: DecoderConfig, batch: int, tokens: int, mode: ActivationCheckpointing | None, recomputed: Any
) -> None:
    expected = config.num_layers * block_activation_bytes(config, batch, tokens, 4, recomputed)
    assert held_by_blocks(Decoder(config), mode, batch, tokens) == expected


@pytest.mark.parametrize("mode", [None, *MODES], ids=lambda mode: mode and mode.mode)
def test_a_step_leaves_nothing_behind_not_even_the_first_one(mode: ActivationCheckpointing | None) -> None:
    decoder = Decoder(DECODERS[1])
    apply(decoder, mode)
    ids = torch.zeros(2, 16, dtype=torch.long)
    gradients = sum(parameter.numel() * 4 for parameter in decoder.parameters())
    gc.collect()
    gc.disable()  # large memory should not wait for it
    try:
        with Live(decoder) as live:
            decoder(ids).sum().backward()
            assert live.now(collect=False) == gradients
    finally:
        gc.enable()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.75, 1.0])
def test_a_budget_is_kept_and_used(share: float) -> None:
    config = DECODERS[0]
    everything = config.num_layers * block_activation_bytes(config, 2, 64)
    held = held_by_blocks(Decoder(config), ActivationCheckpointing(memory_budget=share), 2, 64)
    assert 0.9 * share * everything <= held <= share * everything


def test_a_budget_below_the_inputs_keeps_the_inputs_and_says_so() -> None:
    config = DECODERS[0]
    decoder = Decoder(config)
    applied = apply(decoder, ActivationCheckpointing(memory_budget=0.01))
    assert applied is not None
    decoder(torch.zeros(2, 64, dtype=torch.long)).sum().backward()
    inputs = config.num_layers * block_activation_bytes(config, 2, 64, 4, "full")
    with pytest.warns(UserWarning, match=f"alone are {inputs:,} bytes"):
        applied.after_backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied.after_backward()  # once


def compiled_gradients(options: ActivationCheckpointing | None, compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Stack(lambda: Attending(0.0), 2).eval()
    for layer in module.layers:
        layer.dropout = 0.0  # type: ignore[assignment]
    apply(module, options)
    if compiled:
        for layer in module.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    module(torch.ones(2, 5, 8)).square().sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=lambda mode: mode.mode)
def test_blocks_compile_whole(mode: ActivationCheckpointing) -> None:
    expected = compiled_gradients(None, compiled=False)
    torch.testing.assert_close(compiled_gradients(mode, compiled=True), expected, rtol=1e-5, atol=1e-5)


# What is refused


def problems_of(module: nn.Module | None = None, plan: ParallelPlan | None = None, **options: Any) -> list[str]:
    context = RunContext(1, 1, "cpu", "32-true", {}, module, plan)
    return [str(problem) for problem in ActivationCheckpointing(**options).validate(context)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "ful"}, ["mode='ful'", "full, selective, budget"]),
        ({"every": 0}, ["every=0", "at least 1"]),
        ({"every": -2}, ["every=-2"]),
        ({"every": 1.5}, ["every=1.5"]),
        ({"memory_budget": 1.5}, ["memory_budget=1.5", "nearest is 1."]),
        ({"memory_budget": -0.1}, ["memory_budget=-0.1", "nearest is 0."]),
        ({"memory_budget": float("nan")}, ["memory_budget=nan"]),
        ({"memory_budget": "a"}, ["memory_budget='a'"]),
        ({"mode": "budget"}, ["no memory_budget"]),
        ({"mode": "selective", "memory_budget": 0.5}, ["a budget chooses operations itself"]),
        ({"mode": "selective", "save": ["matmull"]}, ["'matmull'", "'matmul'"]),
        ({"mode": "selective", "save": ["aten.mmm", "mm"]}, ["'aten.mmm'", "'aten.mm'"]),
        ({"mode": "selective", "save": []}, ["keeps nothing"]),
        ({"save": ["mm"]}, ["only the selective mode"]),
        ({"modules": [""]}, ["not names"]),
        ({"modules": [3]}, ["not names"]),
    ],
)
def test_wrong_options_are_told_with_what_works(options: dict[str, Any], said: list[str]) -> None:
    (problem,) = problems_of(**options)
    assert all(part in problem for part in said), problem


def test_all_wrong_options_are_in_the_one_error_of_the_trainer() -> None:
    with pytest.raises(MisconfigurationException) as raised:
        quiet(strategy=FiveD(ZeRO(stage=7), activation_checkpointing={"mode": "no", "every": 0}), devices=1)
    assert all(part in str(raised.value) for part in ("3 settings", "stage=7", "mode='no'", "every=0"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (False, None),
        (True, FULL),
        ("selective", SELECTIVE),
        (0.5, HALF),
        ({"every": 2}, ActivationCheckpointing(every=2)),
        (FULL, FULL),
    ],
)
def test_short_forms(given: Any, expected: ActivationCheckpointing | None) -> None:
    plugins = FiveD(activation_checkpointing=given).plugins
    assert [plugin for plugin in plugins if not isinstance(plugin, ZeRO)] == ([expected] if expected else [])


@pytest.mark.parametrize("given", [[1], {"evry": 2}])
def test_other_forms_are_refused(given: Any) -> None:
    with pytest.raises(MisconfigurationException, match="activation_checkpointing="):
        FiveD(activation_checkpointing=given)


class OwnCheckpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def test_what_a_module_lacks_or_does_already_is_told() -> None:
    tiny = TinyLM()
    (problem,) = problems_of(tiny, modules=["*.mlp"])
    assert "matches no module of TinyLM" in problem
    assert "up" in problem
    (problem,) = problems_of(tiny, modules=["layers"])
    assert "contains whole blocks" in problem
    (problem,) = problems_of(nn.Linear(2, 2))
    assert "found no blocks in Linear" in problem
    (problem,) = problems_of(tiny, ParallelPlan(("stack.*",)))
    assert "stack.*" in problem
    (problem,) = problems_of(OwnCheckpointing())
    assert "already recomputes" in problem
    assert problems_of(tiny, modules=["*.up", "layers.0"]) == []


def test_patterns_choose_the_outermost_modules_inside_blocks() -> None:
    def chosen(**options: Any) -> list[str]:
        tiny = TinyLM()
        applied = apply(tiny, ActivationCheckpointing(**options))
        assert applied is not None
        return applied.names

    assert chosen() == ["layers.0", "layers.1", "layers.2"]
    assert chosen(every=2) == ["layers.0", "layers.2"]
    assert chosen(modules=["*.up"], every=2) == ["layers.0.up", "layers.2.up"]
    assert chosen(modules=["*"]) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert chosen(modules="layers.1.*") == [f"layers.1.{name}" for name in ("norm", "up", "down", "dropout")]


# In a Trainer


def _verify(rank: int, stage: int, mode: Any, precision: str, tied: bool) -> Parity:
    strategy = FiveD(ZeRO(stage=stage), activation_checkpointing=mode)
    module = TinyLM(tied=tied)
    return verify(module, batches(12), strategy, accumulate_grad_batches=2, gradient_clip_val=0.5, precision=precision)


@pytest.mark.parametrize(
    ("stage", "mode", "precision", "tied"),
    [
        (0, "full", "32-true", False),
        (1, "selective", "32-true", True),
        (2, 0.5, "32-true", True),
        (3, "full", "64-true", False),
        (3, "selective", "32-true", True),
        (3, {"modules": ["*.down"], "every": 2}, "32-true", False),
    ],
)
def test_recomputation_equals_one_process(ranks: RankPool, stage: int, mode: Any, precision: str, tied: bool) -> None:
    results = ranks(2, _verify, stage, mode, precision, tied, **SEPARATE)
    assert results[0].passed, "\n" + results[0].table()


class Watched(TinyLM):
    """Dropout; a float tensor of the default dtype made in each block; the generators after each step."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        for layer in self.layers:
            layer.dropout.p = 0.5  # type: ignore[union-attr]
            layer.up.register_forward_pre_hook(lambda module, args: (args[0] * torch.ones(1),))
        self.after: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.after.append(torch.rand(2).tolist())
        optimizer.step()  # type: ignore[union-attr]
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(torch.rand(2).tolist())


def _watched(rank: int, stage: int, manual: bool, precision: str, mode: Any) -> tuple[Any, ...]:
    from tests.trainers import whole

    L.seed_everything(3, verbose=False)
    strategy = FiveD(ZeRO(stage=stage), activation_checkpointing=mode)
    trainer = quiet(
        strategy=strategy, devices=2, precision=precision, accumulate_grad_batches=1 if manual else 2, max_epochs=1
    )
    module = Watched(manual)
    trainer.fit(module, loader(16))
    traffic = strategy.parallelized[-1].engine.traffic  # type: ignore[attr-defined]
    return whole(module), module.after, traffic.calls, traffic.bytes


@pytest.mark.parametrize(
    ("stage", "manual", "precision"),
    [
        (0, False, "32-true"),
        (1, True, "bf16-true"),
        (2, False, "bf16-mixed"),
        (3, False, "bf16-true"),
        (3, True, "32-true"),
        (3, True, "bf16-mixed"),
    ],
)
def test_weights_random_numbers_and_collectives_are_those_without(
    ranks: RankPool, stage: int, manual: bool, precision: str
) -> None:
    without = ranks(2, _watched, stage, manual, precision, None, **SEPARATE)
    for mode in ("full", "selective"):
        found = ranks(2, _watched, stage, manual, precision, mode, **SEPARATE)
        for one, other in zip(found, without, strict=True):
            torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
            assert one[1:] == other[1:]


def _saved_and_loaded(rank: int, folder: str) -> tuple[list[str], list[bool], bool]:
    path = f"{folder}/run.ckpt"
    first = quiet(strategy=FiveD(ZeRO(stage=3), activation_checkpointing="selective"), devices=2)
    first.fit(TinyLM(), loader(8))
    first.save_checkpoint(path)
    names = list(torch.load(path, weights_only=False)["state_dict"])
    module = TinyLM.load_from_checkpoint(path)
    quiet(strategy=FiveD(ZeRO(stage=0), activation_checkpointing="full"), devices=2).fit(module, loader(8))
    patched = "forward" in module.layers[0].__dict__
    again = zero(0, 2, max_epochs=2)
    again.fit(module, loader(8), ckpt_path=path)
    return names, [patched, "forward" in module.layers[0].__dict__], again.global_step > first.global_step


def test_a_checkpoint_has_plain_names_and_the_next_trainer_its_own_setting(ranks: RankPool, tmp_path: Path) -> None:
    for names, patched, resumed in ranks(2, _saved_and_loaded, str(tmp_path), **SEPARATE):
        assert names == list(TinyLM().state_dict())
        assert patched == [True, False]
        assert resumed


class Copying(L.Callback):
    """Copies blocks while they are at work, as callbacks that average weights do."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.copied = copy.deepcopy(pl_module.layers[0])
        self.size = len(pickle.dumps(pl_module.layers))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_copies_of_blocks_take_nothing_of_the_trainer_with_them(mode: ActivationCheckpointing) -> None:
    callback, module = Copying(), TinyLM()
    quiet(strategy=FiveD(ZeRO(stage=0), activation_checkpointing=mode), devices=1, callbacks=[callback]).fit(
        module, loader(4)
    )
    assert callback.size < 20_000
    x = torch.ones(1, 2, 8)
    torch.testing.assert_close(callback.copied(x), module.layers[0](x), rtol=0, atol=0)
    callback.copied(x).sum().backward()
    assert callback.copied.up.weight.grad.abs().sum() > 0
    assert "forward" in callback.copied.__dict__


class Llama(L.LightningModule):
    """A Hugging Face model as it comes: it fills a cache in training, unless somebody stops it."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=13,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                attention_dropout=0.2,
            )
        )
        self.filled, self.cached = False, list[bool]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.model(input_ids=batch, labels=batch)
        self.filled |= _holds_cache(output)
        return output.loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.cached.append(_holds_cache(self.model(input_ids=batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _holds_cache(output: Any) -> bool:
    return any(hasattr(value, "get_seq_length") for value in output.values())


def _llama(rank: int, modes: list[Any]) -> list[Any]:
    from tests.trainers import whole

    found = []
    for mode in modes:
        L.seed_everything(3, verbose=False)
        module = Llama()
        trainer = quiet(strategy=FiveD(ZeRO(stage=3), activation_checkpointing=mode), devices=2)
        trainer.fit(module, loader(8), loader(4))
        found.append((whole(module), module.cached, module.model.config.use_cache, module.filled))
    return found


def test_a_hugging_face_model_that_caches(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    for without, *others in ranks(2, _llama, [None, "full", "selective", 0.4], **SEPARATE):
        assert without[1:] == ([True], True, True)
        for other in others:
            torch.testing.assert_close(other[0], without[0], rtol=0, atol=0)
            assert other[1:] == ([True], True, False)


def test_a_cache_with_something_in_it_is_found_again_as_it_was() -> None:
    transformers = pytest.importorskip("transformers")

    def gradients(options: ActivationCheckpointing | None) -> tuple[list[Tensor], int]:
        model = Llama().model.eval()
        applied = apply(model, options)
        prefix = model(input_ids=torch.arange(4)[None], use_cache=True)
        cache = next(value for value in prefix.values() if isinstance(value, transformers.Cache))
        model(
            input_ids=torch.arange(3)[None], labels=torch.arange(3)[None], **{_cache_name(model): cache}
        ).loss.backward()
        assert applied is None or applied.names == ["model.layers.0", "model.layers.1"]
        return [p.grad for p in model.parameters() if p.grad is not None], cache.get_seq_length()

    expected, length = gradients(None)
    assert length == 7
    for mode in MODES:
        found, length = gradients(mode)
        assert length == 7
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def _cache_name(model: nn.Module) -> str:
    import inspect

    return next(name for name in ("cache", "past_key_values") if name in inspect.signature(model.forward).parameters)


TABLES: list[Tensor] = []
"""Of the step that is going on."""


class Remembering(nn.Module):
    """Makes a table if no layer has made it in this step, and computes with it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        with hidden_operations():
            if not TABLES:
                TABLES.append(torch.eye(8).mm(torch.full((8, 8), 0.1)).add_(1.0))
            x = Weighing.apply(x, TABLES[0])
        return x + self.down(torch.tanh(self.up(x)).sin())


class Forgetting(Stack):
    """Has no table any more when backward comes."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        TABLES.clear()
        return x


class Weighing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return (x.flatten(0, 1).mm(table)).mul_(0.5).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (table,) = ctx.saved_tensors
        return 0.5 * gradient @ table.T, None


@pytest.mark.parametrize("mode", MODES)
def test_operations_that_do_not_run_twice_alike_are_hidden(mode: ActivationCheckpointing) -> None:
    check_equal(lambda: Forgetting(Remembering), mode)
