"""Experts spread over two ranks beside the same experts whole on both, and grouped products beside a loop over experts.

    python benchmarks/experts.py [--rounds 10] [--steps 2] [--only "experts;DDP"] [--even] [--tiny] [--shared 2]
    python benchmarks/experts.py --layer [--rounds 5]

Two ranks of one thread on this machine, each with batches of its own; a decoder of which most of the work is in experts. All contestants are there at
once, each pair of ranks asleep but in its turn, of a few steps in each round; a share is the median over rounds of a ratio within the round, of tokens
per second by wall and by processor time. How far the quartiles are apart says how much the machine was disturbed.

*experts whole*: an unchanged module in a Trainer, `FiveD(ZeRO(stage=1))`. *ep 2*: `FiveD(ExpertParallel(2), ZeRO(stage=1))`. *ep 2, messages*: the same
through process groups in place of shared memory. *DDP, loop*: a bare loop with torch's DDP and the usual loop over experts, as Hugging Face has it.
``--even``: tokens take experts in turn, whatever routers say. Else an untrained router decides, and all ranks wait for the busiest: its share of the rows of a
layer, over the mean, is printed.

``--shared``: each layer has so many shared experts, too. *…, in turn*: they are computed before the others, as in one process, and not while tokens
travel; below the table is what that makes of tokens per second, by wall time.

``--tiny``: so few and narrow tokens that what is left is Python; the difference of *ep 2* and *experts whole* is what the axis adds.

Bytes of the all-to-all of a rank and step are printed beside ``4 * tokens * top_k * hidden * item`` for each layer: there and back, forward and backward.

``--layer``: forward and backward of one layer's experts in one process, by grouped products and by the loop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants import LEARNING_RATE, fit_and_tick
from benchmarks.ranks import RANKS
from benchmarks.turns import Turns, in_turns

WARM_UP = 3
TARGET = 1.0
"""Of *ep 2*, over *experts whole*."""


@dataclass(frozen=True)
class Size:
    """A decoder with experts, and the batch of a rank."""

    layers: int = 4
    width: int = 256
    inner: int = 512
    experts: int = 8
    top_k: int = 2
    rows: int = 4
    tokens: int = 256
    vocabulary: int = 512
    even: bool = False
    shared: int = 0


SIZES = {"usual": Size(), "tiny": Size(width=32, inner=16, rows=1, tokens=8, vocabulary=16)}


class LoopedExperts(nn.Module):
    """What a person has without grouped products: one expert after the other."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        out_ND = torch.zeros_like(hidden_ND)
        for expert in range(len(self.gate_up_proj)):
            token_S, place_S = torch.where(index_NK == expert)
            gate_SI, up_SI = F.linear(hidden_ND[token_S], self.gate_up_proj[expert]).chunk(2, -1)
            y_SD = F.linear(F.silu(gate_SI) * up_SI, self.down_proj[expert])
            out_ND.index_add_(0, token_S, y_SD * weights_NK[token_S, place_S, None])
        return out_ND


def decoder_of(size: Size, *, looped: bool = False) -> nn.Module:
    from lightning_5d.expert_parallel import routing
    from lightning_5d.models.decoder import Decoder, DecoderConfig

    if size.even:
        routing.choose = partial(_in_turn, size.experts)  # type: ignore[assignment]
    torch.manual_seed(0)
    decoder = Decoder(
        DecoderConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.inner,
            num_layers=size.layers,
            num_heads=4,
            num_kv_heads=2,
            context_length=size.tokens,
            moe={
                "experts": size.experts,
                "top_k": size.top_k,
                "intermediate_size": size.inner,
                "shared": size.shared,
            },
        )
    )
    for layer in decoder.layers if looped else ():
        layer.mlp.experts = LoopedExperts(layer.mlp.experts)
    return decoder


def _in_turn(experts: int, scores_NE: Tensor, bias_E: Tensor | None, top_k: int, *_: int) -> Tensor:
    return torch.arange(len(scores_NE) * top_k).view(-1, top_k) % experts


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    fused = len({type(parameter) for parameter in module.parameters()}) == 1
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=fused)


def five_d(*, spread: bool, messages: bool = False, in_turn: bool = False) -> Callable[..., Any]:
    """An unchanged module in a Trainer."""

    def make(size: Size, sent: list[float]) -> Any:
        import lightning as L

        from lightning_5d import ExpertParallel, FiveD, ZeRO

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.decoder = decoder_of(size)

            def training_step(self, batch: Any, index: int) -> Tensor:
                tokens_BT, targets_BT = batch
                return F.cross_entropy(self.decoder(tokens_BT).flatten(0, 1), targets_BT.flatten())

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return _adamw(self)

        class Sent(L.Callback):
            def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                for axis in trainer.strategy.parallelized:
                    if hasattr(axis, "loads"):
                        axis.loads.counting = True

            def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                exchanges = [getattr(axis, "_exchange", None) for axis in trainer.strategy.parallelized]
                total = sum(each.traffic.bytes.get("all_to_all", 0) for each in exchanges if hasattr(each, "routes"))
                loads = next(axis.loads for axis in trainer.strategy.parallelized if hasattr(axis, "loads"))
                rows_T = loads.take(torch.device("cpu"))[0]
                dist.all_reduce(rows_T)
                rows_LR = rows_T.view(len(loads), RANKS, -1).sum(2).double()
                sent[:] = [total / trainer.global_step, float((rows_LR.amax(1) / rows_LR.mean(1)).mean())]

        def fit(batches: list[tuple[Tensor, Tensor]], tick: Callable[[], None]) -> None:
            if messages:
                from lightning_5d.expert_parallel.host_exchange import HostTokenExchange

                HostTokenExchange.connect = classmethod(lambda cls, group: None)  # type: ignore[method-assign,assignment]
            if in_turn:
                from lightning_5d.expert_parallel.door import ExpertDoor

                ExpertDoor.travels = lambda door, hidden: False  # type: ignore[method-assign]
            plugins = [ExpertParallel(RANKS)] if spread else []
            fit_and_tick(Module(), FiveD(*plugins, ZeRO(stage=1)), batches, tick, Sent())

        return fit

    return make


def ddp(*, looped: bool) -> Callable[..., Any]:
    """A bare loop."""

    def make(size: Size, sent: list[float]) -> Any:
        module = nn.parallel.DistributedDataParallel(decoder_of(size, looped=looped), gradient_as_bucket_view=True)
        optimizer = _adamw(module)

        def step(tokens_BT: Tensor, targets_BT: Tensor) -> None:
            loss = F.cross_entropy(module(tokens_BT).flatten(0, 1), targets_BT.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    return make


CONTESTANTS: dict[str, Callable[..., Any]] = {
    "experts whole": five_d(spread=False),
    "ep 2": five_d(spread=True),
    "ep 2, in turn": five_d(spread=True, in_turn=True),
    "ep 2, messages": five_d(spread=True, messages=True),
    "ep 2, messages, in turn": five_d(spread=True, messages=True, in_turn=True),
    "DDP, grouped": ddp(looped=False),
    "DDP, loop": ddp(looped=True),
}


def compare(size: Size, names: list[str], rounds: int, steps: int) -> None:
    """Runs the rounds and prints the table."""

    def make(name: str, rank: int, turns: Turns) -> Callable[[], list[float]]:
        generator = torch.Generator().manual_seed(rank)
        batches: list[Any] = [
            torch.randint(size.vocabulary, (2, size.rows, size.tokens), generator=generator).unbind()
            for _ in range(WARM_UP + rounds * (steps + 1))
        ]
        sent: list[float] = []
        step = CONTESTANTS[name](size, sent)

        def run() -> list[float]:
            if not name.startswith("DDP"):
                step(batches, turns.tick)
            else:
                for tokens_BT, targets_BT in batches:
                    step(tokens_BT, targets_BT)
                    turns.tick()
            return sent or [0.0, 1.0]

        return run

    times, ends = in_turns(make, names, rounds, WARM_UP, steps)
    tokens = size.rows * size.tokens
    expected = 4 * tokens * size.top_k * size.width * 4 * size.layers
    print(f"{RANKS} ranks, {size}, {rounds} rounds of {steps} steps; tokens per second as a share of {names[0]}")
    print(f"{'':24}{'wall':>8}{'quartiles':>16}{'proc.':>8}{'quartiles':>16}{'ms':>9}{'sent, MB':>10}")
    for name in names:
        shares = [[each[names[0]][i] / each[name][i] for each in times] for i in (0, 1)]
        wall, processor = (statistics.median(values) for values in shares)
        low_high = [" to ".join(f"{q:.3f}" for q in statistics.quantiles(values, n=4)[::2]) for values in shares]
        took = statistics.median(each[name][0] for each in times) * 1e3
        _, sent, busiest = (statistics.mean(values) for values in zip(*ends[name], strict=True))
        print(
            f"{name:24}{wall:8.3f}{low_high[0]:>16}{processor:8.3f}{low_high[1]:>16}{took:9.2f}{sent / 1e6:10.3f}",
            flush=True,
        )
        if name == "ep 2":
            judged = "" if size.width < 64 else f"; target {TARGET}: {'met' if wall >= TARGET else 'missed'}"
            print(f"{'':24}bytes: {sent / expected:.6f} of 4 x tokens x top-k x hidden x item", end="; ")
            print(f"the busiest rank has {busiest:.3f} of the mean rows of a layer{judged}")
    for name in names:
        if (other := f"{name}, in turn") in names:
            gains = [each[other][0] / each[name][0] for each in times]
            between = " to ".join(f"{q:.3f}" for q in statistics.quantiles(gains, n=4)[::2])
            print(f"{name}: {statistics.median(gains):.3f} ({between}) of {other}")


def compare_layer(size: Size, rounds: int) -> None:
    """Experts of one layer, forward and backward, in one process."""
    torch.set_num_threads(1)
    layer = decoder_of(size).layers[0].mlp
    grouped, looped = layer.experts, LoopedExperts(layer.experts)
    hidden_ND = torch.randn(size.rows * size.tokens, size.width, requires_grad=True)
    routed = layer.gate(hidden_ND.detach())
    index_NK, weights_NK = routed.index_NK, routed.weights_NK.detach().requires_grad_()

    def seconds(experts: nn.Module) -> float:
        start = time.perf_counter()
        for _ in range(5):
            out_ND = experts(hidden_ND, index_NK, weights_NK)
            out_ND.backward(torch.ones_like(out_ND))
            for tensor in (hidden_ND, weights_NK, *experts.parameters()):
                tensor.grad = None
        return (time.perf_counter() - start) / 5

    for experts in (grouped, looped):
        seconds(experts)
    pairs = [(seconds(grouped), seconds(looped)) for _ in range(rounds)]
    print(
        f"one layer, {size}: grouped {statistics.median(a for a, _ in pairs) * 1e3:.1f} ms, loop"
        f" {statistics.median(b for _, b in pairs) * 1e3:.1f} ms; grouped is {statistics.median(b / a for a, b in pairs):.3f} times as fast"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="at least 2")
    parser.add_argument("--steps", type=int, default=2, help="timed steps in each round, after one that is not")
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by semicolons")
    parser.add_argument("--even", action="store_true", help="tokens take experts in turn")
    parser.add_argument("--tiny", action="store_true", help="hardly any work, so that what is left is Python")
    parser.add_argument("--layer", action="store_true", help="grouped products beside the loop, one layer, one process")
    parser.add_argument("--shared", type=int, default=0, help="shared experts of a layer")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="of a row")
    arguments = parser.parse_args()
    base = SIZES["tiny" if arguments.tiny else "usual"]
    size = Size(
        **{
            **vars(base),
            "experts": arguments.experts,
            "tokens": arguments.tokens or base.tokens,
            "even": arguments.even,
            "shared": arguments.shared,
        }
    )
    if arguments.layer:
        compare_layer(size, arguments.rounds)
        return
    chosen = tuple(part.strip() for part in arguments.only.split(";")) if arguments.only else ("",)
    names = [name for name in CONTESTANTS if name == "experts whole" or name.startswith(chosen)]
    if not size.shared:
        names = [name for name in names if not name.endswith("in turn")]
    compare(size, names, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
