"""What a process puts away before it forks ranks: a thread is not forked, and whoever waits for it in the copy waits for ever."""

import contextlib
import ctypes
import sys
from pathlib import Path

_OMP_PAUSE_SOFT = 1


def end_openmp_threads() -> None:
    """Ends the threads that OpenMP keeps for the calling thread; they come back with its next parallel computation.

    After a computation with several threads GNU's OpenMP, which torch uses on Linux, hands work in a forked process to threads
    that are not there. LLVM's and Intel's take care of forks themselves.
    """
    if sys.platform != "linux":
        return
    # Not only torch's: other packages bring their own copies.
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for path in sorted(path for path in mapped if Path(path).name.startswith("libgomp")):
        with contextlib.suppress(OSError, AttributeError):  # deleted meanwhile, or older than OpenMP 5
            ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_SOFT)
