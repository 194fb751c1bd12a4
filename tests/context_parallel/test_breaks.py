"""What hostile and clumsy steps do with whole sequences and with what is inside of doors: right as in one process, or refused."""

import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_5d import ContextParallel, FiveD
from lightning_5d.launch import RankFailure
from tests.ranks.pool import RankPool
from tests.trainers import quiet

VOCABULARY, ROWS, LENGTH, WIDTH = 13, 3, 16, 12
Batch = Mapping[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.kept: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.kept = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.kept)


class Pointwise(nn.Module):
    """Without attention, so that it has gradients of gradients; what it is given beside embeddings has no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.middle(x))
        return self.head(x if condition is None else x * condition[:, None].sigmoid())


class Inside(nn.Module):
    """Has something between its embedding and its head, by a layer of torch or in another way."""

    def __init__(self, layer: nn.Module | None, what: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers, self.what = nn.ModuleList([] if layer is None else [layer]), what

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.what(x, *self.layers))


class Steps(L.LightningModule):
    """Its step is a function."""

    def __init__(self, step: Callable[["Steps", Batch], Tensor], net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or Net()
        self.pointwise = Pointwise()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.step, self.seen = step, []
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.step(self, batch)
        self.seen.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {n: p.grad.detach().clone() for n, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loss_of(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), **options)


def _chunks(m: Any, b: Batch) -> Tensor:
    def one(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.net.head(x).flatten(0, 1), y.flatten(), reduction="sum")

    pieces = zip(m.net.embed(b["input_ids"]).split(5, 1), b["input_ids"].split(5, 1), strict=True)
    return sum(checkpoint(one, x, y, use_reentrant=False) for x, y in pieces) / (ROWS * LENGTH)  # type: ignore[return-value]


def _gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, create_graph=True)[0].pow(2).sum() * 100


def _twice_through_shown(m: Any, b: Batch) -> Tensor:
    x = m.net.embed(b["input_ids"])
    return _gradient(loss_of(m.pointwise(x), b), x)


def _twice_through_whole(m: Any, b: Batch) -> Tensor:
    x = torch.linspace(-1, 1, ROWS * LENGTH * WIDTH).view(ROWS, LENGTH, WIDTH).requires_grad_()
    return _gradient(loss_of(m.pointwise(x), b), x)


def _twice_through_shared(m: Any, b: Batch) -> Tensor:
    condition = m.weight.expand(ROWS, WIDTH)
    return _gradient(loss_of(m.pointwise(m.net.embed(b["input_ids"]), condition), b), condition)


def _prompt(m: Any, b: Batch) -> Tensor:
    x = torch.cat([m.weight.expand(ROWS, 4, WIDTH), m.net.embed(b["input_ids"])], 1)
    return loss_of(m.pointwise(x)[:, 4:], b)


def _advantages(m: Any, b: Batch) -> Tensor:
    values, last, found = m.net(b["input_ids"])[..., 0], 0.0, []
    for t in reversed(range(LENGTH)):
        following = values[:, t + 1] if t + 1 < LENGTH else 0.0
        last = b["labels"][:, t] + 0.9 * following - values[:, t] + 0.8 * last
        found.insert(0, last)
    returns = (torch.stack(found, 1) + values).detach()
    return F.mse_loss(values, returns) / 100


RIGHT: dict[str, Callable[[Any, Batch], Tensor]] = {
    "a checkpointed model": lambda m, b: loss_of(checkpoint(m.net, b["input_ids"], use_reentrant=False), b),
    "a head and its loss in checkpointed pieces": _chunks,
    "gradients of gradients of what leaves a door": _twice_through_shown,
    "gradients of gradients of a whole tensor": _twice_through_whole,
    "gradients of gradients of what has no sequence": _twice_through_shared,
    "a prompt before the sequence": _prompt,
    "advantages": _advantages,
    "the best tokens": lambda m, b: loss_of(m.net(b["input_ids"]), b, reduction="none").topk(9).values.mean(),
    "sampled again": lambda m, b: loss_of(m.net(m.net(b["input_ids"]).argmax(-1)), b),
    "odd views": lambda m, b: (m.net(b["input_ids"]).reshape(ROWS, 8, -1) * torch.arange(26)).sum(-1).pow(2).mean(),
    "scores of tokens": lambda m, b: ((x := m.net(b["input_ids"])) @ x.mT).softmax(-1).pow(2).mean(),
}  # fmt: skip

Layer = Callable[[], nn.Module | None]
NONE: Layer = lambda: None  # noqa: E731
REFUSED: dict[str, tuple[Layer, Callable[..., Tensor], str]] = {
    "convolution": (partial(nn.Conv1d, WIDTH, WIDTH, 3, padding=1), lambda x, c: c(x.mT).mT, "mixes tokens.*conv1d"),
    "recurrence": (partial(nn.LSTM, WIDTH, WIDTH, batch_first=True), lambda x, r: r(x)[0], "mixes tokens.*lstm"),
    "batch norm": (partial(nn.BatchNorm1d, WIDTH), lambda x, n: n(x.flatten(0, 1)).view_as(x), "normalises over"),
    "mean of all": (NONE, lambda x: x - x.mean(), "mixes tokens.*mean"),
    "mean of rows": (NONE, lambda x: x - x.reshape(-1, WIDTH).mean(0), "mixes tokens.*mean"),
    "softmax of all features": (NONE, lambda x: x.flatten(1).softmax(-1).view_as(x), "mixes tokens.*softmax"),
    "running sum of rows": (NONE, lambda x: x.flatten(0, 1).cumsum(0).view_as(x), "mixes tokens.*cumsum"),
    "Fourier transform": (NONE, lambda x: torch.fft.fft(x, dim=1).real, "mixes tokens.*fft"),
    "positions by linspace": (NONE, lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None], "counts the 8 tokens"),
    "positions of a list": (NONE, lambda x: x * torch.tensor([*range(x.shape[1])])[:, None], "counts the 8 tokens"),
    "positions by ones": (NONE, lambda x: x * torch.ones(x.shape[:2]).cumsum(1)[..., None], "counts the 8 tokens"),
    "numpy": (NONE, lambda x: x * torch.from_numpy(x.detach().numpy().cumsum(1)), "out of torch"),
}


def batch() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return [{"input_ids": ids, "labels": labels}]


def fit(module: Steps, **arguments: Any) -> tuple[float, dict[str, Tensor]]:
    trainer = quiet(use_distributed_sampler=False, **arguments)
    trainer.fit(module, DataLoader(batch(), batch_size=None))  # type: ignore[arg-type]
    return module.seen[0], module.gradients


def _each_right(rank: int) -> dict[str, Any]:
    return {name: fit(Steps(step), strategy=FiveD(ContextParallel(2)), devices=2) for name, step in RIGHT.items()}


def test_steps_are_right_whatever_they_do_with_sequences(ranks: RankPool) -> None:
    for found in ranks(2, _each_right, backend=None, timeout=60.0):
        for name, step in RIGHT.items():
            loss, gradients = fit(Steps(step), devices=1)
            assert found[name][0] == pytest.approx(loss, rel=1e-5), name
            largest = max(float(gradient.abs().max()) for gradient in gradients.values())
            assert set(found[name][1]) == set(gradients), name
            for weight, gradient in gradients.items():
                torch.testing.assert_close(found[name][1][weight], gradient, rtol=1e-5, atol=1e-5 * largest)


def _refusals(rank: int, modules: Mapping[str, Callable[[], Steps]]) -> dict[str, str]:
    said = {}
    for name, module in modules.items():
        with pytest.raises((MisconfigurationException, RankFailure)) as caught:
            fit(module(), strategy=FiveD(ContextParallel(2)), devices=2)
        said[name] = str(caught.value)
    return said


def _made(name: str) -> Steps:
    layer, what, _ = REFUSED[name]
    return Steps(lambda m, b: loss_of(m.net(b["input_ids"]), b), Inside(layer(), what))


def test_what_mixes_a_ranks_tokens_is_refused_in_a_trainer(ranks: RankPool) -> None:
    found = ranks(
        2, partial(_refusals, modules={name: partial(_made, name) for name in REFUSED}), backend=None, timeout=60.0
    )
    for name, (_, _, message) in REFUSED.items():
        for said in found:
            assert_says(said[name], message)


def assert_says(text: str, message: str) -> None:
    assert re.search(message, text, re.DOTALL), text


def _by_attribute(m: Any, b: Batch) -> Tensor:
    return loss_of(m.net(b["input_ids"]), b) + m.net.kept.pow(2).mean()


def _by_hook(m: Any, b: Batch) -> Tensor:
    caught: list[Tensor] = []
    handle = m.net.qkv.register_forward_hook(lambda module, args, output: caught.append(output))
    loss = loss_of(m.net(b["input_ids"]), b)
    handle.remove()
    return loss + caught[0].pow(2).mean()


def test_tensors_that_leave_a_model_by_the_window_are_refused(ranks: RankPool) -> None:
    modules = {"attribute": partial(Steps, _by_attribute), "hook": partial(Steps, _by_hook)}
    for said in ranks(2, partial(_refusals, modules=modules), backend=None, timeout=60.0):
        for name in modules:
            assert_says(said[name], "a module inside net has kept.*test_breaks.py.*8 of 16 tokens.*return it")


class Memory(nn.Module):
    """Looks things up in a memory that is no sequence of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.memory = nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.memory.expand(len(ids), -1, -1)
        return self.head(self.attention(self.embed(ids), memory, memory, need_weights=False)[0])


def _remembered() -> Steps:
    torch.manual_seed(0)
    return Steps(lambda m, b: loss_of(m.net(b["input_ids"]), b), Memory())


def _remembers(rank: int) -> Any:
    return fit(_remembered(), strategy=FiveD(ContextParallel(2)), devices=2)


def test_attention_to_a_memory_alone_is_none_that_was_missed(ranks: RankPool) -> None:
    loss, gradients = fit(_remembered(), devices=1)
    for found in ranks(2, _remembers, backend=None, timeout=60.0):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found[1]["net.memory"], gradients["net.memory"], rtol=1e-4, atol=1e-6)


class Unpacked(nn.Module):
    """Attention of torch's own layer, whose weights nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen, _ = self.attention(x, x, x)
        return self.head(x + seen)


def _unpacked() -> Steps:
    torch.manual_seed(0)
    return Steps(lambda m, b: loss_of(m.net(b["input_ids"]), b), Unpacked())


def _unpacks(rank: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(_unpacked(), strategy=FiveD(ContextParallel(2, keys={"input_ids": 1, "inptu": 1})), devices=2)
    return *found, [str(each.message) for each in caught if "keys=" in str(each.message)]


def test_weights_of_attention_that_nobody_uses_are_no_fault_and_names_that_nothing_has_are_told(
    ranks: RankPool,
) -> None:
    loss, gradients = fit(_unpacked(), devices=1)
    for rank, found in enumerate(ranks(2, _unpacks, backend=None, timeout=60.0)):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found[1]["net.head.weight"], gradients["net.head.weight"], rtol=1e-4, atol=1e-6)
        assert len(found[2]) == (rank == 0)
        assert rank or "called 'inptu'." in found[2][0]


def _adaptive(m: Any, b: Batch) -> Tensor:
    loss = loss_of(m.net(b["input_ids"]), b)
    (gradient,) = torch.autograd.grad(loss, [m.net.head.weight], retain_graph=True)
    return loss / gradient.norm()


def test_gradients_of_weights_are_refused_in_the_step(ranks: RankPool) -> None:
    modules = {"grad": partial(Steps, _adaptive)}
    for said in ranks(2, partial(_refusals, modules=modules), backend=None, timeout=60.0):
        assert_says(said["grad"], "torch.autograd.grad asks for the gradient of net.head.weight in the step")
