"""A program whose second forked rank never gets to run: it asks for a lock that was held when it was forked."""

import os
import threading
from itertools import count

from lightning_5d import FiveD
from lightning_5d.launch import RankFailure, in_process
from tests.modules import TinyLM, loader
from tests.trainers import quiet


def main() -> None:
    """Trains with a start that may take 3 seconds, and prints why that fails."""
    in_process.START_SECONDS["fork"] = 3.0
    lock, forks = threading.Lock(), count()
    lock.acquire()
    os.register_at_fork(after_in_parent=lambda: next(forks), after_in_child=lambda: next(forks) == 1 and lock.acquire())
    try:
        quiet(strategy=FiveD(start_method="fork"), devices=2).fit(TinyLM(), loader(4))
    except RankFailure as failure:
        print(failure)


if __name__ == "__main__":
    main()
