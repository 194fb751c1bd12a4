"""Memory and causal work of the ranks of a context axis.

    python benchmarks/context_memory.py [--method ring] [--balance zigzag] [--ranks 1,2,4] [--tokens 2048]

The decoder `small` with 4 layers, one row, in a Trainer, in bytes of activations by `MemoryProfiler`: held when the forward ends, and at
most, of the rank that has most. First at a fixed length, then at one that grows with the ranks, so that each has as many tokens as one
process alone. Buffers of exchanges are apart. Work is the pairs of queries and keys in the calls of attention kernels of a step,
causal ones counted as the kernel must compute them: the largest rank's over the mean, and that of all ranks over one process's.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contestants import fit_and_tick
from benchmarks.context import module_of
from benchmarks.decoder import SIZES, Size
from benchmarks.ranks import answers_of, join

STEPS = 2
MIB = 2**20


class Pairs(TorchDispatchMode):
    """Counts the pairs of queries and keys, over heads and rows, that flash kernels in forward are called for."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            rows, heads, queries, _ = args[0].shape
            keys = args[1].shape[2]
            causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
            pairs = sum(min(query + 1, keys) for query in range(queries)) if causal else queries * keys
            self.counted += rows * heads * pairs
        return func(*args, **kwargs)


def run_rank(rank: int, port: int, size: Size, ranks: int, options: dict[str, Any], results: Any) -> None:
    """One rank of a run: puts (rank, bytes held after forward, most bytes, most bytes of buffers, pairs)."""
    try:
        join(rank, port, ranks)
        from lightning_5d import ContextParallel, FiveD
        from lightning_5d.callbacks import MemoryProfiler

        batches: list[Any] = [torch.randint(size.vocabulary, (2, 1, size.tokens)).unbind()] * STEPS
        with tempfile.TemporaryDirectory() as folder:
            profiler = MemoryProfiler(folder, steps=STEPS, pictures=False)
            strategy = FiveD(ContextParallel(ranks, **options))
            fit_and_tick(module_of(size), strategy, batches, lambda: None, profiler)
        assert profiler.recorder is not None
        record = profiler.recorder.record
        held = record.at_end("forward", STEPS)["activations"]
        last = [phase.highest for phase in record.phases if phase.step == STEPS]
        most, buffers = (max(phase.get(name, 0) for phase in last) for name in ("activations", "communication buffers"))
        with Pairs() as pairs:
            fit_and_tick(module_of(size), FiveD(ContextParallel(ranks, **options)), batches[:1], lambda: None)
        results.put((rank, held, most, buffers, pairs.counted))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("ring", "ulysses", "all_gather"), default="ring")
    parser.add_argument("--balance", choices=("zigzag", "contiguous"), default="zigzag")
    parser.add_argument("--ranks", default="1,2,4", help="sizes of the axis, separated by commas; one process first")
    parser.add_argument("--tokens", type=int, default=2048, help="of the fixed length, and of one rank where it grows")
    arguments = parser.parse_args()
    options = {"method": arguments.method, "balance": arguments.balance}
    sizes = [int(part) for part in arguments.ranks.split(",")]
    small = dataclasses.replace(SIZES["small"], layers=4, batch=1)
    print(f"{arguments.method}, {arguments.balance}; MiB of activations of the rank with most")
    print(
        f"{'tokens':>8}{'ranks':>7}{'held':>9}{'share':>8}{'most':>9}{'share':>8}{'buffers':>9}{'work':>8}{'in all':>8}"
    )
    for grows in (False, True):
        alone: tuple[Any, ...] | None = None
        for ranks in sizes:
            tokens = arguments.tokens * (ranks if grows else 1)
            size = dataclasses.replace(small, tokens=tokens)
            _, held, most, buffers, pairs = zip(*answers_of(run_rank, size, ranks, options, ranks=ranks), strict=True)
            alone = alone or (max(held), max(most))
            once = small.layers * small.heads * tokens * (tokens + 1) / 2
            line = f"{tokens:8}{ranks:7}"
            for values, one in zip((held, most), alone, strict=True):
                line += f"{max(values) / MIB:9.1f}{max(values) / one:8.3f}"
            line += f"{max(buffers) / MIB:9.1f}{max(pairs) / statistics.mean(pairs):8.3f}{sum(pairs) / once:8.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
