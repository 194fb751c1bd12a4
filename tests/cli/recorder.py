"""A callback that leaves a file for each rank of a run: who it was, where, and when."""

import json
import os
import time

import lightning.pytorch as L


class Recorder(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_fit_start(self, trainer, pl_module):
        os.makedirs(self.folder, exist_ok=True)
        checkpoint = next(c for c in trainer.callbacks if hasattr(c, "dirpath"))
        facts = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "time": time.time(),
            "checkpoints": checkpoint.dirpath,
            "root": trainer.default_root_dir,
            "strategy": type(trainer.strategy).__name__,
        }
        with open(os.path.join(self.folder, f"{os.getpid()}.json"), "w") as stream:
            json.dump(facts, stream)
