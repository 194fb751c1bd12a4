"""What a rank does in a schedule, and what comes to it."""

from typing import Any

import pytest

from lightning_5d.pipeline_parallel import SCHEDULES, Kind, make_schedule
from lightning_5d.pipeline_parallel.program import Message, program_of


def _schedule(name: str) -> Any:
    return make_schedule(name, 4, 8, chunks=2 if SCHEDULES[name].chunks is None else None)


@pytest.mark.parametrize("microbatches", [8, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_a_stage_are_complete_once_with_its_last_ones(name: str, microbatches: int) -> None:
    schedule = _schedule(name)
    for rank in range(4):
        steps = program_of(schedule, rank, microbatches, True).steps
        for stage in schedule.stages_of(rank):
            own = [step for step in steps if step.action.stage == stage and step.gradients]
            assert [step.complete for step in own] == [False] * (len(own) - 1) + [True] * bool(own)
        assert all(step.partly is (step.action.kind is Kind.INPUT_GRADIENT) for step in steps)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_to_a_rank_is_what_it_expects_in_that_order(name: str, backward: bool) -> None:
    schedule = _schedule(name)
    programs = [program_of(schedule, rank, 5, backward) for rank in range(4)]
    for sender, program in enumerate(programs):
        for receiver in set(range(4)) - {sender}:
            sent = [
                Message(step.action.kind is not Kind.FORWARD, stage, step.action.microbatch)
                for step in program.steps
                if step.target == receiver
                for stage in [step.action.stage + (1 if step.action.kind is Kind.FORWARD else -1)]
            ]
            assert tuple(sent) == programs[receiver].incoming.get(sender, ())
    if not backward:
        assert not any(step.gradients for program in programs for step in program.steps)
