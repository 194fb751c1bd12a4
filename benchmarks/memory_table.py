"""Bytes per parameter of every ZeRO stage in every precision, measured, beside the formulas; writes the table of docs/memory.md.

    python benchmarks/memory_table.py [--print]

Two ranks on this machine train a small decoder with AdamW for two steps under `MemoryProfiler`. What a rank holds after
its second step is divided by the number of parameters. ``--print`` shows the table and leaves the document alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import traceback
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, LossScaling, ZeRO
from lightning_5d.callbacks import MemoryProfiler
from lightning_5d.memory import MemoryRecord
from lightning_5d.models import DecoderConfig
from lightning_5d.models.decoder import Decoder

RANKS = 2
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- table: python benchmarks/memory_table.py -->", "<!-- end of the table -->"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
STATES = ("weights", "master weights", "gradients", "optimizer momentum", "optimizer variance")


def expected(precision: str, stage: int, ranks: int) -> dict[str, float]:
    """Bytes per parameter that a rank holds between steps, by category."""
    mixed = precision.endswith("-mixed")
    kept = 4 if mixed or precision == "32-true" else 2  # masters, reduced gradients, states
    share = 1 if stage == 0 else ranks
    whole = 0 if stage == 3 else (2 if mixed else kept)
    sharded = kept / share
    if mixed:
        weights, masters = whole, sharded
    else:
        # Stages 1 and 2 hold the gathered weights; the shard that the optimizer updates is a part of them.
        weights, masters = max(whole, sharded), 0
    return dict(zip(STATES, (weights, masters, sharded, sharded, sharded), strict=True))


def textbook(precision: str, stage: int, ranks: int) -> float:
    """Bytes per parameter as the ZeRO paper counts: weights + gradients + (masters, momentum, variance)."""
    weights, gradients, optimizer = (4, 4, 8) if precision == "32-true" else (2, 2, 12)
    if precision.endswith("-true") and precision != "32-true":
        optimizer = 4
    return (
        weights / (ranks if stage == 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(DecoderConfig.preset("demo", context_length=32))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.decoder(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, eps=1e-4)


def run_rank(rank: int, port: int, folder: str, failures: Any) -> None:
    """All runs of one rank."""
    try:
        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        for name, value in {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0,
            "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "TORCHELASTIC_RUN_ID": "benchmark",
        }.items():  # fmt: skip
            os.environ[name] = str(value)
        rows = torch.randint(256, (16, 33), generator=torch.Generator().manual_seed(rank))
        for precision in PRECISIONS:
            for stage in range(4):
                scaling = LossScaling(init_scale=256.0) if precision.startswith("16") else None
                profiler = MemoryProfiler(f"{folder}/{precision}-{stage}", steps=2, pictures=False)
                trainer = L.Trainer(
                    accelerator="cpu", devices=RANKS, strategy=FiveD(ZeRO(stage=stage)), callbacks=[profiler], max_steps=2,
                    plugins=[FiveDPrecision(precision, loss_scaling=scaling)], logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
                )  # fmt: skip
                torch.manual_seed(0)
                trainer.fit(Model(), DataLoader(rows, batch_size=4))
    except BaseException:
        failures.put((rank, traceback.format_exc()))
        failures.close()
        failures.join_thread()
        os._exit(1)
    os._exit(0)


def measure(folder: Path) -> None:
    """Runs the ranks to their end."""
    context = get_context("spawn")
    failures = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=run_rank, args=(rank, port, str(folder), failures)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(
            "\n".join(f"rank {rank}: {text}" for rank, text in (failures.get(timeout=5) for _ in range(1)))
        )


def table(folder: Path) -> str:
    """The rows, in bytes per parameter on the rank that holds most."""
    parameters = sum(p.numel() for p in Model().parameters())
    head = [
        "precision",
        "stage",
        *STATES,
        "sum",
        "sum by formula",
        "as the ZeRO paper counts",
        "most gradients in backward",
    ]
    lines = [
        f"Φ = {parameters:,} parameters, N = {RANKS} ranks; bytes per parameter on one rank, measured (formula in brackets).",
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for precision in PRECISIONS:
        for stage in range(4):
            records = [MemoryRecord.load(path) for path in (folder / f"{precision}-{stage}").glob("memory_rank*.json")]
            formula = expected(precision, stage, RANKS)
            ends = [record.at_end("between", 2) for record in records]
            measured = {name: max(end[name] for end in ends) / parameters for name in STATES}
            peak = (
                max(p.highest.get("gradients", 0) for r in records for p in r.phases if p.name == "backward")
                / parameters
            )
            cells = [f"{measured[name]:.2f} ({formula[name]:g})" for name in STATES]
            sums = [
                f"**{sum(measured.values()):.2f}**",
                f"{sum(formula.values()):g}",
                f"{textbook(precision, stage, RANKS):g}",
            ]
            lines.append("| " + " | ".join([precision, str(stage), *cells, *sums, f"{peak:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", dest="only_print")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder))
        rows = table(Path(folder))
    if arguments.only_print:
        print(rows)
        return
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.split(END)[1]}")
    print(rows)


if __name__ == "__main__":
    main()
