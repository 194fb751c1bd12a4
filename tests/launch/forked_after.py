"""Programs that fork ranks in difficult circumstances, by name; each prints what became of them."""

import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from itertools import count
from pathlib import Path

import torch

from lightning_5d import FiveD
from lightning_5d.launch import RankFailure, watch
from tests.modules import TinyLM, loader
from tests.trainers import quiet


def threads() -> int:
    """How many threads this process has, Python's or not."""
    return len(os.listdir("/proc/self/task"))


def fit(module: TinyLM, ranks: int = 2) -> None:
    """Trains on forked ranks and prints how that ended."""
    try:
        trainer = quiet(strategy=FiveD(start_method="fork"), devices=ranks, max_steps=2)
        trainer.fit(module, loader(8))
        print("trained,", {name: float(value) for name, value in trainer.callback_metrics.items() if name == "threads"})
    except RankFailure as failure:
        print(failure)


def compute() -> float:
    """Enough for several threads."""
    weights = torch.ones(600, 600, requires_grad=True)
    (weights @ weights).exp().sum().backward()  # type: ignore[no-untyped-call]
    return float(weights.grad[0, 0] > 0)  # type: ignore[index]


class Computing(TinyLM):
    """Each rank uses the threads that it has."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        compute()
        self.log("threads", float(torch.get_num_threads()))
        return self.loss(batch)


def openmp() -> None:
    """This process and its ranks compute with two threads each."""
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(2)
    alone = threads()
    compute()
    print("threads of this process:", threads() - alone + 1)
    fit(Computing())
    compute()
    print("threads of this process:", threads() - alone + 1)


def server() -> None:
    """Counts the threads of this process when it is forked."""
    before, counted = threads(), []
    os.register_at_fork(before=lambda: counted.append(threads()))
    fit(TinyLM())
    print("more threads at forks:", [number - before for number in counted])


class Frozen(TinyLM):
    """All ranks sleep without letting go of the interpreter's lock."""

    def on_train_start(self) -> None:
        time.sleep(1.5)  # so that each has given a sign of life
        ctypes.PyDLL(None).sleep(600)


def frozen() -> None:
    """No rank can say that the others are silent."""
    watch.FROZEN_SECONDS = 4.0
    fit(Frozen())


class Lingering(TinyLM):
    """Rank 1 starts a thread that its process waits for."""

    def on_train_end(self) -> None:
        if self.global_rank == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()


def lingering() -> None:
    """The work is done, and a process does not end."""
    watch.END_SECONDS = 2.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Lingering())
    print([str(warning.message) for warning in caught if "has not ended" in str(warning.message)])


ORPHAN = Path("orphan").absolute()


class Orphaning(TinyLM):
    """A rank that is killed, and leaves a process that holds whatever it held."""

    def on_train_start(self) -> None:
        if (child := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        ORPHAN.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)


def orphaning() -> None:
    """The only rank is gone, and its pipes are open."""
    fit(Orphaning(), 1)
    os.kill(int(ORPHAN.read_text()), signal.SIGKILL)


class Failing(TinyLM):
    """A rank with an error."""

    def on_train_start(self) -> None:
        raise KeyError("the planned failure")


def failing() -> None:
    """The only rank fails."""
    fit(Failing(), 1)


def locked(ranks: int = 2) -> None:
    """The last rank never gets to run: it asks for a lock that was held when it was forked."""
    watch.START_SECONDS["fork"] = 3.0
    lock, forks = threading.Lock(), count()
    lock.acquire()
    os.register_at_fork(
        after_in_parent=lambda: next(forks), after_in_child=lambda: next(forks) == ranks - 1 and lock.acquire()
    )
    fit(TinyLM(), ranks)


def locked_alone() -> None:
    """The same, of one rank only."""
    locked(1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
