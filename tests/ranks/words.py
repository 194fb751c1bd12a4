"""What one rank of a call waits for and another says, apart from all process groups: an order of events without a clock."""

from datetime import timedelta

import torch.distributed as dist

SECONDS = 60.0


def say(word: str) -> None:
    """What `hear` waits for, on whatever rank."""
    dist.distributed_c10d._get_default_store().set(f"word/{word}", "said")


def hear(word: str, seconds: float = SECONDS) -> None:
    """Return once a rank has said the word; an error when nobody does in `seconds`."""
    dist.distributed_c10d._get_default_store().wait([f"word/{word}"], timedelta(seconds=seconds))
