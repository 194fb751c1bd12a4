"""A training script that fails where it is told to; the tests of launching start it as a user would."""

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader, get_worker_info

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.launch import pulse, waiting


def strike(how: str) -> None:
    sys.stdout.write(f"STRUCK {time.monotonic()}\n")  # the clock of the machine
    sys.stdout.flush()
    if how == "raise":
        raise ValueError("the planned failure")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(0)
    if how == "abort":
        os.abort()  # as C and C++ end when they find memory that nobody can have written
    if how == "freeze":
        ctypes.PyDLL(None).sleep(600)  # with the interpreter lock, unlike most that take long
    if how == "nap":
        time.sleep(12)
        return
    time.sleep(600)


class Data(RandomDataset):
    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)  # stages of a pipeline read the same
        super().__init__(32, 64)
        self.options = options

    def __getitem__(self, index: int) -> torch.Tensor:
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        if self.options.where == "worker" and get_worker_info() is not None and rank == self.options.rank and index > 8:
            strike(self.options.how)
        return super().__getitem__(index)


class Module(BoringModel):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(32, 32) for _ in range(2 if options.where == "forward" or options.pipeline else 0)
        )
        self.layer = self._modules.pop("layer")  # behind the blocks, as it runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.options.pipeline:
            for block in self.blocks:
                x = block(x)
        return super().forward(x)

    def _reach(self, place: str) -> None:
        if self.options.where == place and self.trainer.global_rank == self.options.rank:
            strike(self.options.how)

    def prepare_data(self) -> None:
        if self.options.where == "prepare_data":
            strike(self.options.how)

    def setup(self, stage: str) -> None:
        self._reach("setup")

    def on_train_start(self) -> None:
        print("TRAINING", os.getpid(), flush=True)
        self._reach("hook")

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
        alone = self.options.where == "loop" and self.trainer.global_rank == self.options.rank
        return -1 if alone and batch_idx == 2 else None

    def extra_forward(self, batch: torch.Tensor) -> None:
        if self.options.where == "forward" and self.trainer.global_rank == self.options.rank:
            with torch.no_grad():
                for _ in range(3):  # ranks may differ in whether they use a block, not in how often
                    self.blocks[0](batch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.extra_forward(batch)
            self._reach("training_step")
        time.sleep(self.options.pause)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 1 and not self.trainer.sanity_checking:
            self._reach("validation")
        return super().validation_step(batch, batch_idx)

    def _loader(self) -> DataLoader[torch.Tensor]:
        rows = 2 if self.options.pipeline else 1
        return DataLoader(Data(self.options), rows, num_workers=self.options.workers)

    train_dataloader = val_dataloader = test_dataloader = _loader


def trainer(options: argparse.Namespace) -> L.Trainer:
    pipeline = (PipelineParallel(options.pipeline, microbatches=2),) if options.pipeline else ()
    return L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=FiveD(ZeRO(stage=options.stage), *pipeline, start_method=options.method),
        max_steps=options.steps,
        limit_val_batches=2,
        val_check_interval=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--how", default="raise")
    parser.add_argument("--method", default="popen")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--then", default="")
    parser.add_argument("--silence", type=float, default=pulse.SILENCE_SECONDS)
    parser.add_argument("--patience", type=float, default=waiting.WAIT_SECONDS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    pulse.SILENCE_SECONDS, waiting.WAIT_SECONDS = options.silence, options.patience
    before = dict(os.environ)
    one = trainer(options)
    module = Module(options)
    one.fit(module)
    leaked = {name: os.environ.get(name) for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    report: dict[str, Any] = {"rank": one.global_rank, "steps": one.global_step, "leaked": leaked}
    if options.then == "test":
        one.test(module, verbose=False)
        report["tested"] = one.state.finished
    if options.then == "again":
        two = trainer(options)
        two.fit(Module(options))
        report["again"] = [two.global_rank, two.world_size, two.global_step]
    if options.then.isdigit():
        options.devices = int(options.then)
        try:
            trainer(options).fit(Module(options))
        except Exception as error:
            report["error"] = str(error)
    if options.then == "raise" and one.global_rank == 1:
        raise ValueError("after training")
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")  # one write: ranks share the file
    sys.stdout.flush()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # for `Running.where`; data workers inherit it
    sys.exit(main())
