"""Bytes are exact for storages whose size is known."""

import gc
import multiprocessing

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from lightning_5d.memory.categories import ACTIVATIONS, COMMUNICATION, GRADIENTS, OTHER, WEIGHTS
from lightning_5d.memory.recorder import MemoryRecorder
from lightning_5d.memory.storages import BEFORE, Change, Piece
from lightning_5d.memory.timeline import Segment, Timeline

MIB = 2**20
FLOATS = MIB // 4


class Held(list):
    """What a test says is held, and by whom."""

    def __call__(self):
        return list(self)


@pytest.fixture
def recording():
    held = Held()
    recorder = MemoryRecorder(torch.device("cpu"), held)
    recorder.begin("between", 0, 0)
    recorder.held = held
    yield recorder
    recorder.stop()
    assert recorder.removed


def gained(recorder, category):
    """Bytes of a category at the end of the last phase, less those at the end of the first."""
    recorder.digest()
    phases = recorder.record.phases
    return phases[-1].end.get(category, 0) - phases[0].end.get(category, 0)


def begin_after_what_was_there(recorder):
    recorder.digest()
    recorder.begin("between", 1, 1)


def test_views_of_one_storage_count_once(recording):
    begin_after_what_was_there(recording)
    base = torch.zeros(FLOATS)
    views = [base.view(2, -1), base[5:], base.t(), base.detach(), base.view(torch.uint8)]
    assert gained(recording, OTHER) == MIB
    assert len(views) == 5


def test_a_freed_tensor_counts_no_longer_but_its_spike_is_in_the_peak(recording):
    begin_after_what_was_there(recording)
    kept = torch.zeros(FLOATS)
    torch.zeros(3 * FLOATS)
    assert gained(recording, OTHER) == MIB
    phase = recording.record.phases[-1]
    assert sum(phase.peak.values()) - sum(phase.start.values()) == 4 * MIB
    assert max(point.total for point in recording.record.points) == sum(phase.peak.values())
    assert kept.numel() == FLOATS


def test_tied_weights_count_once(recording):
    embedding, head = nn.Embedding(64, 4096), nn.Linear(4096, 64, bias=False)
    head.weight = embedding.weight
    recording.held += [(WEIGHTS, embedding.weight), (WEIGHTS, head.weight)]
    recording.digest()
    assert recording.record.phases[-1].end[WEIGHTS] == MIB


def test_a_storage_that_is_emptied_and_filled_again_follows_its_size(recording):
    tensor = torch.zeros(FLOATS)
    recording.held.append((WEIGHTS, tensor))
    recording.digest()
    recording.begin("forward", 1, 1)
    tensor.untyped_storage().resize_(0)
    recording.begin("backward", 1, 1)
    tensor.untyped_storage().resize_(2 * MIB)
    recording.digest()
    first, forward, backward = recording.record.phases
    assert (first.end[WEIGHTS], forward.end[WEIGHTS], backward.end[WEIGHTS]) == (MIB, 0, 2 * MIB)


def test_what_was_there_before_counts_and_garbage_does_not():
    before, lazy = torch.zeros(FLOATS), nn.LazyLinear(2)
    sparse = torch.eye(2).to_sparse()
    cycle = [torch.zeros(FLOATS)]
    cycle.append(cycle)
    del cycle
    recorder = MemoryRecorder(torch.device("cpu"), lambda: [(WEIGHTS, before)])
    recorder.begin("between", 0, 0)
    recorder.stop()
    assert recorder.record.phases[0].start[WEIGHTS] == recorder.record.phases[0].end[WEIGHTS] == MIB
    alive = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        # Lazy parameters and sparse tensors, which another test may have left, have no storage and complain when they are asked.
        if issubclass(type(tensor), torch.Tensor) and not is_lazy(tensor) and tensor.layout is torch.strided
        if tensor.untyped_storage().device.type == "cpu"
    }
    assert sum(recorder.record.phases[0].end.values()) == sum(alive.values())
    assert is_lazy(lazy.weight)
    assert sparse.is_sparse


def test_forward_leaves_activations_backward_turns_them_into_gradients(recording):
    layers = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh(), nn.Linear(512, 512, bias=False))
    weights = list(layers.parameters())
    recording.held += [(WEIGHTS, p) for p in weights]
    x = torch.ones(256, 512)
    recording.digest()
    recording.begin("forward", 1, 1)
    loss = layers(x).sum()
    recording.watch_gradients()
    recording.begin("backward", 1, 1)
    loss.backward()
    recording.held += [(GRADIENTS, p.grad) for p in weights]
    recording.digest()
    _, forward, backward = recording.record.phases
    # The output of tanh (256 x 512); the first product's output is not kept, the last one's only until its sum.
    assert forward.end[ACTIVATIONS] == 4 * (256 * 512 + 1)
    assert forward.highest[ACTIVATIONS] == 4 * (2 * 256 * 512 + 1)
    assert backward.end[GRADIENTS] == 2 * MIB
    assert backward.end[WEIGHTS] == 2 * MIB
    assert backward.end[ACTIVATIONS] == 4


def test_what_checkpointing_computes_again_is_activations(recording):
    layer = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh(), nn.Tanh())
    recording.held += [(WEIGHTS, p) for p in layer.parameters()]
    x = torch.ones(256, 512, requires_grad=True)
    recording.digest()
    recording.begin("forward", 1, 1)
    loss = checkpoint(layer, x, use_reentrant=False).sum()
    recording.begin("backward", 1, 1)
    loss.backward()
    recording.digest()
    _, forward, backward = recording.record.phases
    assert forward.end[ACTIVATIONS] == 4
    assert backward.highest[ACTIVATIONS] >= 4 * 2 * 256 * 512


def test_a_gradient_that_is_taken_away_in_backward_still_counts_as_one(recording):
    weight = nn.Parameter(torch.ones(512, 512))
    recording.held.append((WEIGHTS, weight))
    recording.watch_gradients()
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    recording.digest()
    recording.begin("forward", 1, 1)
    loss = (weight * 2.0).sum()
    recording.begin("backward", 1, 1)
    loss.backward()
    recording.digest()
    assert weight.grad is None
    backward = recording.record.phases[-1]
    assert backward.highest[GRADIENTS] == MIB
    assert backward.end[GRADIENTS] == 0


def test_watching_gradients_does_not_make_autograd_copy_them(recording):
    weight = nn.Parameter(torch.ones(512, 512))
    recording.held.append((WEIGHTS, weight))
    recording.digest()
    recording.watch_gradients()
    recording.begin("backward", 1, 1)
    (weight * 2.0).sum().backward()
    recording.digest()
    backward = recording.record.phases[-1]
    # The product, and the expanded ones times two: no third one for a copy.
    assert sum(backward.peak.values()) - sum(backward.start.values()) <= 2 * MIB + 64


def test_nothing_is_left_installed():
    resize = torch.UntypedStorage.resize_
    weight = nn.Parameter(torch.ones(4))
    recorder = MemoryRecorder(torch.device("cpu"), lambda: [(WEIGHTS, weight)])
    recorder.begin("forward", 1, 1)
    recorder.watch_gradients()
    assert torch.UntypedStorage.resize_ is not resize
    recorder.stop()
    assert torch.UntypedStorage.resize_ is resize
    assert not weight._post_accumulate_grad_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_lazy_layers_of_anybody_are_no_obstacle():
    lazy = nn.LazyLinear(4)  # alive anywhere in the process
    before = MemoryRecorder(torch.device("cpu"), lambda: [(WEIGHTS, p) for p in lazy.parameters()])
    before.begin("forward", 1, 1)
    lazy(torch.ones(2, 8))
    before.stop()
    assert lazy.weight.shape == (4, 8)


def _mode_in_child(answers):
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    answers.send(mode is None)


def test_a_worker_forked_meanwhile_records_nothing(recording):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_mode_in_child, args=(there,))
    child.start()
    assert here.poll(20)
    assert here.recv()
    child.join(20)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def test_a_mode_that_was_entered_above_does_not_get_lost():
    from torch.utils.flop_counter import FlopCounterMode

    recorder = MemoryRecorder(torch.device("cpu"), list)
    recorder.begin("forward", 1, 1)
    with FlopCounterMode(display=False) as flops:
        recorder.stop()
        assert not recorder.removed
        torch.ones(4, 4) @ torch.ones(4, 4)
    recorder.stop()
    assert recorder.removed
    assert flops.get_total_flops() == 2 * 4 * 4 * 4
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def _segment(number, name, start, end):
    return Segment(number, name, 1, 1, float(start), float(end))


def test_a_pool_counts_as_communication_and_as_what_it_is_lent_to():
    timeline = Timeline(0.0)
    loan = Piece(address=4096, nbytes=100, phase=0, graph=False, category=GRADIENTS, died=1)
    born = Change(1.0, 0, loan, 100, born=True)
    freed = Change(3.0, 1, loan, -100)
    pools = {4096: 100, 8192: 50}
    (backward, forward), _ = timeline.add(
        [_segment(0, "backward", 0, 2), _segment(1, "forward", 2, 4)], [born, freed], pools
    )
    assert backward.end == {GRADIENTS: 100, COMMUNICATION: 0}
    assert forward.end == {GRADIENTS: 0, COMMUNICATION: 150}


def test_memory_of_another_rank_that_is_read_in_place_counts_there():
    timeline = Timeline(0.0)
    block, own = (Piece(address, nbytes=100, phase=0, graph=True) for address in (4096, 8192))
    births = [Change(1.0, 0, piece, 100, born=True) for piece in (block, own)]
    (forward,), _ = timeline.add([_segment(0, "forward", 0, 2)], births, {}, {4096: 100})
    assert {name: nbytes for name, nbytes in forward.end.items() if nbytes} == {ACTIVATIONS: 100}


def test_a_pool_from_before_the_recording_is_there_from_the_first_moment():
    timeline = Timeline(0.0)
    timeline.start({4096: 100, 8192: 50})
    loan = Piece(address=4096, nbytes=100, phase=BEFORE, graph=False, category=GRADIENTS)
    (phase,), _ = timeline.add(
        [_segment(0, "gather", 0, 2)], [Change(0.0, BEFORE, loan, 100, born=True)], {4096: 100, 8192: 50}
    )
    assert phase.start == phase.end == {GRADIENTS: 100, COMMUNICATION: 50}


def test_a_claim_in_a_later_part_moves_what_was_counted_before():
    timeline = Timeline(0.0)
    piece = Piece(address=1, nbytes=100, phase=0, graph=True)
    timeline.add([_segment(0, "forward", 0, 1)], [Change(0.5, 0, piece, 100, born=True)], {})
    piece.category = WEIGHTS
    (phase,), _ = timeline.add([_segment(1, "between", 1, 2)], [], {})
    assert phase.start == {ACTIVATIONS: 0, WEIGHTS: 100}
    piece.died = 2
    (phase,), _ = timeline.add([_segment(2, "between", 2, 3)], [Change(2.5, 2, piece, -100)], {})
    assert sum(phase.end.values()) == 0


@pytest.mark.parametrize("resolution", [1, 5, 1000])
def test_points_are_bounded_and_hold_the_highest_moment(resolution):
    timeline = Timeline(0.0, resolution)
    changes = []
    for index in range(500):
        piece = Piece(address=index, nbytes=0, phase=0, graph=False, died=0)
        size = 10_000 if index == 321 else index
        changes += [Change(float(index), 0, piece, size, born=True), Change(index + 0.5, 0, piece, -size)]
    (phase,), points = timeline.add([_segment(0, "step", 0, 500)], changes, {})
    assert len(points) <= resolution + 3
    assert max(point.total for point in points) == sum(phase.peak.values()) == 10_000
    assert [point.time_s for point in points] == sorted(point.time_s for point in points)
