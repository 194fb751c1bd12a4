"""What the last stage's steps returned and logged, made known to every stage of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_5d.logs.recording import Call, merge, recording, replay
from lightning_5d.pipeline_parallel.containers import children, rebuilt
from lightning_5d.pipeline_parallel.outputs import losses_of, merge_outputs, weights_of
from lightning_5d.pipeline_parallel.shared_metrics import MetricUpdate, SharedMetrics
from lightning_5d.pipeline_parallel.step_messages import Reader, StepMessages, Structure, Values, to_host

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_5d.mesh import ParallelMesh

_PLAIN = (Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, Enum, torch.dtype, torch.device, torch.Size)
_OWN_OPTIONS = ("batch_size", "sync_dist_fn", "sync_dist_group")


@dataclass(frozen=True)
class Merged:
    """A step over a batch, as every stage sees it.

    Attributes:
        output: What one call over the whole batch would have returned, without a graph.
        weights: What each microbatch's step gave as its weight, or ``None``.
    """

    output: Any
    weights: list[float | None]


class SharedSteps:
    """Makes every stage see what the last one does in the user's steps: outputs, logged values, torchmetrics objects.

    `self.log` is recorded in each microbatch and carried out once, on every stage, with the value of the whole batch
    (`lightning_5d.logs.recording.merge` says how). Torchmetrics objects of the module have the same state on every stage after each step: whatever
    hook reads them sees the value that one process has. Updates come once per microbatch, except that
    `MeanMetric` counts the means of a batch's microbatches as one, by their rows.

    What does not travel: anything else that a step keeps by itself, such as a list on the module or the state of a callback that it calls, stays
    on the last stage (return it instead, and collect it in `on_train_batch_end`), and metrics inside the blocks of a stage, which are its own.
    A key of `self.log` that the last stage does not log (in a block before it, or only on rank 0, which does not have it) is refused.

    Args:
        module: The LightningModule.
        mesh: The ranks by axis; all ranks make this object together.
        device: Where tensors of outputs go.
        timeout: Longest wait for a message; the default is that of the run's process groups.
        of_stages: Modules that only this rank has, whose metrics are its own.
        waiting: Whether the last stage waits for the others when it tells them.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        device: torch.device,
        timeout: timedelta | None = None,
        of_stages: Iterable[nn.Module] = (),
        waiting: bool = True,
    ) -> None:
        self._module, self._device = module, device
        stages = mesh.line("pp")
        ranks = dist.get_process_group_ranks(stages)
        own = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        self._messages = StepMessages(own, stages, device, waiting)
        self._told: tuple[Any, Reader] | None = None
        self._metrics = SharedMetrics(module, of_stages)
        self._calls: dict[int, list[Call]] = {}
        self._dropped: set[str] = set()
        self._loop: Any = None
        self._left_out: set[str] = set()

    def close(self) -> None:
        """Takes away what it has put around the module's metrics."""
        self._metrics.close()

    def discard(self) -> None:
        """Forgets what calls of the present step have logged and counted: it starts again."""
        self._calls = {}
        self._metrics.discard()

    @contextmanager
    def microbatch(self, index: int, rows: Sequence[int], *, last: bool = True) -> Generator[None, None, None]:
        """Around each call of the user's step, on every stage.

        Args:
            index: The microbatch.
            rows: Rows of all microbatches of the step.
            last: Whether the call runs the last stage. What others log or count before they stop at their boundary is
                dropped: the last stage does so, too.
        """
        results = self._module.trainer._results
        with ExitStack() as contexts:
            if results is not None:
                calls = contexts.enter_context(recording(results))  # type: ignore[arg-type]
                if last:
                    self._calls[index] = calls
            contexts.enter_context(self._metrics.microbatch(index, rows, last))
            yield
            if results is not None and not last:
                self._dropped.update(call.name for call in calls)

    def tell(self, outputs: Mapping[int, Any], rows: Sequence[int]) -> None:
        """Tells the other stages already, where a single rank has run all last stages and does so before its step ends.

        Args:
            outputs: What the step returned, by microbatch.
            rows: Rows of each microbatch.
        """
        try:
            structure, values = self._prepared(outputs, self._calls, rows, alone=True, training=True)
        except Exception:
            return  # `finish` says so, when all are there to hear it
        if self._messages.knows(structure) and not values.objects:
            self._told = self._messages.send(structure, values)

    def finish(
        self, outputs: Mapping[int, Any], rows: Sequence[int], sources: Sequence[int], *, training: bool
    ) -> Merged:
        """Ends a step; all stages call it together, after its last microbatch.

        Args:
            outputs: What the step returned, by microbatch, for those whose last stage ran here.
            rows: Rows of each microbatch.
            sources: The ranks along ``pp`` that have run a last stage.
            training: It was a training step.

        Returns:
            The same on every stage.

        Raises:
            MisconfigurationException: On every stage, if outputs or logged values cannot be made one.
        """
        steps: dict[int, tuple[Any, list[Call]]] = {}
        updates: list[dict[str, MetricUpdate]] = []
        calls, self._calls = self._calls, {}
        alone = len(sources) == 1
        for source in sources:
            if source == self._messages.rank:
                prepare = partial(self._prepared, outputs, calls, rows, alone=alone, training=training)
                told, self._told = self._told or self._tell(prepare), None
            else:
                told = self._messages.receive(source)
            its_steps, its_updates = self._read(*told)
            steps |= its_steps
            updates.append(its_updates)
        if alone:
            (output, weights), logged = steps[_WHOLE]
        else:
            (output, weights), logged = self._merge(
                {index: step[0] for index, step in steps.items()},
                {index: step[1] for index, step in steps.items()},
                rows,
                training,
            )
        dropped, self._dropped = self._dropped - {call.name for call in logged}, set()
        if dropped:
            raise MisconfigurationException(
                f"{', '.join(map(repr, sorted(dropped)))} was logged before the last stage, inside of a block or on some ranks only: only"
                " what the last stage logs is known to all. Let the block return the value, or log it where the loss is computed."
            )
        self._metrics.apply(updates, rows, own=list(sources) == [self._messages.rank])
        self._log(logged)
        return Merged(output, [None] * len(rows) if weights is None else weights)

    # [Note: one source]
    # Where one rank has seen all of a step, it makes its parts one before it tells the others: a few numbers travel instead of
    # those of each microbatch. Otherwise every stage does so, with the parts that it has been told.
    def _merge(
        self, outputs: Mapping[int, Any], calls: Mapping[int, list[Call]], rows: Sequence[int], training: bool
    ) -> tuple[tuple[Any, list[float | None] | None], list[Call]]:
        """Output and weights of a step, and its calls of `self.log`, from those of its microbatches."""
        missing = [index for index in range(len(rows)) if index not in outputs]
        if missing:
            raise MisconfigurationException(f"No stage has the output of microbatch {missing[0]} of {len(rows)}.")
        returned = [outputs[index] for index in range(len(rows))]
        weights: list[float | None] | None = weights_of(returned) if training else None
        weighted: list[tuple[float, float]] = []
        if weights is None or None in weights:
            weights = None
        else:
            losses = losses_of(returned)
            weighted = [(float(loss), float(weight or 0)) for loss, weight in zip(losses, weights, strict=True)]
        parts = [calls.get(index, []) for index in range(len(rows))]
        logged = merge(_on_host(parts), rows, weighted) if any(parts) else []
        own_way = getattr(self._module, "merge_outputs", None)
        if own_way is not None:
            return (own_way(returned, list(rows)), weights), logged
        return (merge_outputs(returned, rows, training=training), weights), logged

    # Telling and reading

    def _tell(self, prepare: Callable[[], tuple[Structure, Values]]) -> tuple[Any, Reader]:
        try:
            structure, values = prepare()
        except Exception as error:
            self._messages.fail(f"Rank {dist.get_rank()}: {type(error).__name__}: {error}")
            raise
        return self._messages.send(structure, values)

    def _prepared(
        self,
        outputs: Mapping[int, Any],
        calls: Mapping[int, list[Call]],
        rows: Sequence[int],
        *,
        alone: bool,
        training: bool,
    ) -> tuple[Structure, Values]:
        """What this rank has to tell, made one where it alone tells."""
        values = Values()
        if not self._module.trainer.predicting:
            outputs = {index: self._plain(output, "output") for index, output in outputs.items()}
        if alone:
            output, logged = self._merge(outputs, calls, rows, training)
            outputs, calls = {_WHOLE: output}, {_WHOLE: logged}
        return self._put(values, outputs, calls, rows, not alone), values

    def _put(
        self,
        values: Values,
        outputs: Mapping[int, Any],
        calls: Mapping[int, list[Call]],
        rows: Sequence[int],
        several: bool,
    ) -> Structure:
        structure: list[Structure] = []
        for index, output in sorted(outputs.items()):
            returned = values.put(output)
            structure.append((index, returned, tuple(self._put_call(values, call) for call in calls.get(index, ()))))
        shown = {self._metrics.name_of(call.value) for part in calls.values() for call in part if _shows_batch(call)}
        for name, update in self._metrics.updates(shown, rows, several).items():
            structure.append((name, values.put([update.states, update.kept, update.count, update.batch])))
        return tuple(structure)

    def _put_call(self, values: Values, call: Call) -> Structure:
        value: Any = ("metric", call.options["metric_attribute"])
        if isinstance(call.value, Tensor):
            values.scalars.append(call.value)
            value = call.value.dtype
        if call.options.get("sync_dist_group") is not None:
            raise MisconfigurationException(
                f"{call.name!r} is logged in {call.fx} with a sync_dist_group, which does not have the other stages in it. Leave it out:"
                " sync_dist=True takes the mean over the data ranks."
            )
        size = call.options.get("batch_size")
        if size is not None:
            values.scalars.append(size)
        options = tuple(item for item in call.options.items() if item[0] not in _OWN_OPTIONS)
        return call.fx, call.name, value, size is not None, options

    def _read(
        self, structure: Any, reader: Reader
    ) -> tuple[dict[int, tuple[Any, list[Call]]], dict[str, MetricUpdate]]:
        steps: dict[int, tuple[Any, list[Call]]] = {}
        updates = {}
        for name, put, *calls in structure:
            if isinstance(name, int):
                output = reader.take(put)
                steps[name] = output, [self._read_call(reader, *call) for call in calls[0]]
            else:
                updates[name] = MetricUpdate(*reader.take(put))
        return steps, updates

    def _read_call(self, reader: Reader, fx: str, name: str, kind: Any, sized: bool, options: Any) -> Call:
        value = reader.scalar(kind, _HOST) if isinstance(kind, torch.dtype) else self._metric(kind[1], name)
        size = int(reader.number()) if sized else None
        reduce = self._module.trainer.strategy.reduce
        return Call(fx, name, value, {**dict(options), "batch_size": size, "sync_dist_fn": reduce})

    def _metric(self, attribute: str, name: str) -> Metric:
        metric = self._metrics.named(attribute)
        if metric is None:
            try:
                found = self._module.get_submodule(attribute)
            except AttributeError:
                found = None
            if not isinstance(found, Metric):
                raise MisconfigurationException(
                    f"The last stage logs {name!r}, the metric at {attribute!r} of the module, and this stage has no such metric. Make"
                    " it an attribute of the LightningModule itself, in __init__ or setup, and not of a part that is cut into stages."
                )
            metric = found
        return metric

    def _plain(self, value: Any, where: str) -> Any:
        """An output without objects of which nobody knows how to make them one, such as a cache of keys and values."""
        if value is None or isinstance(value, _PLAIN):
            return value
        inside = children(value)
        if inside is not None:
            plain = {key: self._plain(child, f"{where}[{key!r}]") for key, child in inside}
            return rebuilt(value, plain) if any(plain[key] is not child for key, child in inside) else value
        kind = type(value).__name__
        if kind not in self._left_out:
            self._left_out.add(kind)
            rank_zero_warn(
                f"A step returned a {kind} at {where}. Steps run once per microbatch, and nothing is known about how to make one such object"
                " of several: hooks get None in its place."
            )
        return None

    # Logging

    def _log(self, calls: Sequence[Call]) -> None:
        results = self._module.trainer._results
        if results is None:
            return
        connector = self._module.trainer._logger_connector
        for call in calls:
            if connector.should_reset_tensors(call.fx):  # as `self.log` does, which other stages have not called
                results.reset(metrics=False, fx=call.fx)
            value = call.value.to(self._device) if isinstance(call.value, Tensor) else call.value
            replay(results, [Call(call.fx, call.name, value, call.options)])  # type: ignore[arg-type]
            connector._current_fx = call.fx


_HOST = torch.device("cpu")
_WHOLE = -1
"""In the place of a microbatch's number: all of them, made one."""


def _shows_batch(call: Call) -> bool:
    return isinstance(call.value, Metric) and bool(call.options.get("on_step"))


def _on_host(parts: Sequence[Sequence[Call]]) -> Sequence[Sequence[Call]]:
    """The calls with their values on the host, for which a device is waited for once."""
    away = [call.value for calls in parts for call in calls if isinstance(call.value, Tensor) and not call.value.is_cpu]
    if not away:
        return parts
    here = iter(to_host(away))
    return [
        [
            Call(call.fx, call.name, next(here), call.options)
            if isinstance(call.value, Tensor) and not call.value.is_cpu
            else call
            for call in calls
        ]
        for calls in parts
    ]
