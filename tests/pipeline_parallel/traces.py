"""Traces of steps that nobody ran: events as a simulation has them, with messages."""

from lightning_5d.pipeline_parallel import Action, Durations, Kind, Schedule, simulate
from lightning_5d.pipeline_parallel.schedule import GRADIENTS, actions_of
from lightning_5d.pipeline_parallel.trace import Event, StepTrace

LIVE = {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 0, Kind.WEIGHT_GRADIENT: -1, Kind.BACKWARD: -1}
End = tuple[int, int, int, bool]


def neighbours(schedule: Schedule, rank: int, action: Action) -> tuple[End | None, End | None]:
    """The message that an action waits for and the one it makes: the other rank, the stage it is for, the microbatch, whether a gradient."""
    gradient = action.kind in GRADIENTS
    if action.kind is Kind.WEIGHT_GRADIENT:
        return None, None
    before, after = (action.stage + 1, action.stage - 1) if gradient else (action.stage - 1, action.stage + 1)
    ends: list[End | None] = []
    for other, stage in ((before, action.stage), (after, after)):
        peer = schedule.rank_of(other, action.microbatch) if 0 <= other < schedule.stages else rank
        ends.append(None if peer == rank else (peer, stage, action.microbatch, gradient))
    return ends[0], ends[1]


def events_of(schedule: Schedule, durations: Durations, *, sending: float = 0.0) -> list[list[Event]]:
    """The events of every rank; a message is waited for from the end of the action before."""
    simulation = simulate(schedule, durations)
    ranks = []
    for rank, spans in enumerate(simulation.timeline):
        events, live, free = [], 0, 0.0
        for span in spans:
            for action in actions_of(span.entry):
                stage, microbatch = action.stage, action.microbatch
                source, target = neighbours(schedule, rank, action)
                if source is not None:
                    at = (min(free, span.start), span.start)
                    events.append(Event("receive", stage, microbatch, *at, live, source[0], 64))
                live += LIVE[action.kind]
                events.append(Event(action.kind.value, stage, microbatch, span.start, span.end, live))
                if target is not None:
                    at = (span.end, span.end + sending)
                    events.append(Event("send", target[1], microbatch, *at, live, target[0], 64))
            free = span.end
        ranks.append(events)
    return ranks


def trace_of(schedule: Schedule, durations: Durations, *, step: int = 3, later: float = 100.0) -> StepTrace:
    """A trace of a step whose clock stood at ``later``."""
    ranks = events_of(schedule, durations, sending=0.02 * durations.communication)
    return StepTrace.of(step, schedule, [[event.later(later) for event in events] for events in ranks])
