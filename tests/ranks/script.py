"""What `python SCRIPT …` and `python -m MODULE …` do, in a process that is warm already."""

import os
import runpy
import sys
import warnings

from tests.ranks.forks import Script
from tests.ranks.spare import fork_spare


def run_script(script: Script) -> int:
    """Run a program as `__main__`, with its arguments, in its folder and environment. Gives 0, as Python does at its end."""
    if script.spare and (started := fork_spare()) is not None:
        return run_script(started)
    os.environ.clear()
    os.environ.update(script.environment)
    os.chdir(script.folder)
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    first, *rest = script.arguments
    if first == "-m":
        name, *rest = rest
        sys.argv = [name, *rest]
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[0] = os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")
    return 0
