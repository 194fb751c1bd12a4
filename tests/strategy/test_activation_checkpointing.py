"""Recomputing activations changes memory and nothing else."""

import copy
import gc
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_5d import ActivationCheckpointing, RunContext
from lightning_5d.activation_checkpointing import Checkpointed, restore
from lightning_5d.models.activations import block_activation_bytes
from lightning_5d.models.decoder import Decoder, DecoderConfig, rotary_angles
from lightning_5d.plan import find_plan

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


def trained(make: Make, options: ActivationCheckpointing | None, steps: int = 2) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses, the state after some steps, all gradients of the last one, and where the generators are afterwards."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = make()
    apply(module, options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 5, 8)).square().mean()
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
        return x * random.random() + super().forward(x) * float(np.random.rand())


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


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_is_kept_and_random_operations_are_not(dropout: float) -> None:
    check_equal(lambda: Stack(lambda: Attending(dropout)), SELECTIVE)
    everything = ActivationCheckpointing("selective", save=("native_dropout", "bernoulli_", "rand_like", "empty_like"))
    check_equal(lambda: Stack(lambda: Attending(dropout)), everything)


@torch.library.custom_op("fived_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


noisy.register_autograd(lambda ctx, grad: grad)


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
        y = torch.tanh(self.up(x)) ** power + shift["by"][0] + len(seen)
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

    def now(self) -> int:
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
