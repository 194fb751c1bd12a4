"""Context parallelism on two ranks as a share of a ceiling, and at 4096 tokens beside one process.

    python benchmarks/context.py [--size small|long|both] [--rounds 3] [--only "FiveD;rows"] [--rows 2]

Two ranks of one thread on this machine; each holds half of the tokens of every sequence. Contestants take turns within each round, a
share is the median over rounds of a ratio within the round, by wall time and by processor time, of tokens per second.

*small*: the decoder at 512 tokens, batches of ``--rows`` times its rows. Two ceilings, each of two processes that exchange nothing and
have as many tokens as a rank: *alone* computes on the tokens of a rank in zigzag order, with as many pairs of queries and keys in as
few calls of the kernel as a rank has (`sequence_by_hand.alone`); *rows* computes on half of the rows, whole. The pairs are as many,
but the kernel computes blocks of 512 keys in backward, whatever of them is masked, so short sequences cost more there.

*long*: the same decoder at 4096 tokens, one row. Zigzag beside contiguous order, and beside one process with one thread and the other core idle,
whose speed times two would be perfect.

By hand: `sequence_by_hand`, in a bare loop with torch's DDP. FiveD: an unchanged module in a Trainer. Bare: FiveD's attention in the loop by
hand; these take part only where ``--only`` names them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import sequence_by_hand
from benchmarks.contestants import LEARNING_RATE, ceiling, fit_and_tick
from benchmarks.decoder import SIZES, PositionedDecoder, Size
from benchmarks.ranks import RANKS, answers_of, timed

WARM_UP = 2
WHOLE_ROWS = ("rows", "one process")
"""Contestants whose processes have whole sequences: half of the rows, or all of them."""


def module_of(size: Size) -> Any:
    """An ordinary LightningModule: logits of the decoder, cross-entropy in its step."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.decoder = PositionedDecoder(size)

        def training_step(self, batch: Any, index: int) -> Tensor:
            tokens_BT, targets_BT = batch
            return F.cross_entropy(self.decoder(tokens_BT).flatten(0, 1), targets_BT.flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)

    return Module()


def five_d(method: str, **options: Any) -> Callable[[Size], Any]:
    """That module in a Trainer; instead of a step it returns a function that fits and calls ``tick`` after every step."""

    def make(size: Size) -> Any:
        def fit(batches: list[tuple[Tensor, Tensor]], tick: Callable[[], None]) -> None:
            from lightning_5d import ContextParallel, FiveD

            fit_and_tick(module_of(size), FiveD(ContextParallel(RANKS, method=method, **options)), batches, tick)

        return fit

    return make


_RINGS = {
    "FiveD ring, zigzag": five_d("ring"),
    "FiveD ring, contiguous": five_d("ring", balance="contiguous"),
}
_OTHERS = {"FiveD ulysses": five_d("ulysses"), "FiveD all_gather": five_d("all_gather")}
_BARE = {
    "bare ring, zigzag": sequence_by_hand.attention_of("ring"),
    "bare ring, contiguous": sequence_by_hand.attention_of("ring", balance="contiguous"),
    "bare ulysses": sequence_by_hand.attention_of("ulysses"),
    "bare all_gather": sequence_by_hand.attention_of("all_gather"),
}
_BY_HAND = {"all-gather by hand": sequence_by_hand.gathered, "ring-flash-attention": sequence_by_hand.ring}

Contestants = Mapping[str, Callable[[Size], Any]]
CONTESTANTS: dict[str, Contestants] = {
    "small": {"alone": sequence_by_hand.alone, "rows": ceiling, **_BY_HAND, **_RINGS, **_OTHERS, **_BARE},
    "long": {"one process": ceiling, "alone": sequence_by_hand.alone, **_BY_HAND, **_RINGS, **_OTHERS, **_BARE},
}
BENCHMARKS = {
    "small": SIZES["small"],
    "long": dataclasses.replace(SIZES["small"], batch=1, tokens=4096),
}
TARGETS = {("small", "rows"): 0.93, ("long", "FiveD ring, contiguous"): 1.25, ("long", "one process"): 0.90}
"""Of the ring in zigzag order, as a share of what is named."""


def run_rank(rank: int, port: int, size_name: str, size: Size, name: str, ranks: int, steps: int, results: Any) -> None:
    """One rank of one contestant in one round: puts (rank, seconds, processor seconds) of a step."""
    generator = torch.Generator().manual_seed(rank if name in WHOLE_ROWS else 0)
    batches: list[Any] = [
        torch.randint(size.vocabulary, (2, size.batch, size.tokens), generator=generator).unbind()
        for _ in range(WARM_UP + steps)
    ]
    make = CONTESTANTS[size_name][name]
    timed(rank, port, lambda: make(size), batches, WARM_UP, name.startswith("FiveD"), results, ranks=ranks)


def tokens_per_second(size_name: str, name: str, rows: int, steps: int) -> tuple[float, float]:
    """Tokens that all ranks together compute in a second, and in a second of one processor."""
    whole = BENCHMARKS[size_name]
    whole = dataclasses.replace(whole, batch=whole.batch * rows)
    ranks = 1 if name == "one process" else RANKS
    own = dataclasses.replace(whole, batch=whole.batch // RANKS) if name == "rows" else whole
    answers = answers_of(run_rank, size_name, own, name, ranks, steps, ranks=ranks)
    wall, processor = (statistics.mean(values) for values in list(zip(*answers, strict=True))[1:])
    tokens = whole.batch * whole.tokens
    print(f"{size_name} {name}: {wall * 1e3:.0f} ms", file=sys.stderr, flush=True)
    return tokens / wall, tokens / (processor * ranks)


def compare(size_name: str, names: list[str], rounds: int, steps: int, rows: int) -> None:
    """Runs the rounds and prints the table."""
    size = BENCHMARKS[size_name]
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            try:
                speeds[name].append(tokens_per_second(size_name, name, rows, steps))
            except RuntimeError as error:
                print(str(error)[-1500:], file=sys.stderr, flush=True)
    complete = {name: values for name, values in speeds.items() if len(values) == rounds}
    references = [name for name in ("alone", "rows", "one process") if name in complete]
    print(f"\n{size_name}: {RANKS} ranks, {size.layers} layers, {size.batch * rows} x {size.tokens} tokens; ", end="")
    print(f"{rounds} rounds of {steps} steps; tokens per second by wall / processor time, as a share of")
    print(" " * 24 + "".join(f"{_said(reference):>18}" for reference in references) + f"{'tokens/s':>12}")
    for name in names:
        if name not in complete:
            print(f"{name:24}  failed")
            continue
        shares = []
        for reference in references:
            wall, processor = _share(complete, name, reference)
            shares.append(f"{wall:9.3f} / {processor:5.3f}")
        speed = statistics.median(value for value, _ in complete[name])
        print(f"{name:24}" + "".join(f"{share:>18}" for share in shares) + f"{speed:12.0f}", flush=True)
    _judge(size_name, complete)


def _share(complete: Mapping[str, list[tuple[float, float]]], name: str, reference: str) -> tuple[float, float]:
    """Speed of one over that of the other, by wall and processor time; one process would be perfect on every rank."""
    pairs = list(zip(complete[name], complete[reference], strict=True))
    wall, processor = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
    return wall / (RANKS if reference == "one process" else 1), processor


def _judge(size_name: str, complete: Mapping[str, list[tuple[float, float]]]) -> None:
    zigzag = "FiveD ring, zigzag"
    for (of_size, reference), target in TARGETS.items():
        if of_size == size_name and zigzag in complete and reference in complete:
            share, _ = _share(complete, zigzag, reference)
            said = "met" if share >= target else "missed"
            print(f"{zigzag} over {_said(reference)}: {share:.3f}, target {target}: {said}", flush=True)


def _said(reference: str) -> str:
    return f"{RANKS} x {reference}" if reference == "one process" else reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=(*BENCHMARKS, "both"), default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed steps in each round (default: 3 small, 2 long)")
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by semicolons")
    parser.add_argument("--rows", type=int, choices=(1, 2), default=2, help="rows of a batch, in those of the size")
    arguments = parser.parse_args()
    usual = ";".join(name for name in CONTESTANTS["small"] | CONTESTANTS["long"] if name not in _BARE)
    chosen = tuple(part.strip() for part in (arguments.only or usual).split(";"))
    for size_name in BENCHMARKS if arguments.size == "both" else (arguments.size,):
        names = [name for name in CONTESTANTS[size_name] if name.startswith(chosen)]
        rows = arguments.rows if size_name == "small" else 1
        steps = arguments.steps or {"small": 3, "long": 2}[size_name]
        compare(size_name, names, arguments.rounds, steps, rows)


if __name__ == "__main__":
    main()
