"""Tensor and sequence parallelism on two ranks as a share of the ceiling, beside torch's own and Lightning's.

    python benchmarks/tensor.py [--size small|medium|both] [--rounds 3] [--only "FiveD,ceiling"] [--rows 1]

Two ranks of one thread on this machine. The ceiling is two processes side by side, each of which trains the whole model on a batch of
its own. The tensor axis computes one batch on both ranks, by default of as many rows as the two processes have together; with
``--rows 1`` of as many as one of them has. A share compares tokens per second. Contestants take turns within each round, and the median
over rounds is printed, by wall time and by processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks.contestants import ceiling, fit_and_tick, trainer
from benchmarks.decoder import SIZES, Decoder, Size
from benchmarks.ranks import RANKS, answers_of, timed

WARM_UP = 3
ROWS = {"1": 1, "2": RANKS}
TARGETS = {
    "small": {"FiveD TP": 0.75, "FiveD TP+SP": 0.75},
    "medium": {"FiveD TP": 0.78, "FiveD TP+SP": 0.78},
}
PLAN = {
    "decoder.embedding": "vocabulary",
    **{f"decoder.layers.*.{name}": "colwise" for name in ("attention.q", "attention.k", "attention.v", "gate", "up")},
    **{f"decoder.layers.*.{name}": "rowwise" for name in ("attention.o", "down")},
    "decoder.head": "vocabulary",
}


def _parallelize(decoder: Decoder, mesh: Any, *, sequence: bool) -> None:
    """torch's own styles, with its vocabulary-parallel loss."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    out: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    whole = {"desired_input_layouts": (Replicate(), None, None), "input_layouts": (Shard(1), None, None)}
    for layer in decoder.layers:
        attention: Any = layer.attention
        attention.heads //= mesh.size()
        attention.kv_heads //= mesh.size()
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan["attention.o"] = RowwiseParallel(**out)
        column = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
        plan.update(gate=column, up=column, down=RowwiseParallel(**out))
        if sequence:
            plan.update(
                attention=PrepareModuleInput(**whole),  # type: ignore[arg-type]
                attention_norm=SequenceParallel(),
                mlp_norm=SequenceParallel(),
            )
            plan["gate"] = plan["up"] = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(layer, mesh, plan)
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate())
    root: dict[str, Any] = {"embedding": first}
    if sequence:
        root["norm"] = SequenceParallel()
    root["head"] = ColwiseParallel(
        input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(decoder, mesh, root)


def torch_styles(*, sequence: bool) -> Callable[[Size], Any]:
    """`parallelize_module` in a bare loop."""

    def make(size: Size) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import loss_parallel

        torch.manual_seed(0)
        module = Decoder(size)
        _parallelize(module, init_device_mesh("cpu", (RANKS,)), sequence=sequence)
        # The fused kernel takes parameters of one tensor class only.
        kinds = {type(parameter) for parameter in module.parameters()}
        optimizers = [
            torch.optim.AdamW([p for p in module.parameters() if type(p) is kind], lr=1e-3, fused=True)
            for kind in kinds
        ]

        def step(tokens: Tensor, targets: Tensor) -> None:
            with loss_parallel():
                loss = module(tokens, targets)
                module.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()

        return step

    return make


def lightning_model_parallel(size: Size) -> Any:
    """Lightning's strategy, whose user calls `parallelize_module` in `configure_model`."""

    def fit(batches: list[tuple[Tensor, Tensor]], tick: Callable[[], None]) -> None:
        import lightning as L
        from lightning.pytorch.strategies import ModelParallelStrategy
        from torch.distributed.tensor.parallel import loss_parallel

        class Module(L.LightningModule):
            decoder: nn.Module

            def configure_model(self) -> None:
                torch.manual_seed(0)
                self.decoder = Decoder(size)
                _parallelize(self.decoder, self.device_mesh["tensor_parallel"], sequence=False)  # type: ignore[index]

            def training_step(self, batch: Any, index: int) -> Tensor:
                with loss_parallel():
                    loss: Tensor = self.decoder(*batch)
                return loss

            def backward(self, *arguments: Any, **options: Any) -> None:
                with loss_parallel():
                    super().backward(*arguments, **options)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS)
        fit_and_tick(Module(), strategy, batches, tick)

    return fit


def five_d(*, sequence: bool) -> Callable[[], Any]:
    """An unchanged module in a Trainer."""

    def make() -> Any:
        from lightning_5d import FiveD, TensorParallel

        return FiveD(TensorParallel(RANKS, sequence_parallel=sequence, plan=PLAN))

    return make


CONTESTANTS: dict[str, Callable[[Size], Any]] = {
    "ceiling": ceiling,
    "torch TP": torch_styles(sequence=False),
    "torch TP+SP": torch_styles(sequence=True),
    "Lightning TP": lightning_model_parallel,
    "FiveD TP": trainer(five_d(sequence=False)),
    "FiveD TP+SP": trainer(five_d(sequence=True)),
}


def run_rank(rank: int, port: int, size: Size, name: str, steps: int, results: Any) -> None:
    """One rank of one contestant in one round: puts (seconds, processor seconds) of a step."""
    generator = torch.Generator().manual_seed(rank if name == "ceiling" else 0)
    batches: list[Any] = [
        torch.randint(size.vocabulary, (2, size.batch, size.tokens), generator=generator).unbind()
        for _ in range(WARM_UP + steps)
    ]
    fits = name.startswith(("Lightning", "FiveD"))
    timed(rank, port, lambda: CONTESTANTS[name](size), batches, WARM_UP, fits, results)


def compare(size_name: str, names: list[str], rounds: int, steps: int, rows: int) -> None:
    """Runs the rounds and prints the table."""
    one = SIZES[size_name]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            size = one if name == "ceiling" else dataclasses.replace(one, batch=one.batch * rows)
            try:
                answers = answers_of(run_rank, size, name, steps)
            except RuntimeError as error:
                print(str(error)[-1500:], file=sys.stderr, flush=True)
                continue
            wall, processor = (statistics.mean(values) for values in list(zip(*answers, strict=True))[1:])
            times[name].append((wall, processor))
            print(f"{size_name} {name}: {wall * 1e3:.0f} ms", file=sys.stderr, flush=True)
    print(
        f"\n{size_name}: {RANKS} ranks, {rounds} rounds of {steps} steps, {rows} x {one.batch} rows; share of the ceiling"
    )
    print(f"{'':16}{'wall':>7}{'proc.':>7}{'ms':>9}  target")
    for name, measured in times.items():
        if len(measured) < rounds:
            print(f"{name:16}  failed")
            continue
        factor = 1.0 if name == "ceiling" else rows / RANKS
        wall, processor = (
            factor * statistics.median(c[i] / m[i] for c, m in zip(times["ceiling"], measured, strict=True))
            for i in (0, 1)
        )
        took = statistics.median(m[0] for m in measured) * 1e3
        target = TARGETS[size_name].get(name)
        said = "" if target is None else f"{target:.2f} {'met' if wall >= target else 'missed'}"
        print(f"{name:16}{wall:7.3f}{processor:7.3f}{took:9.0f}  {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=(*SIZES, "both"), default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each round")
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--rows", choices=tuple(ROWS), default="2", help="rows of a batch, in those of one process")
    arguments = parser.parse_args()
    chosen = tuple(part.strip() for part in arguments.only.split(",")) if arguments.only else ("",)
    names = [name for name in CONTESTANTS if name == "ceiling" or name.startswith(chosen)]
    for size_name in SIZES if arguments.size == "both" else (arguments.size,):
        compare(size_name, names, arguments.rounds, arguments.steps, ROWS[arguments.rows])


if __name__ == "__main__":
    main()
