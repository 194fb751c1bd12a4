"""Traces of steps that nobody ran: events as a simulation has them, with messages."""

from lightning_5d.pipeline_parallel import Durations, Kind, Schedule, simulate
from lightning_5d.pipeline_parallel.schedule import GRADIENTS, actions_of
from lightning_5d.pipeline_parallel.trace import Event, StepTrace

LIVE = {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 0, Kind.WEIGHT_GRADIENT: -1, Kind.BACKWARD: -1}


def events_of(schedule: Schedule, durations: Durations, *, sending: float = 0.0) -> list[list[Event]]:
    """The events of every rank; a message is waited for from the end of the action before."""
    simulation = simulate(schedule, durations)
    ranks = []
    for rank, spans in enumerate(simulation.timeline):
        events, live, free = [], 0, 0.0
        for span in spans:
            for action in actions_of(span.entry):
                stage, microbatch = action.stage, action.microbatch
                there = [other for other in (stage - 1, stage + 1) if 0 <= other < schedule.stages]
                peers = {other: schedule.rank_of(other, microbatch) for other in there}
                before = stage - 1 if action.kind is Kind.FORWARD else stage + 1
                after = stage + 1 if action.kind is Kind.FORWARD else stage - 1
                if action.kind is Kind.WEIGHT_GRADIENT:
                    before = after = -1
                if peers.get(before, rank) != rank:
                    at = (min(free, span.start), span.start)
                    events.append(Event("receive", stage, microbatch, *at, live, peers[before], 64))
                live += LIVE[action.kind]
                events.append(Event(action.kind.value, stage, microbatch, span.start, span.end, live))
                if peers.get(after, rank) != rank and action.kind in (Kind.FORWARD, *GRADIENTS):
                    events.append(
                        Event("send", stage, microbatch, span.end, span.end + sending, live, peers[after], 64)
                    )
            free = span.end
        ranks.append(events)
    return ranks


def trace_of(schedule: Schedule, durations: Durations, *, step: int = 3, later: float = 100.0) -> StepTrace:
    """A trace of a step whose clock stood at ``later``."""
    moved = [
        [Event(e.kind, e.stage, e.microbatch, e.start + later, e.end + later, e.live, e.peer, e.nbytes) for e in events]
        for events in events_of(schedule, durations, sending=0.02 * durations.communication)
    ]
    return StepTrace.of(step, schedule, moved)
