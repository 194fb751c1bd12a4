"""States of torchmetrics objects that only the last stage updates, the same on every stage after each step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import MeanMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

# Written against torchmetrics 1.9, whose names with an underscore are not public.

State = dict[str, Any]

_ADDITIVE = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)


@dataclass
class _Before:
    """A metric as it was before it changed."""

    metric: Metric
    state: State
    count: int
    forward_cache: Any

    @classmethod
    def of(cls, metric: Metric) -> _Before:
        state = {
            name: value.clone() if isinstance(value, Tensor) else list(value)
            for name, value in metric.metric_state.items()
        }
        return cls(metric, state, metric._update_count, metric._forward_cache)

    def restore(self) -> None:
        _set(self.metric, self.state, self.count)
        self.metric._forward_cache = self.forward_cache


@dataclass
class _Call:
    """One call of a step, or those of all microbatches: which metrics have changed in it."""

    before: dict[int, _Before] = field(default_factory=dict)
    index: int | None = None
    share: float = 1.0
    rows: int = 0


@dataclass(frozen=True)
class MetricUpdate:
    """What one stage says about one metric after a step.

    Attributes:
        states: New values by name; of a list, the items that are new.
        kept: By name, how many of a list's earlier items are still there.
        batch: The state of the step's batch alone, or the value that it gives, if `self.log` shows it on the step.
    """

    states: State
    kept: dict[str, int]
    count: int
    batch: Any


class _Touch:
    """A hook that sees a metric before its `forward`; copies of the metric do not keep it."""

    def __init__(self, metrics: SharedMetrics | None = None) -> None:
        self._metrics = metrics

    def __call__(self, metric: nn.Module, args: Any) -> None:
        if self._metrics is not None:
            self._metrics.touch(metric)

    def __deepcopy__(self, memo: Any) -> _Touch:
        return _Touch()

    def __reduce__(self) -> Any:
        return _Touch, ()


class SharedMetrics:
    """The torchmetrics objects of a module that is cut into stages.

    Args:
        module: The LightningModule.
        of_stages: Modules that only this rank has. Metrics inside them are left alone: they are this stage's own.
    """

    def __init__(self, module: nn.Module, of_stages: Iterable[nn.Module] = ()) -> None:
        self._module = module
        self._left_out = {id(child) for own in of_stages for child in own.modules()}
        self._metrics: dict[str, Metric] = {}
        self._names: dict[int, str] = {}
        self._families: dict[int, list[Metric]] = {}
        self._step = _Call()
        self._call: _Call | None = None
        self._batches: dict[int, dict[int, State]] = {}
        self._hooks: list[Any] = []
        self._originals: list[tuple[Metric, Any]] = []
        self.find()

    def find(self) -> None:
        """Looks for metrics that have come since."""
        for name, child in self._module.named_modules():
            if isinstance(child, Metric) and id(child) not in self._names and id(child) not in self._left_out:
                self._metrics[name], self._names[id(child)] = child, name
                self._hooks.append(child.register_forward_pre_hook(_Touch(self)))
                self._originals.append((child, child.update))
                child.update = self._watched(child)  # type: ignore[method-assign]
            if isinstance(child, MetricCollection):
                # Metrics of one collection may share their state, of which only the first one is updated then.
                members = list(child.values(copy_state=False))
                self._families |= {id(member): members for member in members}

    def close(self) -> None:
        """Takes the hooks off the metrics."""
        for hook in self._hooks:
            hook.remove()
        for metric, update in self._originals:
            metric.update = update  # type: ignore[method-assign]
        self._hooks, self._originals, self._metrics, self._names = [], [], {}, {}

    def name_of(self, metric: Metric) -> str | None:
        """Where the module has it, or ``None``."""
        return self._names.get(id(metric))

    def named(self, name: str) -> Metric | None:
        """The metric of that name, or ``None``."""
        return self._metrics.get(name)

    @contextmanager
    def microbatch(self, index: int, rows: Sequence[int], last: bool) -> Generator[None, None, None]:
        """Around one call of the user's step; what changes in it counts only on the last stage."""
        call = _Call(self._step.before, index, rows[index] / sum(rows), rows[index]) if last else _Call()
        self._call = call
        try:
            yield
        finally:
            self._call = None
            if not last:
                for before in call.before.values():
                    before.restore()

    def discard(self) -> None:
        """Takes back what the present step has changed."""
        for before in self._step.before.values():
            before.restore()
        self._step, self._batches = _Call(), {}

    def touch(self, metric: nn.Module) -> None:
        """Comes before a metric changes."""
        call = self._call
        if call is None or id(metric) not in self._names:
            return
        if id(metric) not in call.before:
            for member in self._families.get(id(metric), (metric,)):
                call.before[id(member)] = _Before.of(member)  # type: ignore[arg-type]

    def updates(self, shown: set[str | None], rows: Sequence[int], several: bool) -> dict[str, MetricUpdate]:
        """What the steps of this rank have changed.

        Args:
            shown: Names of metrics whose value of the batch is logged.
            rows: Rows of all microbatches.
            several: Another rank has run some of the microbatches.
        """
        found = {}
        for before in self._step.before.values():
            name = self._names.get(id(before.metric))
            if name is not None:
                found[name] = self._update(before, name in shown, rows, several)
        return found

    def apply(self, by_source: Sequence[dict[str, MetricUpdate]], rows: Sequence[int], *, own: bool) -> None:
        """Makes the metrics of this rank those of one process; ends the step.

        Args:
            by_source: What each rank that has run a last stage has to say.
            rows: Rows of all microbatches.
            own: This rank is the only one of them: its metrics are so already.
        """
        for name in dict.fromkeys(name for updates in by_source for name in updates):
            metric = self._metrics.get(name)
            if metric is None:
                continue
            updates = [updates[name] for updates in by_source if name in updates]
            if not own:
                before = self._step.before.get(id(metric)) or _Before.of(metric)
                _set(metric, *_combined(metric, before, updates, name))
            batches = [update.batch for update in updates if update.batch is not None]
            if batches and len(by_source) > 1:
                metric._forward_cache = _value_of(metric, *_of_batch(metric, batches, rows))
            elif batches:
                metric._forward_cache = batches[0]
        self._step, self._batches = _Call(), {}

    def _watched(self, metric: Metric) -> Any:
        update = metric.update
        averages = type(metric).update is MeanMetric.update
        additive = _is_additive(metric)

        @wraps(update)
        def watched(*args: Any, **kwargs: Any) -> None:
            call = self._call
            if call is None:
                update(*args, **kwargs)
                return
            self.touch(metric)
            if averages and call.index is not None and len(args) == 1 and not kwargs and _is_mean(args[0], call.rows):
                # The mean of a microbatch: one process would count the mean of the batch, once.
                kwargs["weight"] = call.share
            update(*args, **kwargs)
            if call.index is not None and not metric._should_unsync:  # inside `forward`: the microbatch's own state
                parts = self._batches.setdefault(id(metric), {})
                if additive or not parts:
                    parts[call.index] = _state_of(metric)
                    return
                (earlier,) = parts.values()
                parts.clear()
                parts[call.index] = _continued(metric, earlier, lambda: update(*args, **kwargs))

        return watched

    def _update(self, before: _Before, shown: bool, rows: Sequence[int], several: bool) -> MetricUpdate:
        metric = before.metric
        states: State = {}
        kept = {}
        for name, value in metric.metric_state.items():
            old = before.state[name]
            if isinstance(value, list):
                kept[name] = len(old) if _grown(old, value) else 0
                value = value[kept[name] :]
            states[name] = value
        batch: Any = None
        parts = self._batches.get(id(metric))
        if shown and parts:
            batch = {index: parts[index] for index in sorted(parts)}
            if not several:
                batch = metric._forward_cache
                if len(parts) > 1:
                    batch = _value_of(metric, *_of_batch(metric, [parts], rows))
                elif not _is_additive(metric):
                    batch = _value_of(metric, next(iter(parts.values())), 1)
        return MetricUpdate(states, kept, metric._update_count, batch)


def _state_of(metric: Metric) -> State:
    return {name: list(value) if isinstance(value, list) else value for name, value in metric.metric_state.items()}


def _is_additive(metric: Metric) -> bool:
    """Whether torchmetrics can add its state up without knowing what the metric is."""
    return all(
        isinstance(default, list) or reduce in _ADDITIVE
        for default, reduce in ((metric._defaults[name], metric._reductions[name]) for name in metric._defaults)
    )


def _continued(metric: Metric, earlier: State, update: Callable[[], None]) -> State:
    """The state `earlier` after one more update, made beside the metric's own."""
    own, count = _state_of(metric), metric._update_count
    _set(metric, earlier, count)
    try:
        update()
        return _state_of(metric)
    finally:
        for name, value in own.items():
            setattr(metric, name, value)
        metric._update_count = count


def _set(metric: Metric, state: State, count: int) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            setattr(metric, name, value.clone())
        else:
            setattr(metric, name, [item.clone() if isinstance(item, Tensor) else item for item in value])
    metric._update_count = count
    metric._computed = None


def _is_mean(value: Any, rows: int) -> bool:
    """Whether a value speaks for all rows of a microbatch, and is not the value of its only row."""
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float))
    return value.dim() == 0 or (value.numel() == 1 and rows != 1)


def _grown(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(new) >= len(old) and (not old or (_same(new[0], old[0]) and _same(new[len(old) - 1], old[-1])))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # `Metric.forward` puts copies in the place of earlier items.
    return (
        isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    )


def _combined(metric: Metric, before: _Before, updates: Sequence[MetricUpdate], name: str) -> tuple[State, int]:
    """A metric's state after a step, of which several ranks may have run parts, and its count of updates."""
    state: State = {}
    for key in metric._defaults:
        old, news = before.state[key], [update.states[key] for update in updates]
        if isinstance(old, list):
            kept = min(update.kept[key] for update in updates)
            state[key] = [*old[:kept], *(item for new in news for item in new)]
            continue
        if len(news) == 1:
            state[key] = news[0]
            continue
        reduce = metric._reductions[key]
        if reduce is dim_zero_sum:
            state[key] = sum(news[1:], news[0]) - (len(news) - 1) * old
        elif reduce is dim_zero_max or reduce is dim_zero_min:
            state[key] = reduce(torch.stack(news))
        elif reduce is dim_zero_mean:
            steps = [update.count - before.count for update in updates]
            total = sum(n * update.count for n, update in zip(news, updates, strict=True))
            state[key] = (total - (len(news) - 1) * before.count * old) / (before.count + sum(steps))
        elif reduce is dim_zero_cat:
            state[key] = torch.cat([old, *(new[len(old) :] for new in news)])
        else:
            raise MisconfigurationException(
                f"The metric {name!r} ({type(metric).__name__}) was updated on {len(news)} ranks, as the schedule has several last"
                f" stages, and its state {key!r} says nothing about how to add them up. Give it dist_reduce_fx 'sum', 'mean', 'max',"
                " 'min' or 'cat', or take a schedule with one last stage, such as 1f1b."
            )
    return state, before.count + sum(update.count - before.count for update in updates)


def _of_batch(metric: Metric, sources: Sequence[dict[int, State]], rows: Sequence[int]) -> tuple[State, int]:
    """The state of a whole batch from those of its microbatches, as torchmetrics adds up the states of several processes."""
    parts = {index: state for parts in sources for index, state in parts.items()}
    weights = [rows[index] / sum(rows[other] for other in parts) for index in sorted(parts)]
    states = [parts[index] for index in sorted(parts)]
    whole: State = {}
    for key in metric._defaults:
        values = [state[key] for state in states]
        reduce = metric._reductions[key]
        if isinstance(values[0], list):
            whole[key] = [item for value in values for item in value]
        elif reduce is dim_zero_cat:
            whole[key] = torch.cat(values)
        elif reduce is dim_zero_mean:
            whole[key] = sum(weight * value for weight, value in zip(weights, values, strict=True))
        else:
            stacked = torch.stack(values)
            whole[key] = stacked if reduce is None else reduce(stacked)  # type: ignore[operator]
    return whole, len(states)


def _value_of(metric: Metric, state: State, count: int) -> Any:
    """What `forward` returns for a batch of that state."""
    kept, kept_count, to_sync, cache = metric.metric_state, metric._update_count, metric._to_sync, metric._forward_cache
    try:
        _set(metric, state, count)
        metric._to_sync = metric.dist_sync_on_step
        return metric.compute()
    finally:
        for name, value in kept.items():
            setattr(metric, name, value)
        metric._update_count, metric._to_sync, metric._forward_cache = kept_count, to_sync, cache
        metric._computed = None
