"""Speeds are exact in time, tokens and operations. Time is a clock of the test's own."""

import pickle
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_5d import FiveD, ZeRO
from lightning_5d.callbacks import Throughput
from lightning_5d.model_flops import ModelFlops, peak_flops, shared_attention
from lightning_5d.models.decoder import Decoder, DecoderConfig
from tests.modules import TinyLM, loader
from tests.ranks.pool import RankPool
from tests.trainers import quiet

SEPARATE = {"backend": None, "timeout": 50.0}
CONFIG = DecoderConfig.preset("tiny", vocab_size=13)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_5d.callbacks.step_clock.perf_counter", clock)
    return clock


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of given lengths, padded to the longest one; reading one takes time."""

    def __init__(self, lengths: list[int], clock: Clock | None = None, masked: bool = True) -> None:
        self.lengths, self.clock, self.masked = lengths, clock, masked

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.clock is not None:
            self.clock.now += 0.001
        ids = torch.arange(max(self.lengths)) % 13
        mask = {"attention_mask": torch.arange(len(ids)) < self.lengths[index]} if self.masked else {}
        return {"input_ids": ids, **mask}


class Timed(L.LightningModule):
    """Every part of a step takes as long as it says."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.clock = clock or Clock()
        self.decoder = Decoder(CONFIG)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.clock.now += 7.0 if batch_idx == 0 else 0.05
        return self.decoder(batch["input_ids"]).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.clock.now += 0.02

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.clock.now += 50.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: L.LightningModule, data: Any, callback: Throughput, **settings: Any) -> dict[str, float]:
    trainer = quiet(callbacks=[callback], **settings)
    trainer.fit(module, *(data if isinstance(data, tuple) else (data,)))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_times_are_those_of_the_parts_without_warm_up_and_validation(clock: Clock) -> None:
    data = DataLoader(Rows([8] * 24, clock), batch_size=2), DataLoader(Rows([8] * 4), batch_size=2)
    found = fit(Timed(clock), data, Throughput(every=3), val_check_interval=4)
    step = 0.05 + 0.02 + 0.002
    # Of the ten timed batches two come right after validation: their loading is not known apart from it.
    assert found["data_seconds"] == pytest.approx(0.002 * 8 / 10)
    assert found["forward_backward_seconds"] == pytest.approx(0.05)
    assert found["optimizer_seconds"] == pytest.approx(0.02)
    assert found["step_seconds"] == pytest.approx(step - 0.002 * 2 / 10)
    assert found["samples_per_second"] == pytest.approx(2 / found["step_seconds"])
    assert found["tokens_per_second"] == pytest.approx(16 / found["step_seconds"])
    assert "mfu" not in found


def test_a_step_is_all_its_microbatches(clock: Clock) -> None:
    data = DataLoader(Rows([8] * 18, clock), batch_size=1)
    found = fit(Timed(clock), data, Throughput(window=6), accumulate_grad_batches=3)
    assert found["step_seconds"] == pytest.approx(3 * 0.051 + 0.02)
    assert found["data_seconds"] == pytest.approx(3 * 0.001)
    assert found["forward_backward_seconds"] == pytest.approx(3 * 0.05)
    assert found["optimizer_seconds"] == pytest.approx(0.02)


@pytest.mark.parametrize(("masked", "tokens"), [(True, 3 + 8 + 5 + 2), (False, 4 * 8)])
def test_padding_does_not_count(clock: Clock, masked: bool, tokens: int) -> None:
    data = DataLoader(Rows([8, 8, 3, 8, 5, 2], clock, masked), batch_size=1)
    callback = Throughput()
    found = fit(Timed(clock), data, callback)
    assert found["tokens_per_second"] / found["samples_per_second"] == pytest.approx(tokens / 4)
    assert pickle.loads(pickle.dumps(callback)).totals == callback.totals  # goes to processes that a Trainer starts
    assert callback.totals["tokens"] == tokens + 16
    assert callback.totals["samples"] == 6


def test_batches_without_names_and_without_tokens(clock: Clock) -> None:
    class Ticking(TinyLM):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            clock.now += 1

    found = fit(Ticking(), loader(8), Throughput())
    assert found["tokens_per_second"] == pytest.approx(14)

    class Regression(TinyLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.now += 1
            return self.embed.weight.mean() * batch[0].mean()

    class Pairs(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.ones(3), torch.ones(())

    found = fit(Regression(), DataLoader(Pairs(), batch_size=3), Throughput())
    assert found["samples_per_second"] == pytest.approx(3)
    assert "tokens_per_second" not in found


def _two_ranks(rank: int, stage: int, mode: Any, lengths: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    callback = Throughput(every=2, peak=1e9)
    strategy = FiveD(ZeRO(stage=stage), activation_checkpointing=mode)
    found = fit(Timed(), DataLoader(Rows(lengths), batch_size=1), callback, strategy=strategy, devices=2)
    return found, callback.totals


@pytest.mark.parametrize(("stage", "mode"), [(0, None), (3, None), (3, "full"), (1, "selective"), (2, 0.4)])
def test_each_token_counts_once_and_no_operation_twice(ranks: RankPool, stage: int, mode: Any) -> None:
    lengths = [8, 3, 8, 1, 8, 2, 8, 8]
    results = ranks(2, _two_ranks, stage, mode, lengths, **SEPARATE)
    assert results[0][1] == results[1][1]  # agreed over the ranks
    found, totals = results[0]
    assert totals["tokens"] == sum(lengths)
    assert totals["samples"] == len(lengths)
    # The first batch of each rank has passed before operations were counted.
    assert totals["model_flops"] == 6 * operations(1, 8)
    assert found["mfu"] == pytest.approx(found["model_tflops_per_second"] * 1e12 / 2e9)


def operations(batch: int, tokens: int) -> int:
    """Of the decoder: 6 for each weight of a product and token, and 12 b s² h of attention's two products in a layer."""
    decoder = Decoder(CONFIG)
    weights = (
        sum(p.numel() for name, p in decoder.named_parameters() if "proj" in name) + decoder.lm_head.weight.numel()
    )
    attention = 12 * batch * tokens**2 * CONFIG.hidden_size * CONFIG.num_layers
    return 6 * weights * batch * tokens + attention


def test_operations_are_those_of_the_formula_and_of_torch() -> None:
    decoder, ids = Decoder(CONFIG), torch.zeros(2, 11, dtype=torch.long)
    with ModelFlops() as counted:
        loss = decoder(ids).sum()
    with FlopCounterMode(display=False) as forward:
        decoder(ids)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert counted.total == operations(2, 11)
    # Torch has no formula for attention on CPU.
    attention = 12 * 2 * 11**2 * CONFIG.hidden_size * CONFIG.num_layers
    assert counted.total - attention == forward.get_total_flops() + backward.get_total_flops()


def test_only_what_needs_a_gradient_has_a_backward() -> None:
    linear, x = nn.Linear(4, 6), torch.ones(3, 4)
    size = 2 * 3 * 4 * 6

    def counted(x: Tensor) -> float:
        with ModelFlops() as flops:
            linear(x)
        return flops.total / size

    assert counted(x) == 2
    assert counted(x.clone().requires_grad_()) == 3
    linear.requires_grad_(False)
    assert counted(x) == 1
    assert counted(x.clone().requires_grad_()) == 2
    with torch.no_grad():
        assert counted(x.clone().requires_grad_()) == 1
    image = torch.ones(1, 2, 5, 5, requires_grad=True)
    convolution = nn.Conv2d(2, 3, 3)
    with ModelFlops() as flops:
        convolution(image)
    assert flops.total == 3 * 2 * (2 * 3 * 3) * 3 * 3 * 3


def test_attention_over_parts_counts_as_over_the_whole_however_ranks_compute_it() -> None:
    whole = torch.randn(3, 1, 2, 12, 4).requires_grad_().unbind()
    with ModelFlops() as expected:
        nn.functional.scaled_dot_product_attention(*whole)
    parts = [tensor[:, :, :3].detach().requires_grad_() for tensor in whole]
    with ModelFlops() as found:
        with shared_attention(*parts, ranks=4):
            nn.functional.scaled_dot_product_attention(parts[0], whole[1], whole[2], is_causal=True)
            parts[0] @ parts[1].mT
        parts[0].detach() @ torch.ones(4, 5)
    assert 4 * (found.total - 2 * 2 * 3 * 4 * 5) == expected.total > 0


def test_operations_per_token_and_the_peak_may_be_given(clock: Clock) -> None:
    data = DataLoader(Rows([8] * 12, clock), batch_size=2)
    found = fit(Timed(clock), data, Throughput(flops_per_token=1e6, peak=1e9))
    assert found["model_tflops_per_second"] == pytest.approx(found["tokens_per_second"] * 1e6 / 1e12)
    assert found["mfu"] == pytest.approx(found["tokens_per_second"] * 1e6 / 1e9)
    assert peak_flops(torch.device("cpu"), torch.float32) is None


def test_a_compiled_module_is_not_counted(clock: Clock) -> None:
    module = Timed(clock)
    module.decoder.layers[0].compile(backend="eager")
    found = fit(module, DataLoader(Rows([8] * 8, clock), batch_size=2), Throughput(peak=1e9))
    assert "tokens_per_second" in found
    assert not {"mfu", "model_tflops_per_second"} & set(found)


class Manual(Timed):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_manual_steps_have_no_parts_and_all_their_operations(clock: Clock) -> None:
    callback = Throughput()
    found = fit(Manual(clock), DataLoader(Rows([8] * 4, clock), batch_size=1), callback)
    assert "optimizer_seconds" not in found
    assert found["tokens_per_second"] == pytest.approx(8 / (2 * 0.07 + 0.001))
    assert callback.totals["model_flops"] == 3 * 2 * operations(1, 8)
    assert not _get_current_dispatch_mode_stack()


class Crossing(L.Callback):
    """Another callback's mode, entered and left in hooks."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode = ModelFlops()
        self.mode.__enter__()

    def on_before_backward(self, *_: Any) -> None:
        assert _get_current_dispatch_mode_stack() == [self.mode]
        self.mode.__exit__(None, None, None)


@pytest.mark.parametrize("first", [True, False])
def test_counting_does_not_cross_modes_of_other_callbacks(clock: Clock, first: bool) -> None:
    callback, other = Throughput(), Crossing()
    module = Timed(clock)
    quiet(callbacks=[callback, other] if first else [other, callback]).fit(
        module, DataLoader(Rows([8] * 4, clock), batch_size=1)
    )
    assert callback.totals["model_flops"] == 3 * operations(1, 8)
    assert other.mode.total == operations(1, 8)
    assert "training_step" not in module.__dict__


class Failing(Timed):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise RuntimeError("no")
        return loss


def test_a_step_that_fails_leaves_nothing_counting(clock: Clock) -> None:
    with pytest.raises(RuntimeError, match="no"):
        fit(Failing(clock), DataLoader(Rows([8] * 4, clock), batch_size=1), Throughput())
    assert not _get_current_dispatch_mode_stack()


def test_totals_go_on_after_a_break(clock: Clock) -> None:
    first = Throughput(every=100)
    fit(Timed(clock), DataLoader(Rows([8] * 4, clock), batch_size=1), first)
    assert first.totals == {"tokens": 32, "samples": 4, "model_flops": 3 * operations(1, 8)}
    second = Throughput()
    second.load_state_dict(first.state_dict())
    fit(Timed(clock), DataLoader(Rows([8] * 3, clock), batch_size=1), second)
    assert second.totals["tokens"] == 56


class Halfway(L.Callback):
    def __init__(self, other: Throughput) -> None:
        self.other, self.tokens = other, list[float]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.tokens.append(self.other.state_dict()["totals"]["tokens"])


def test_what_has_not_been_logged_is_in_the_state(clock: Clock) -> None:
    callback = Throughput(every=100)
    halfway = Halfway(callback)
    quiet(callbacks=[callback, halfway]).fit(Timed(clock), DataLoader(Rows([8, 5, 8, 8], clock), batch_size=1))
    assert halfway.tokens == [8, 13, 21, 29]


def test_wrong_settings_are_all_named() -> None:
    with pytest.raises(MisconfigurationException) as raised:
        Throughput(window=0, every=0, warmup=-1, flops_per_token=0.0, peak=-1.0)
    assert all(
        name in str(raised.value) for name in ("window=0", "every=0", "warmup=-1", "flops_per_token=0", "peak=-1")
    )
