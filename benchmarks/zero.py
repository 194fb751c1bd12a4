"""Steps per second of every ZeRO stage as a share of the ceiling, beside what else there is.

    python benchmarks/zero.py [--size small|medium|both] [--rounds 3] [--only "engine,torch DDP"]

Two ranks of one thread on this machine. The ceiling is two single-process runs side by side. Contestants take turns
within each round; a round's share is the ceiling's time over the contestant's, and the median over rounds is printed,
by wall time and by processor time (which other load on the machine disturbs less).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.contestants import CONTESTANTS, REFERENCES, TARGETS
from benchmarks.decoder import SIZES
from benchmarks.ranks import RANKS, answers_of, timed

WARM_UP = 3


def run_rank(rank: int, port: int, size_name: str, name: str, steps: int, results: Any) -> None:
    """One rank of one contestant in one round: puts (seconds, processor seconds, peak MiB) of a step."""
    size = SIZES[size_name]
    generator = torch.Generator().manual_seed(rank)
    batches: list[Any] = [
        torch.randint(size.vocabulary, (2, size.batch, size.tokens), generator=generator).unbind()
        for _ in range(WARM_UP + steps)
    ]
    fits = name.startswith(("Lightning", "FiveD"))
    timed(rank, port, lambda: CONTESTANTS[name](size), batches, WARM_UP, fits, results, _peak_mib)


def _peak_mib() -> float:
    """The peak of resident memory; with shared memory that counts the other rank's pages that this one reads, too."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return float(fields["VmHWM"].split()[0]) / 1024


def run(size_name: str, name: str, steps: int) -> tuple[float, float, float]:
    """All ranks of one contestant once; the mean over ranks."""
    answers = answers_of(run_rank, size_name, name, steps)
    wall, processor, peak = (statistics.mean(values) for values in list(zip(*answers, strict=True))[1:])
    return wall, processor, peak


def compare(size_name: str, names: list[str], rounds: int, steps: int) -> None:
    """Runs the rounds and prints the table."""
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            try:
                times[name].append(run(size_name, name, steps))
                print(f"{size_name} {name}: {times[name][-1][0] * 1e3:.0f} ms", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(str(error)[-1500:], file=sys.stderr, flush=True)
    reference = times["ceiling"]
    print(f"\n{size_name}: {RANKS} ranks, {rounds} rounds of {steps} steps; share of the ceiling (higher is better)")
    print(f"{'':32}{'wall':>7}{'proc.':>7}{'ms':>9}{'MiB/rank':>10}  target")
    shares: dict[str, float] = {}
    for name, measured in times.items():
        if len(measured) < rounds:
            print(f"{name:32}  failed")
            continue
        wall, processor = (
            statistics.median(c[i] / m[i] for c, m in zip(reference, measured, strict=True)) for i in (0, 1)
        )
        shares[name] = wall
        took = statistics.median(m[0] for m in measured) * 1e3
        peak = max(m[2] for m in measured)
        stage = int(name[-1]) if name.startswith(("engine", "FiveD")) else None
        target = (
            "" if stage is None else f"{TARGETS[size_name][stage]:.2f} " + _verdict(wall >= TARGETS[size_name][stage])
        )
        print(f"{name:32}{wall:7.3f}{processor:7.3f}{took:9.0f}{peak:10.0f}  {target}")
    best = max((share for name, share in shares.items() if name in REFERENCES), default=0.0)
    print(f"best reference: {best:.3f}", flush=True)


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=(*SIZES, "both"), default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each round")
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    arguments = parser.parse_args()
    chosen = tuple(part.strip() for part in arguments.only.split(",")) if arguments.only else ("",)
    names = [name for name in CONTESTANTS if name == "ceiling" or name.startswith(chosen)]
    for size_name in SIZES if arguments.size == "both" else (arguments.size,):
        compare(size_name, names, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
