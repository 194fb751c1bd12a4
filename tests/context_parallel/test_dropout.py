"""Inside doors ranks draw their own numbers for their tokens and the same ones for everything else, in one process that plays each rank."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_5d.context_parallel.dropout import is_of_tokens
from lightning_5d.context_parallel.redirect import Redirect
from lightning_5d.tensor_parallel.layout import Region, TensorLayout
from lightning_5d.tensor_parallel.random_regions import RandomRegions
from tests.context_parallel.by_gathering import HandMadeDoor, Mirrored

LENGTH, LOCAL, BATCH, WIDTH = 16, 8, 3, 6


def drawn(rank: int, draw: Callable[[Tensor], Tensor], size: int = 2, seed: int = 7) -> tuple[Tensor, Tensor]:
    """What a rank draws inside a door, and the next number of the shared stream."""
    door = HandMadeDoor(LENGTH, axis=Mirrored(rank, size))
    x = torch.ones(BATCH, door.cut.local, WIDTH)
    torch.manual_seed(seed)
    with door.redirect.inside(door.inside(rows=BATCH)):
        result = draw(x)
    return result, torch.rand(())


TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x),
    "in place": lambda x: F.dropout(x.clone(), 0.5, True, True),
    "module": lambda x: nn.Dropout(0.3)(x),
    "builtin": lambda x: torch.dropout(x, 0.5, True),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, True),
    "features": lambda x: F.dropout1d(x),
    "noise": lambda x: torch.randn_like(x),
    "uniform": lambda x: torch.empty_like(x).uniform_(0.9, 1.1),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "of a shape": lambda x: torch.rand(BATCH, x.shape[1], WIDTH),
    "of a size": lambda x: torch.randn(size=x.shape),
    "rows": lambda x: F.dropout(x.flatten(0, 1)),
    "heads": lambda x: F.dropout(x.unflatten(-1, (2, -1)).transpose(1, 2)),
    "features first": lambda x: F.dropout(x.transpose(1, 2)),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "own generator": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", TOKENS)
def test_ranks_draw_different_numbers_for_their_tokens_and_go_on_alike(name: str) -> None:
    draw = TOKENS[name]
    (one, after), (other, also) = drawn(0, draw), drawn(1, draw)
    assert not torch.equal(one, other)
    assert torch.equal(after, also)
    again, _ = drawn(0, draw)
    assert torch.equal(one, again)
    if name != "own generator":
        assert not torch.equal(one, drawn(0, draw, seed=8)[0])


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer is dropped": lambda x: torch.rand([]),
    "a path is dropped": lambda x: x.new_empty(BATCH, 1, 1).bernoulli_(0.5),
    "as many paths as tokens": lambda x: x.new_empty(x.shape[1], 1, 1).bernoulli_(0.5),
    "conditioning": lambda x: F.dropout(torch.ones(BATCH, 50)),
    "keys that are whole": lambda x: F.dropout(torch.ones(BATCH, 50, WIDTH)),
    "weights": lambda x: F.dropout(torch.ones(LOCAL, LOCAL, requires_grad=True)),
}


@pytest.mark.parametrize("name", SHARED)
def test_everything_else_is_drawn_alike(name: str) -> None:
    (one, after), (other, also) = drawn(0, SHARED[name]), drawn(1, SHARED[name])
    assert torch.equal(one, other)
    assert torch.equal(after, also)


def test_the_shared_stream_goes_on_alike_where_ranks_pick_different_numbers_of_tokens() -> None:
    found = [drawn(rank, lambda x, rank=rank: F.dropout(torch.ones(5 + 2 * rank, WIDTH))) for rank in (0, 1)]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[1][0][:5])


def test_four_ranks_all_differ_and_nothing_repeats_from_layer_to_layer() -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.stack([F.dropout(x), F.dropout(x)])

    masks = [mask for rank in range(4) for mask in drawn(rank, twice, size=4)[0]]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 8
    kept = torch.stack(masks).bool().float()
    assert abs(float(kept.mean()) - 0.5) < 0.05


@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, 0.0), nn.Dropout().eval()])
def test_dropout_that_drops_nothing_draws_nothing(draw: Callable[[Tensor], Tensor]) -> None:
    result, after = drawn(0, draw)
    assert torch.equal(result, torch.ones_like(result))
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_runs_again_draws_the_same_masks(reentrant: bool) -> None:
    masks: list[Tensor] = []

    door = HandMadeDoor(LENGTH, axis=Mirrored(1))
    inside = door.inside(rows=BATCH)

    def block(x: Tensor) -> Tensor:
        # As doors do for what runs again, where backward has left every mode.
        with door.redirect.inside(inside):
            mask = F.dropout(torch.ones_like(x))
        masks.append(mask)
        return x * mask * mask

    gradients = []
    for again in (False, True):
        x = torch.ones(BATCH, LOCAL, WIDTH, requires_grad=True)
        torch.manual_seed(3)
        out = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        torch.rand(5)
        out.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert len(masks) == 3
    assert torch.equal(masks[1], masks[2])


class Region_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mask = F.dropout(torch.ones_like(self.up(x)))
        self.behind = F.dropout(torch.ones_like(self.down(x)))
        return x


def test_ranks_of_both_axes_draw_their_own_inside_a_tensor_parallel_region() -> None:
    def masks(tp: int, cp: int) -> tuple[Tensor, Tensor, Tensor]:
        module = Region_()
        root = nn.ModuleDict({"mlp": module})
        layout = TensorLayout(regions=(Region("mlp", ("mlp.up",), ("mlp.down",)),))
        regions = RandomRegions(root, layout, tp, torch.device("cpu"))

        def draw(x: Tensor) -> Tensor:
            with regions.step():
                module(x)
            return x

        _, after = drawn(cp, draw)
        return module.mask, module.behind, after

    found = {(tp, cp): masks(tp, cp) for tp in (0, 1) for cp in (0, 1)}
    assert len({tuple(inside.flatten().tolist()) for inside, _, _ in found.values()}) == 4
    for cp in (0, 1):  # behind the region ranks of the tensor axis have the same activations
        assert torch.equal(found[0, cp][1], found[1, cp][1])
    assert not torch.equal(found[0, 0][1], found[0, 1][1])
    assert len({float(after) for _, _, after in found.values()}) == 1


@pytest.mark.parametrize("shape", [(BATCH, LOCAL, WIDTH), (BATCH, 3, WIDTH), (BATCH * LOCAL, WIDTH)])
def test_tokens_that_sequence_parallelism_cuts_again_get_their_own_numbers_as_well(shape: tuple[int, ...]) -> None:
    masks = []
    for rank in (0, 1):
        door = HandMadeDoor(LENGTH, axis=Mirrored(rank))
        torch.manual_seed(7)
        redirect = Redirect(door.attention, tensor_size=3)
        with redirect.inside(door.inside(rows=BATCH)):
            masks.append(F.dropout(torch.ones(shape)))
    assert not torch.equal(*masks)


def test_tokens_are_known_by_their_shape() -> None:
    assert is_of_tokens((3, 8, 6), [8], 3)
    assert is_of_tokens((24, 6), [8], 3)
    assert is_of_tokens((5, 6), [8], 3)
    assert not is_of_tokens((8, 1, 1), [8], 8)
    assert not is_of_tokens((3, 50, 6), [8, 1], 3)
    assert not is_of_tokens((3, 6), [8, 1], 3)
