"""A layout at work computes what the module computes alone, sends what the formula says, and leaves nothing behind."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.absent import Absent, stand_in
from lightning_5d.models import Decoder
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.layers import install
from lightning_5d.tensor_parallel.layout import Region, Sequence, TensorLayout
from lightning_5d.tensor_parallel.pieces import Pieces
from lightning_5d.tensor_parallel.rows import Rows, even
from lightning_5d.tensor_parallel.vocabulary import VocabularyShard
from lightning_5d.whole_length import mark
from tests.ranks.pool import RankPool
from tests.tensor_parallel.by_hand import (
    at_work,
    cut_weights,
    decoder,
    decoder_layout,
    difference,
    worst_gradient,
)

ROWS = 2


def _loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    out = model(ids)
    loss = F.cross_entropy(out.flatten(0, 1), ids.roll(1).flatten())
    loss.backward()
    return out.detach(), loss


def _ids(tokens: int) -> Tensor:
    return torch.randint(0, 24, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))


def _decoder(
    rank: int, cases: list[tuple[str, bool, int, int]]
) -> list[tuple[float, float, dict[str, int], dict[str, int]]]:
    found = []
    for door, sequence, tokens, kv_heads in cases:
        reference, model = decoder(num_kv_heads=kv_heads), decoder(num_kv_heads=kv_heads)
        layout = decoder_layout(model, sequence=sequence, door=door)
        expected, _ = _loss(reference, _ids(tokens))
        with at_work(model, layout) as axis:
            out, _ = _loss(model, _ids(tokens))
            calls, volume = dict(axis.traffic.calls), dict(axis.traffic.bytes)
            found.append((difference(out, expected), worst_gradient(model, reference, layout, axis), calls, volume))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_decoder_is_the_one_of_one_process_and_sends_what_the_formula_says(ranks: RankPool, size: int) -> None:
    cases = [
        (door, sequence, tokens, kv_heads)
        for door, kv_heads in (("module", size), ("layers", 4))
        for sequence in (False, True)
        for tokens in (8, 7)
    ]
    for results in ranks(size, _decoder, cases, timeout=60):
        for (_, sequence, tokens, _), (of_output, of_gradients, calls, volume) in zip(cases, results, strict=True):
            assert of_output < 1e-5
            assert of_gradients < 1e-5
            # Two regions in each of two layers, each entered and left, forward and backward; embedding and head.
            message = ROWS * -(-tokens // size) * size * 16 * 4 if sequence else ROWS * tokens * 16 * 4
            logits, whole = ROWS * tokens * 24 * 4, ROWS * tokens * 16 * 4
            if sequence:
                assert calls == {"all_reduce": 2, "all_gather": 8 + 3, "reduce_scatter": 8}
                assert volume["reduce_scatter"] == 8 * message
                assert volume["all_gather"] == 10 * message + logits
            else:
                assert calls == {"all_reduce": 8 + 2, "all_gather": 1, "reduce_scatter": 0}
                assert volume["all_gather"] == logits
            assert volume["all_reduce"] == calls["all_reduce"] * whole


def _head(rank: int) -> None:
    for tokens in (8, 7):
        traffic = []
        for sequence in (False, True):
            reference, model = decoder(), decoder()
            layout = decoder_layout(model, sequence=sequence, head="head")
            _, expected_loss = _loss(reference, _ids(tokens))
            with at_work(model, layout) as axis:
                out, loss = _loss(model, _ids(tokens))
                traffic.append((axis.traffic.volume, dict(axis.traffic.calls)))
                assert type(out) is VocabularyShard
                assert difference(loss, expected_loss) < 1e-5
                assert worst_gradient(model, reference, layout, axis) < 1e-5
        (alone, _), (with_sequence, calls) = traffic
        # What the loss sends is smaller than a token's features; nothing sends logits.
        if tokens == 8:
            message = ROWS * tokens * 16 * 4
            assert calls["reduce_scatter"] == 8 + 1  # the head's gradient goes straight to the pieces
            # The same but for the embedding's gradient, which is gathered where the sequence was cut.
            assert with_sequence - alone == message


def test_with_a_head_the_sequence_costs_no_more_than_the_gradient_of_the_embedding(ranks: RankPool) -> None:
    ranks(2, _head)


def _compiled(rank: int) -> None:
    reference, model = decoder(num_layers=1), decoder(num_layers=1)
    layout = decoder_layout(model, sequence=True)
    expected, _ = _loss(reference, _ids(8))
    with at_work(model, layout) as axis:
        model.layers[0].compile(backend="aot_eager")
        out, _ = _loss(model, _ids(8))
        assert difference(out, expected) < 1e-5
        assert worst_gradient(model, reference, layout, axis) < 1e-5


def test_compiled_blocks_compute_the_same(ranks: RankPool) -> None:
    ranks(2, _compiled, timeout=60)


class Table(nn.Module):
    """Everything beside regions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, padding_idx=7)
        self.wide = nn.Linear(6, 10)
        self.narrow = nn.Linear(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.narrow(input=self.wide(self.words(ids)).tanh())
        return out


def _beside_regions(rank: int) -> None:
    torch.manual_seed(0)
    reference = Table()
    model = copy.deepcopy(reference)
    turned = Rows(0, 10, index=(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, -1, -1))
    layout = TensorLayout(
        embeddings=("words",),
        gathered=("wide",),
        split=("narrow",),
        weights={"words.weight": even(0, 10), "wide.weight": turned, "wide.bias": turned, "narrow.weight": even(1, 10)},
    )
    ids = torch.tensor([[0, 7, 3], [9, 5, 7]])
    expected = reference(ids)
    expected.sin().sum().backward()
    with at_work(model, layout) as axis:
        out = model(ids)
        out.sin().sum().backward()
        assert difference(out, expected) < 1e-5
        assert worst_gradient(model, reference, layout, axis) < 1e-5
        assert axis.traffic.calls == {"all_reduce": 3, "all_gather": 2, "reduce_scatter": 0}


def test_embeddings_gathered_columns_and_split_rows(ranks: RankPool) -> None:
    ranks(2, _beside_regions)


class Adapted(nn.Module):
    """A linear layer with a product of two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + 2.0 * self.b(self.a(x))
        return out


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = 8
        self.up, self.down = Adapted(nn.Linear(6, 8)), Adapted(nn.Linear(8, 6))

    def forward(self, hidden_states: Tensor, scale: Tensor | None = None) -> Tensor:
        inside = self.up(hidden_states).unflatten(-1, (2, self.features // 2)).flatten(-2).tanh()
        if scale is not None:
            inside = inside * scale
        out: Tensor = self.down(inside)
        return out


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(hidden_states=x, scale=scale)
        return self.norm(x).sin()


def _adapters(rank: int) -> None:
    x = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
    for sequence in (False, True):
        torch.manual_seed(0)
        reference = Adapters()
        model = copy.deepcopy(reference)
        weights: dict[str, Rows] = {}
        regions: list[Region] = []
        partial: set[str] = {"norm.weight", "norm.bias"} if sequence else set()
        for name in ("blocks.0", "blocks.1"):
            weights |= {f"{name}.up.base_layer.weight": even(0, 8), f"{name}.up.base_layer.bias": even(0, 8)}
            weights |= {f"{name}.up.b.weight": even(0, 8), f"{name}.down.base_layer.weight": even(1, 8)}
            weights |= {f"{name}.down.a.weight": even(1, 8)}
            partial |= {f"{name}.up.a.weight", f"{name}.down.b.weight"}
            partial |= {f"{name}.down.base_layer.bias"} if sequence else set()
            regions.append(
                Region(
                    name,
                    (f"{name}.up.base_layer", f"{name}.up.b"),
                    (f"{name}.down",),
                    attributes={(name, "features"): 4},
                )
            )
        layout = TensorLayout(
            tuple(regions),
            weights=weights,
            partial=frozenset(partial),
            sequence=Sequence(("blocks.0", "blocks.1"), "norm") if sequence else None,
        )
        if sequence:  # a block is the region here, and the residual is outside of it
            continue
        whole = torch.full((1,), 1.5, requires_grad=True)
        mine = torch.full((1,), 1.5, requires_grad=True)
        expected = reference(x, whole)
        expected.sum().backward()
        with at_work(model, layout) as axis:
            assert model.blocks[0].features == 4
            out = model(x, mine)
            out.sum().backward()
            assert difference(out, expected) < 1e-5
            assert worst_gradient(model, reference, layout, axis) < 1e-5
            # A second input that needs a gradient gets all of it.
            assert difference(mine.grad, whole.grad) < 1e-5  # type: ignore[arg-type]
        assert model.blocks[0].features == 8


def test_adapters_around_columns_and_rows(ranks: RankPool) -> None:
    ranks(2, _adapters)


def _lengths(rank: int) -> float:
    """Blocks called with what is not the tensor of the block before, and one that is left out."""
    # In double precision: of one token, gradients of queries and keys are rounding alone.
    reference, model = decoder(num_layers=3).double(), decoder(num_layers=3).double()
    layout = decoder_layout(model, sequence=True)
    worst = 0.0

    def run(each: Decoder, tokens: int, first: int) -> Tensor:
        from lightning_5d.models.decoder import rotary_angles

        ids = _ids(tokens)
        angles = rotary_angles(torch.arange(tokens)[None], each.config.head_size, each.config.rope_theta)
        x = each.embed_tokens(ids)
        for layer in each.layers[first:]:
            x = layer(x * 1.5, *angles)
        out: Tensor = each.lm_head(each.norm(x))
        return out

    with at_work(model, layout) as axis:
        for tokens, first in ((7, 0), (8, 1), (5, 1), (1, 0)):
            reference.zero_grad(), model.zero_grad()
            expected, out = run(reference, tokens, first), run(model, tokens, first)
            expected.sin().sum().backward()
            out.sin().sum().backward()
            frozen = [name for name, parameter in reference.named_parameters() if parameter.grad is None]
            worst = max(worst, difference(out, expected), worst_gradient(model, reference, layout, axis, frozen))
    return worst


def test_lengths_are_known_where_blocks_are_called_by_hand(ranks: RankPool) -> None:
    assert max(ranks(2, _lengths)) < 1e-9


def _nothing_left(rank: int) -> None:
    model = decoder()
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    before = [(dict(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    layout = decoder_layout(model, sequence=True)
    expected = model(_ids(6)).detach()
    installed = install(model, layout, axis, True)
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == classes
    twin = copy.deepcopy(model)
    cut_weights(twin, dict(layout.weights), axis)
    assert difference(twin(_ids(6)), expected) < 1e-5  # a copy belongs to the same axis
    sent = pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match="holds only that rank's part"):
        sent(_ids(6))
    installed.close()
    installed.close()
    assert torch.equal(model(_ids(6)), expected)
    after = [(dict(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    for (was, *hooks), (now, *left) in zip(before, after, strict=True):
        assert was.keys() == now.keys(), was.keys() ^ now.keys()
        assert hooks == left, (hooks, left)
    axis.close()


def test_closing_leaves_the_module_as_it_was_and_copies_work(ranks: RankPool) -> None:
    ranks(2, _nothing_left)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _refuse(axis: TensorAxis, model: nn.Module, layout: TensorLayout, what: str, sequence: bool = False) -> None:
    before = [set(module.__dict__) for module in model.modules()]
    with pytest.raises(ValueError, match=what):
        install(model, layout, axis, sequence)
    assert [set(module.__dict__) for module in model.modules()] == before


def _refusals(rank: int) -> None:
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    table = Table()
    table.words.max_norm = 1.0
    _refuse(axis, table, TensorLayout(embeddings=("words",)), "words has max_norm=1.0")
    _refuse(axis, table, TensorLayout(embeddings=("wide",)), "wide is a Linear, and only nn.Embedding")
    _refuse(axis, table, TensorLayout(gathered=("wide", "missing")), "names missing, and Table has no such module")
    _refuse(axis, table, TensorLayout(), "needs a layout that says between which", sequence=True)
    table.narrow = Own(10, 4)
    _refuse(axis, table, TensorLayout(split=("narrow",)), "narrow is a Own with a forward of its own")
    biased = Adapters()
    biased.blocks[0].down.b = nn.Linear(2, 6)
    region = Region("blocks.0", ("blocks.0.up.base_layer",), ("blocks.0.down",))
    layout = TensorLayout((region,), weights={"blocks.0.down.base_layer.weight": even(1, 8)})
    _refuse(axis, biased, layout, r"blocks.0.down.b has a bias behind the row layer")
    _refuse(axis, biased, replace(layout, weights={}), "blocks.0.down.*")
    axis.close()


def test_what_cannot_be_right_is_refused_and_nothing_is_left(ranks: RankPool) -> None:
    ranks(2, _refusals)


class _Earlier(Absent):
    """A block of an earlier stage; the code around makes another tensor of what it gives."""

    def received(self) -> Tensor:
        return self.piece

    def __call__(self, x: Tensor, *args: Tensor) -> Tensor:
        return self.piece * 1


def _stages(rank: int) -> None:
    reference, model = decoder(), decoder()
    handed_on: list[Tensor] = []
    reference.layers[0].register_forward_hook(lambda module, args, output: handed_on.append(output))
    expected = reference(_ids(7))
    layout = decoder_layout(model, sequence=True)
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    piece = Pieces(axis, 1, 7).take(handed_on[0])
    model.layers[0] = stand_in(_Earlier, model.layers[0], "layers.0", piece=piece)
    cut_weights(model, {n: r for n, r in layout.weights.items() if not n.startswith("layers.0.")}, axis)
    installed = install(model, layout, axis, True)
    with pytest.raises(ValueError, match="handed on a piece of the sequence without its length"):
        model(_ids(7))
    mark(piece, 7)
    assert difference(model(_ids(7)), expected) < 1e-5
    installed.close()
    axis.close()


def test_a_pipeline_stage_needs_the_length_of_what_it_gets_a_piece_of(ranks: RankPool) -> None:
    ranks(2, _stages)
