"""Peak memory of one of two ranks under every ZeRO stage, beside torch's DDP.

    python benchmarks/memory.py [--size small|medium] [--only "engine,torch DDP"]

Two numbers, sampled every few milliseconds over three steps, after two that make the optimizer's state: *in use*, the
proportional set size (shared pages count half on each of two ranks) without the heap that the C library has free, and the
set size itself. The second depends on how allocations happen to lie, and comes out up to 100 MiB apart for the same program.
Every contestant has the same modules imported.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import lightning_5d.data_parallel  # noqa: F401  what the others need not load counts for nobody
from benchmarks.contestants import CONTESTANTS
from benchmarks.decoder import SIZES, Decoder
from benchmarks.ranks import RANKS, answers_of

WARM_UP, STEPS = 2, 3


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo2


class Sampler:
    """The largest values that this process's memory has while it runs, in MiB."""

    def __init__(self) -> None:
        self.in_use = self.resident = 0.0
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        self._running = False
        self._thread.join()
        return self.in_use, self.resident

    def _run(self) -> None:
        while self._running:
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            resident = next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
            self.resident = max(self.resident, resident)
            self.in_use = max(self.in_use, resident - _libc.mallinfo2().fordblks / (1 << 20))
            time.sleep(0.003)


def run_rank(rank: int, port: int, size_name: str, name: str, results: Any) -> None:
    """One rank of one contestant: puts (rank, MiB in use, MiB resident)."""
    try:
        torch.set_num_threads(1)
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0",
            WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), TORCHELASTIC_RUN_ID="benchmark", GROUP_RANK="0",
        )  # fmt: skip
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        size = SIZES[size_name]
        generator = torch.Generator().manual_seed(rank)
        batches = [
            torch.randint(size.vocabulary, (2, size.batch, size.tokens), generator=generator).unbind()
            for _ in range(WARM_UP + STEPS)
        ]
        done, sampler = 0, None

        def tick() -> None:
            nonlocal done, sampler
            done += 1
            if done == WARM_UP:
                sampler = Sampler()

        step = CONTESTANTS[name](size)
        if name.startswith(("Lightning", "FiveD")):
            step(batches, tick)
        else:
            for tokens, targets in batches:
                step(tokens, targets)
                tick()
        results.put((rank, *sampler.stop()))
        dist.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def run(size_name: str, name: str) -> tuple[float, float]:
    """The larger of both ranks' values."""
    answers = answers_of(run_rank, size_name, name)
    return max(answer[1] for answer in answers), max(answer[2] for answer in answers)


def less_by_the_table(name: str, parameters: float) -> str:
    """MiB below DDP of fp32 Adam: two moments, then the gradients, then the parameters are spread over the ranks."""
    if not name.startswith(("engine", "FiveD")):
        return ""
    kept_once = {0: 0, 1: 2, 2: 3, 3: 4}[int(name[-1])]
    return f"{kept_once * parameters * (1 - 1 / RANKS):6.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="medium")
    parser.add_argument("--only", default="torch DDP,engine", help="names, or beginnings of names, separated by commas")
    arguments = parser.parse_args()
    chosen = tuple(part.strip() for part in arguments.only.split(","))
    with torch.device("meta"):
        parameters = sum(p.numel() * 4 for p in Decoder(SIZES[arguments.size]).parameters()) / (1 << 20)
    gc.freeze()  # a collection in a rank would write to every page of what was imported here, and so make it the rank's own
    print(f"{arguments.size}: {parameters:.0f} MiB of parameters, {RANKS} ranks; MiB of one rank")
    print(f"{'':32}{'in use':>8}{'set size':>10}{'below DDP':>11}{'table':>8}")
    reference: float | None = None
    for name in CONTESTANTS:
        if name.startswith(chosen):
            in_use, resident = run(arguments.size, name)
            reference = in_use if name == "torch DDP" else reference
            below = "" if reference is None else f"{reference - in_use:11.0f}"
            print(
                f"{name:32}{in_use:8.0f}{resident:10.0f}{below:>11}{less_by_the_table(name, parameters):>8}", flush=True
            )


if __name__ == "__main__":
    main()
