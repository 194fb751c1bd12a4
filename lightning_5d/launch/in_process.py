"""Ranks that are started from this process, for notebooks and tests; results come back into it."""

import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _disable_module_memory_sharing,
)
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_5d.launch.environment import variables
from lightning_5d.launch.failure import Failure, RankFailure
from lightning_5d.launch.forking import end_openmp_threads
from lightning_5d.launch.job import Job
from lightning_5d.launch.processes import describe_exit, die_with, leave
from lightning_5d.launch.rendezvous import PrefixStore, Rendezvous, Store, bind, serve
from lightning_5d.launch.signals import take_over_sigterm
from lightning_5d.launch.supervisor import GRACE_SECONDS, LAST_WORDS_SECONDS
from lightning_5d.launch.waiting import progress_of
from lightning_5d.launch.watch import LOOK_SECONDS, Watch

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

_LOOPBACK = "127.0.0.1"
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "lightning.pytorch", "lightning_5d"]


class InProcessLauncher(_MultiProcessingLauncher):
    """Lightning's multiprocessing launcher, with whole weights under every sharding, supervision, and no leftovers.

    After `launch`, this process holds what rank 0 had: the trained weights, callback metrics, path of the best
    checkpoint and the return value. A rank's exception is raised here as a `RankFailure` with that rank's traceback.

    Args:
        strategy: The strategy this belongs to; it gives whole weights by `full_state_dict()`.
        start_method: `"spawn"`, `"forkserver"` or `"fork"`.
    """

    # Written against lightning 2.6.6.

    def __init__(self, strategy: "ParallelStrategy", start_method: Any = "forkserver") -> None:
        super().__init__(strategy, start_method)
        self._job: Job | None = None
        self._ends: list[socket.socket | Connection] = []

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        if self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                f'start_method="{self._start_method}" imports the main script in every rank, and this script trains when it is'
                ' imported. Put what it does under `if __name__ == "__main__":`.'
            )
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f'The second `fit` of one Trainer is not possible with start_method="{self._start_method}": loops and'
                " optimizers were in the processes of the first. Make a new Trainer and pass `ckpt_path` to its `fit`, or use"
                ' start_method="popen".'
            )
        if trainer is not None:
            take_over_sigterm(trainer)
        count = len(self._strategy.parallel_devices or [])
        host = os.environ.get("MASTER_ADDR", _LOOPBACK)
        server = bind(host, int(os.environ.get("MASTER_PORT", 0)))
        port = server.getsockname()[1]
        environment = self._strategy.cluster_environment
        values = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        remembered = getattr(environment, "_main_port", None)
        if remembered is not None:
            environment._main_port = port  # type: ignore[union-attr]
        try:
            with variables(values):
                output = self._run_ranks(count, server, host, trainer, (function, args, kwargs))
        finally:
            server.close()
            if remembered is not None:
                # A port that is free again is not this environment's any more.
                environment._main_port = -1  # type: ignore[union-attr]
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def connect(self, backend: str, **options: Any) -> None:
        """Makes the default process group; called by the strategy, in a rank.

        Args:
            backend: `"gloo"`, `"nccl"`, …
            options: Passed to `torch.distributed.init_process_group`: `timeout`, `device_id`.
        """
        if self._job is None:
            raise RuntimeError("A process group is made in a rank, inside of `launch`.")
        self._job.connect(backend, **options)

    def finish(self) -> None:
        """Called by the strategy at the end of its teardown: after a failure, nothing hurries this process any more."""
        if self._job is not None:
            self._job.finish()

    def _run_ranks(
        self, count: int, server: socket.socket, host: str, trainer: "pl.Trainer | None", call: tuple[Any, ...]
    ) -> Any:
        context: Any = multiprocessing.get_context(self._start_method)
        if self._start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
            _end_server_at_exit()
        if self._start_method == "fork":
            end_openmp_threads()
        results, theirs = context.Pipe(duplex=False)
        self._ends = [server, results, theirs]
        state = None if self._start_method == "fork" else _GlobalStateSnapshot.capture()
        # Otherwise a rank would start data loading processes the way it was started itself: slowly, and through a server
        # of its own that outlives it.
        method = multiprocessing.get_start_method(allow_none=True)
        self.procs = [
            context.Process(
                target=self._be_rank,
                args=(
                    rank,
                    count,
                    host,
                    server.getsockname()[1],
                    os.getpid(),
                    theirs if rank == 0 else None,
                    trainer,
                    call,
                    state,
                    method,
                ),
                name=f"rank-{rank}",
            )
            for rank in range(count)
        ]
        try:
            for process in self.procs:
                _start(process, self._start_method)
            theirs.close()
            # Only now: the server is a thread, and one that is at work while this process is forked may hold locks then.
            board = PrefixStore("fived/0/1", serve(host, server))
            return self._await_ranks(results, board, count)
        finally:
            self._ends = []
            for process in self.procs:
                if process.is_alive():
                    process.kill()
            for process in self.procs:
                if process.pid is not None:
                    process.join()
            self.procs = []
            results.close()

    def _await_ranks(self, results: Connection, board: Store, count: int) -> Any:
        running = dict(enumerate(self.procs))
        pending: list[Connection] = [results]
        payload: bytes | None = None
        first: Failure | None = None
        deadline: float | None = None
        watch = Watch(board, count, self._start_method)
        while running or pending:
            limit = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
            ready = wait([*pending, *(process.sentinel for process in running.values())], limit)
            if not ready and first is None and (told := watch.look(running)) is not None:
                first = Failure.from_json(board.compare_set("failure", "", told.to_json()))
                deadline = time.monotonic() + GRACE_SECONDS
            if results in ready and pending:
                with contextlib.suppress(EOFError):
                    payload = results.recv_bytes()
                pending.clear()
            for rank, process in list(running.items()):
                # Asked for, too: what a rank has started and left behind may hold the other end of its sentinel.
                if process.sentinel not in ready and process.exitcode is None:
                    continue
                del running[rank]
                process.join()
                # An end before that is a failure whatever the code.
                done = process.exitcode == 0 and board.check([f"done/{rank}"])
                if not done and first is None:
                    told = Failure(rank, describe_exit(process.exitcode or 0))
                    first = Failure.from_json(board.compare_set("failure", "", told.to_json()))
                    deadline = time.monotonic() + (LAST_WORDS_SECONDS if first.rank in running else GRACE_SECONDS)
            if deadline is not None and time.monotonic() > deadline:
                break
            if watch.late is not None:
                rank_zero_warn(watch.late)
                break
            if not running and not results.poll():
                break
        if first is not None:
            raise RankFailure(first.describe(count), first)
        if payload is None:
            raise RankFailure("rank 0 ended without a result", Failure(0, "ended without a result"))
        return pickle.loads(payload)

    def _be_rank(
        self,
        rank: int,
        count: int,
        host: str,
        port: int,
        parent: int,
        results: Connection | None,
        trainer: "pl.Trainer | None",
        call: tuple[Any, ...],
        state: _GlobalStateSnapshot | None,
        method: str | None,
    ) -> None:
        # A fork has copies, and an end that stays open in another process looks like one that is in use.
        for end in self._ends:
            if end is not results:
                end.close()
        die_with(parent)
        # Lightning's hints come from rank 0 only, also before the strategy has told it which rank this is.
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        multiprocessing.set_start_method(method, force=True)
        function, args, kwargs = call
        if state is not None:
            state.restore()
            if isinstance(self._strategy.accelerator, CPUAccelerator):
                # Pickled tensors arrive in memory that all ranks share: a step of one would change the others' weights.
                args, kwargs = _disable_module_memory_sharing((args, kwargs))
        self._job = Job(("in-process",), Rendezvous(host, port, rank, count), {"LOCAL_RANK": str(rank)})

        def work() -> Any:
            _set_num_threads_if_needed(num_processes=count)
            output = function(*args, **kwargs)
            return output if trainer is None else self._collect_rank_zero_results(trainer, output)

        try:
            output = self._job.run(work, lambda: trainer is not None and trainer.received_sigterm, progress_of(trainer))
            if results is not None:
                results.send_bytes(_to_bytes(move_data_to_device(output, "cpu")))
                results.close()
        except BaseException:
            # The process that started this one tells the story, once.
            leave(1)
        if dist.is_initialized():
            dist.destroy_process_group()

    @override
    def _collect_rank_zero_results(self, trainer: "pl.Trainer", results: Any) -> _WorkerOutput | None:
        # Not `state_dict()` as in the base class: shards are of no use outside of their process.
        state = self._strategy.full_state_dict()  # type: ignore[attr-defined]
        if self._strategy.global_rank != 0:
            return None
        weights = None
        if trainer.state.fn == TrainerFn.FITTING:
            weights = os.path.join(tempfile.mkdtemp(), "weights.ckpt")
            torch.save(state, weights)
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", None)
        return _WorkerOutput(best, weights, trainer.state, results, self.get_extra_results(trainer))

    @override
    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: "pl.Trainer") -> None:
        if worker_output.weights_path is not None:
            path = Path(worker_output.weights_path)
            module = trainer.lightning_module
            state = torch.load(path, map_location="cpu", weights_only=True)
            path.unlink()
            path.parent.rmdir()
            # Not strict: `configure_model` ran in the ranks only.
            module.load_state_dict(state, strict=False)
            worker_output = worker_output._replace(weights_path=None)
        super()._recover_results_in_main_process(worker_output, trainer)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_job"], state["_ends"] = None, []
        return state


@functools.cache
def _end_server_at_exit() -> None:
    """Lets this process outlive the fork server, which else goes on for a second or more: it has all of torch to put away."""
    # A negative priority: after `multiprocessing` has waited for the processes that were started through it.
    Finalize(None, _end_server, exitpriority=-1)


def _end_server() -> None:
    # Checked with Python 3.11: the standard library's name for its server's process is not public.
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]


def _to_bytes(value: Any) -> bytes:
    # Not the pickler of `multiprocessing`: it sends handles of memory that is gone with the sender.
    buffer = io.BytesIO()
    pickle.dump(value, buffer)
    return buffer.getvalue()


def _start(process: Any, method: str) -> None:
    try:
        process.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if "pickle" not in str(error).lower():
            raise
        raise TypeError(
            f'start_method="{method}" sends the module, the data and the callbacks to the ranks, and something in them cannot be'
            f" sent: {error}. Define classes and functions at the top level of a file, or use the default"
            ' start_method="popen", or "fork".'
        ) from error
