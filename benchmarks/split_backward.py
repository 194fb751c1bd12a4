"""Time of the two halves of a backward over that of a whole one: ours, and torch's split of the graph.

    python benchmarks/split_backward.py [--size small|medium] [--layers 4] [--microbatch 1] [--rounds 40]

One process, one thread: some layers of the benchmarks' decoder on one microbatch, as in the middle of a pipeline, with gradients
added to what earlier microbatches left. Ways take turns within each round; a share is the median over rounds of a way's time
over that of the whole backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from decoder import SIZES, Decoder
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights

Times = dict[str, float]


class Contestant:
    """Some layers of a decoder under one way of going backward."""

    def __init__(self, way: Callable[[Contestant, Tensor, Tensor], Times], layers: int, size: str, batch: int) -> None:
        torch.manual_seed(0)
        self.way = way
        self.decoder = Decoder(replace(SIZES[size], layers=layers, batch=batch))
        self.deferred = DeferredWeights(self.decoder.layers) if way is halves else None
        shape = (batch, SIZES[size].tokens, SIZES[size].width)
        self.input, self.gradient = torch.randn(shape), torch.randn(shape)

    def run(self) -> Times:
        x = self.input.clone().requires_grad_()
        begin = time.perf_counter()
        y = x
        for layer in self.decoder.layers:
            y = layer(y, self.decoder.cos, self.decoder.sin)
        forward = time.perf_counter() - begin
        times = self.way(self, x, y)
        return {"F": forward, **times, "B+W": sum(times.values())}

    def gradients(self) -> list[Tensor]:
        self.decoder.zero_grad()
        self.run()
        return [p.grad for p in self.decoder.layers.parameters() if p.grad is not None]


def whole(one: Contestant, x: Tensor, y: Tensor) -> Times:
    begin = time.perf_counter()
    torch.autograd.backward(y, one.gradient)
    return {"B": time.perf_counter() - begin}


def halves(one: Contestant, x: Tensor, y: Tensor) -> Times:
    assert one.deferred is not None
    begin = time.perf_counter()
    with one.deferred.collecting() as queue:
        torch.autograd.backward(y, one.gradient)
    middle = time.perf_counter()
    queue.run()
    return {"B": middle - begin, "W": time.perf_counter() - middle}


def graph_split(one: Contestant, x: Tensor, y: Tensor) -> Times:
    begin = time.perf_counter()
    _, groups = stage_backward_input([y], [one.gradient], [x], one.decoder.layers.parameters())
    middle = time.perf_counter()
    stage_backward_weight(one.decoder.layers.parameters(), groups)
    return {"B": middle - begin, "W": time.perf_counter() - middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways = {"whole backward": whole, "B and W": halves, "torch's graph split": graph_split}
    contestants = {
        name: Contestant(way, arguments.layers, arguments.size, arguments.microbatch) for name, way in ways.items()
    }
    expected = contestants["whole backward"].gradients()
    for name, contestant in contestants.items():
        for ours, theirs in zip(contestant.gradients(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
    rounds: list[dict[str, Times]] = []
    for _ in range(arguments.rounds):
        rounds.append({name: contestant.run() for name, contestant in contestants.items()})
    print(
        f"{arguments.layers} layers of {arguments.size}, microbatch {arguments.microbatch}, {arguments.rounds} rounds"
    )
    print(f"{'':20}{'F ms':>8}{'B ms':>8}{'W ms':>8}{'F share':>9}{'B+W share':>11}")
    for name in contestants:
        middle = {
            part: 1e3 * statistics.median(r[name][part] for r in rounds) if part in rounds[0][name] else 0.0
            for part in ("F", "B", "W")
        }
        share = {
            part: statistics.median(r[name][part] / r["whole backward"][part] for r in rounds) for part in ("F", "B+W")
        }
        print(
            f"{name:20}{middle['F']:8.2f}{middle['B']:8.2f}{middle['W']:8.2f}{share['F']:9.3f}{share['B+W']:11.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
