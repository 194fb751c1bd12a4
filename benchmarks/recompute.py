"""Activations held, peak and time of a training step for every mode of activation checkpointing.

    python benchmarks/recompute.py [--size small|medium] [--batch 4] [--tokens 256] [--rounds 5]

One process, one thread. Modes take turns within each round; a time is the median over rounds of the mode's over that of the
run without checkpointing. Bytes are those of all storages that operations have made and that are alive: held when the forward
ends, and the peak of the whole step. Parameters and their gradients, which are there before, are not among them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import weakref
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_5d.activation_checkpointing import ActivationCheckpointing, Checkpointed
from lightning_5d.models.activations import block_activation_bytes
from lightning_5d.models.decoder import Decoder, DecoderConfig
from lightning_5d.plan import find_plan

MODES: dict[str, ActivationCheckpointing | None] = {
    "nothing recomputed": None,
    "full": ActivationCheckpointing(),
    "full, every=2": ActivationCheckpointing(every=2),
    "full, modules=*.mlp": ActivationCheckpointing(modules=("*.mlp",)),
    "selective": ActivationCheckpointing("selective"),
    "budget 0.75": ActivationCheckpointing(memory_budget=0.75),
    "budget 0.5": ActivationCheckpointing(memory_budget=0.5),
    "budget 0.25": ActivationCheckpointing(memory_budget=0.25),
}
FORMULAS = {"nothing recomputed": "none", "full": "full", "selective": "selective"}


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations under it have made and that are alive, now and at most."""

    def __init__(self, apart_from: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet(p.untyped_storage() for p in apart_from.parameters())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


class Contestant:
    """One decoder under one mode."""

    def __init__(self, config: DecoderConfig, options: ActivationCheckpointing | None, batch: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.decoder = Decoder(config)
        if options is not None:
            Checkpointed(self.decoder, options, find_plan(self.decoder))
        self.ids = torch.randint(config.vocab_size, (batch, tokens))
        self.step()  # where some modes measure

    def loss(self) -> Tensor:
        return F.cross_entropy(self.decoder(self.ids).flatten(0, 1), self.ids.flatten())

    def step(self) -> float:
        self.decoder.zero_grad()
        begin = time.perf_counter()
        self.loss().backward()
        return time.perf_counter() - begin

    def memory(self) -> tuple[int, int]:
        """Bytes held between forward and backward, and at most during the step, gradients in place."""
        self.decoder.zero_grad(set_to_none=False)
        with Alive(self.decoder) as alive:
            loss = self.loss()
            gc.collect()
            held = alive.now
            loss.backward()
        return held, alive.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("demo", "small", "medium"), default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = DecoderConfig.preset(arguments.size)
    contestants = {name: Contestant(config, mode, arguments.batch, arguments.tokens) for name, mode in MODES.items()}
    memory = {name: contestant.memory() for name, contestant in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, contestant in contestants.items():
            times[name].append(contestant.step())
    base = "nothing recomputed"
    print(f"{arguments.size}, batch {arguments.batch} x {arguments.tokens} tokens, {arguments.rounds} rounds")
    print(f"{'':24}{'held MiB':>10}{'share':>8}{'formula of blocks':>20}{'peak MiB':>10}{'share':>8}{'time':>8}")
    for name in contestants:
        ratio = statistics.median(one / other for one, other in zip(times[name], times[base], strict=True))
        formula = ""
        if name in FORMULAS:
            per_block = block_activation_bytes(config, arguments.batch, arguments.tokens, 4, FORMULAS[name])  # type: ignore[arg-type]
            formula = f"{config.num_layers * per_block / 2**20:.1f}"
        (held, peak), (all_held, all_peak) = memory[name], memory[base]
        print(
            f"{name:24}{held / 2**20:10.1f}{held / all_held:8.3f}{formula:>20}"
            f"{peak / 2**20:10.1f}{peak / all_peak:8.3f}{ratio:8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
