"""The life of a rank process: wait for a call, run it as one rank of a fresh world, put everything back, answer."""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lightning_5d.launch import supervisor
from tests.ranks import answer
from tests.ranks.call import Call, Outcome
from tests.ranks.environment import as_torchrun
from tests.ranks.state import ProcessState


def work(call_fd: int, control_fd: int) -> None:
    """Serve calls until the pool closes its end."""
    calls, control = Connection(call_fd), Connection(control_fd)
    torch.set_num_threads(1)
    # A rank that fails later than another may do so much later on busy cores, and the pool ends those that wait.
    supervisor.LAST_WORDS_SECONDS = 60.0
    stacks: list[str] = []
    threading.Thread(target=_obey, args=(control, stacks), daemon=True, name="rank-control").start()
    state = ProcessState()
    while True:
        try:
            call: Call = calls.recv()
            stacks[:] = [call.stacks]
            calls.send(_serve(call))
            # Process groups stay until every rank has answered: closing them early fails the others.
            calls.recv()
        except EOFError:
            return
        calls.send(_tidy(state))


def _obey(control: Connection, stacks: list[str]) -> None:
    # A thread, not a signal: a Trainer puts every signal handler back to what Python knows of.
    while True:
        try:
            control.recv_bytes()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        with open(stacks[0], "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        control.send_bytes(b"dumped")


def _serve(call: Call) -> Outcome:
    result = failure = exception = None
    with open(call.log, "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # The control thread cannot write stacks while C code holds the interpreter lock; this timer can.
    with open(call.stacks, "w") as stacks:
        faulthandler.dump_traceback_later(call.seconds, file=stacks)
        faulthandler.enable(file=stacks)  # a crash in C code has no traceback
        try:
            result = answer.dumps(_run(call))
        except BaseException as error:
            failure = traceback.format_exc()
            with contextlib.suppress(Exception):
                exception = pickle.dumps(error)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome(call.rank, result, failure, exception)


def _tidy(state: ProcessState) -> list[str]:
    try:
        state.restore()
        return state.leftovers()
    except BaseException:
        return ["state that could not be put back: " + traceback.format_exc()]


def _run(call: Call) -> Any:
    sys.path[:] = call.path
    os.chdir(call.folder)
    for name, value in _environment(call).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ProcessState.seed()
    function, args, kwargs = pickle.loads(call.function)
    if call.backend is not None:
        dist.init_process_group(
            call.backend,
            # A file: nothing to resolve, no port, faster than TCP for so few keys.
            store=dist.FileStore(call.store, call.world_size),
            rank=call.rank,
            world_size=call.world_size,
            # Longer than the pool waits: a hang is reported with every rank's stack, not as one rank's timeout.
            timeout=timedelta(seconds=2 * call.seconds),
        )
        # A rank that is done at once must not close connections that another has not made yet.
        dist.barrier()
    return function(call.rank, *args, **kwargs)


def _environment(call: Call) -> dict[str, str | None]:
    return {**as_torchrun(call.rank, call.world_size, call.port), **call.environment}
