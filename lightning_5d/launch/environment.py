"""Environment variables that hold for a run, and are gone after it."""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

LAUNCH_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "GLOBAL_RANK",
    "OMP_NUM_THREADS",
)
"""What this package and Lightning set to launch ranks."""


@contextmanager
def variables(values: Mapping[str, str]) -> Generator[None, None, None]:
    """Sets `values`, and puts every launch variable back to what it was."""
    with kept({*LAUNCH_VARIABLES, *values}):
        os.environ.update(values)
        yield


@contextmanager
def kept(names: Iterable[str]) -> Generator[None, None, None]:
    """Puts the variables `names` back to what they were, whatever is written to them meanwhile."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
