"""A rank that falls silent is noticed, one that is done or slow to start is not."""

from lightning_5d.launch.pulse import BEAT_SECONDS, SILENCE_SECONDS, Pulse
from lightning_5d.launch.rendezvous import HashStore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _run(clock: Clock, store: HashStore, pulses: list[Pulse], seconds: float) -> list[int]:
    noticed = []
    until = clock.now + seconds
    while clock.now < until:
        noticed += [rank for pulse in pulses if (rank := pulse.beat(store)) is not None]
        clock.now += 0.5
    return noticed


def test_a_silent_rank_is_named_by_rank_0_within_the_limit() -> None:
    clock, store = Clock(), HashStore()
    pulses = [Pulse(rank, 3, clock) for rank in range(3)]
    assert _run(clock, store, pulses, 60.0) == []
    assert set(_run(clock, store, [pulses[0], pulses[1]], SILENCE_SECONDS + 2 * BEAT_SECONDS)) == {2}


def test_a_rank_that_is_done_may_be_silent() -> None:
    clock, store = Clock(), HashStore()
    pulses = [Pulse(rank, 2, clock) for rank in range(2)]
    assert _run(clock, store, pulses, 10.0) == []
    store.set("done/1", "1")
    assert _run(clock, store, pulses[:1], 120.0) == []


def test_a_rank_that_has_not_begun_is_waited_for() -> None:
    clock, store = Clock(), HashStore()
    first = Pulse(0, 2, clock)
    assert _run(clock, store, [first], 120.0) == []
    assert _run(clock, store, [first, Pulse(1, 2, clock)], 60.0) == []


def test_a_frozen_rank_0_is_named_by_the_others() -> None:
    clock, store = Clock(), HashStore()
    pulses = [Pulse(rank, 3, clock) for rank in range(3)]
    assert _run(clock, store, pulses, 60.0) == []
    assert _run(clock, store, pulses[1:], SILENCE_SECONDS) == []
    noticed = _run(clock, store, pulses[1:], 2 * BEAT_SECONDS)
    assert set(noticed) == {0}
    assert len(noticed) >= 2


def test_a_pause_of_the_whole_machine_is_nobodys_silence() -> None:
    clock, store = Clock(), HashStore()
    pulses = [Pulse(rank, 3, clock) for rank in range(3)]
    assert _run(clock, store, pulses, 10.0) == []
    clock.now += 3 * SILENCE_SECONDS
    assert _run(clock, store, pulses[::-1], 60.0) == []  # whoever looks first looks before the others have run
    assert set(_run(clock, store, pulses[:2], SILENCE_SECONDS + 2 * BEAT_SECONDS)) == {2}


def test_ranks_other_than_0_do_not_watch_each_other() -> None:
    clock, store = Clock(), HashStore()
    pulses = [Pulse(rank, 3, clock) for rank in range(3)]
    assert _run(clock, store, pulses, 10.0) == []
    store.set("done/0", "1")
    assert _run(clock, store, pulses[1:2], 120.0) == []


def test_a_rank_that_freezes_before_it_first_looks_is_noticed() -> None:
    clock, store = Clock(), HashStore()
    first, second = (Pulse(rank, 2, clock) for rank in range(2))
    second.begin(store)
    assert set(_run(clock, store, [first], SILENCE_SECONDS + 2 * BEAT_SECONDS)) == {1}
