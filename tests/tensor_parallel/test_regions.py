"""Gradients that pass a region are those of one process, however backward is asked for."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights
from lightning_5d.pipeline_parallel.weight_products import product_of
from lightning_5d.recomputation import KEEP_INPUTS, CheckpointedForward
from lightning_5d.tensor_parallel import regions
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.layers import install
from lightning_5d.tensor_parallel.layout import Door, Region, Sequence, TensorLayout
from lightning_5d.tensor_parallel.rows import even
from tests.ranks.pool import RankPool
from tests.tensor_parallel.by_hand import cut_weights, difference, worst_gradient

WIDTH, HIDDEN = 6, 8


class Gated(nn.Module):
    """A region: two columns of one input, one of them used twice, and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x) + self.gate(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).sin()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def layout(door: Door, sequence: bool) -> TensorLayout:
    blocks = ("blocks.0", "blocks.1")
    weights = {}
    for block in blocks:
        for name in ("gate", "up"):
            weights[f"{block}.mlp.{name}.weight"] = weights[f"{block}.mlp.{name}.bias"] = even(0, HIDDEN)
        weights[f"{block}.mlp.down.weight"] = even(1, HIDDEN)
    partial = {f"{place}.{kind}" for place in (*(f"{b}.norm" for b in blocks), "norm") for kind in ("weight", "bias")}
    return TensorLayout(
        regions=tuple(
            Region(f"{block}.mlp", (f"{block}.mlp.gate", f"{block}.mlp.up"), (f"{block}.mlp.down",), door)
            for block in blocks
        ),
        weights=weights,
        partial=frozenset(partial | {f"{block}.mlp.down.bias" for block in blocks}) if sequence else frozenset(),
        sequence=Sequence(blocks, "norm") if sequence else None,
    )


@contextmanager
def pair(axis: TensorAxis, door: Door, sequence: bool) -> Iterator[tuple[Net, Net, TensorLayout]]:
    reference, model, placed = net(), net(), layout(door, sequence)
    cut_weights(model, dict(placed.weights), axis)
    installed = install(model, placed, axis, sequence)
    try:
        yield reference, model, placed
    finally:
        installed.close()


def batch(seed: int = 0, tokens: int = 6) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def _gradients(axis: TensorAxis, door: Door, sequence: bool, run: Callable[[Net], object]) -> float:
    """The worst difference of gradients after the same thing was done with both."""
    with pair(axis, door, sequence) as (reference, model, placed):
        run(reference)
        run(model)
        frozen = [name for name, parameter in reference.named_parameters() if parameter.grad is None]
        return worst_gradient(model, reference, placed, axis, frozen)


# Ways to ask for a backward.


def once(model: Net) -> None:
    model(batch()).sum().backward()


def twice_through_one_graph(model: Net) -> None:
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def two_forwards_then_backwards_in_turn(model: Net) -> None:
    first, second = model(batch(1)).sum(), model(batch(2)).sum()
    first.backward()
    second.backward()


def frozen_columns(model: Net) -> None:
    model.blocks[0].mlp.gate.requires_grad_(False)
    model.blocks[1].mlp.up.weight.requires_grad_(False)
    once(model)


def frozen_rows_and_all_columns(model: Net) -> None:
    model.blocks[0].mlp.requires_grad_(False)
    model.blocks[1].mlp.down.requires_grad_(False)
    once(model)


def an_input_that_needs_no_gradient(model: Net) -> None:
    model.inlet.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    once(model)


def odd_lengths_in_turn(model: Net) -> None:
    losses = [model(batch(tokens, tokens)).sum() for tokens in (5, 6, 1)]
    for loss in losses:
        loss.backward()


def an_unused_branch(model: Net) -> None:
    model(batch(1))
    once(model)


def torch_checkpoint(model: Net) -> None:
    x = model.inlet(batch())
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    model.norm(x).sin().sum().backward()


class Keeping:
    def policy(self, rerun: object, agree: object) -> object:
        return KEEP_INPUTS


def _checkpointed(model: Net, modules: list[nn.Module]) -> None:
    """Of lengths whose pieces are equally long, backwards in another order than forwards."""
    for module in modules:
        module.__dict__["forward"] = CheckpointedForward(
            module, Keeping(), lambda: nullcontext, lambda measured: measured
        )
    for loss in reversed([model(batch(tokens, tokens)).sum() for tokens in (5, 6, 7)]):
        loss.backward()
    for module in modules:
        before = module.__dict__.pop("forward").previous
        if before is not None:
            module.__dict__["forward"] = before


def checkpointed_blocks(model: Net) -> None:
    _checkpointed(model, list(model.blocks))


def checkpointed_regions(model: Net) -> None:
    _checkpointed(model, [block.mlp for block in model.blocks])


def grad_of_some_weights(model: Net) -> None:
    weights = [model.blocks[1].mlp.gate.weight, model.blocks[0].mlp.down.weight, model.inlet.weight]
    for weight, gradient in zip(weights, torch.autograd.grad(model(batch()).sum(), weights), strict=True):
        weight.grad = gradient


def backward_for_some_weights(model: Net) -> None:
    model(batch()).sum().backward(inputs=[model.blocks[0].mlp.up.weight, model.blocks[0].mlp.up.bias])


def accumulation(model: Net) -> None:
    for seed in range(3):
        model(batch(seed)).sum().backward()


def an_input_written_to_in_the_region(model: Net) -> None:
    def write(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].clone().mul_(2),)

    handle = model.blocks[0].mlp.up.register_forward_pre_hook(write)  # type: ignore[arg-type]
    once(model)
    handle.remove()


WAYS = {
    way.__name__: way
    for way in (
        once,
        twice_through_one_graph,
        two_forwards_then_backwards_in_turn,
        frozen_columns,
        frozen_rows_and_all_columns,
        an_input_that_needs_no_gradient,
        odd_lengths_in_turn,
        an_unused_branch,
        torch_checkpoint,
        grad_of_some_weights,
        backward_for_some_weights,
        accumulation,
        an_input_written_to_in_the_region,
        checkpointed_blocks,
        checkpointed_regions,
    )
}


def _all_ways(rank: int) -> dict[tuple[str, Door, bool], float | str]:
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    worst: dict[tuple[str, Door, bool], float | str] = {}
    for door in ("module", "layers"):
        for sequence in (False, True):
            for name, way in WAYS.items():
                worst[name, door, sequence] = _gradients(axis, door, sequence, way)
    axis.close()
    return worst


@pytest.fixture(scope="module")
def differences(rank_pool: RankPool) -> list[dict[tuple[str, Door, bool], float]]:
    return rank_pool(2, _all_ways, timeout=60)


@pytest.mark.parametrize("name", WAYS)
def test_gradients_equal_those_of_one_process(
    differences: list[dict[tuple[str, Door, bool], float]], name: str
) -> None:
    found = {key[1:]: value for rank in differences for key, value in rank.items() if key[0] == name}
    assert len(found) >= 2
    assert max(found.values()) < 1e-5, found


# How it is done.


def _order(rank: int, deferring: bool) -> list[str]:
    """What happens in the backward of one region, in order."""
    axis, happened = open_axis(dist.group.WORLD), []  # type: ignore[arg-type,var-annotated]
    model, placed = net(), layout("module", False)
    cut_weights(model, dict(placed.weights), axis)
    deferred = DeferredWeights([model]) if deferring else None
    installed = install(model, placed, axis, False)
    loss = model(batch()).sum()
    start, product = axis.start_sum, regions.Linear.gradients

    def noted(*args: object, **kwargs: object) -> object:
        happened.append("weights")
        return product(*args, **kwargs)  # type: ignore[arg-type]

    class Noting:
        def __init__(self, arriving: object) -> None:
            self.arriving = arriving

        def wait(self) -> Tensor:
            happened.append("wait")
            return self.arriving.wait()  # type: ignore[attr-defined,no-any-return]

    def sent(x: Tensor) -> Noting:
        happened.append("send")
        return Noting(start(x))

    axis.start_sum, regions.Linear.gradients = sent, noted  # type: ignore[method-assign,assignment]
    weights = [p for n, p in model.named_parameters() if "mlp" in n and n.endswith("weight")]
    try:
        if deferred is None:
            loss.backward()
        else:
            with deferred.collecting() as queue:
                loss.backward()
            assert all(weight.grad is None for weight in weights)
            assert len(queue) == 9  # a gate that is used twice, an up and a down in each block, and the inlet
            queue.run()
        reference = net()
        reference(batch()).sum().backward()
        assert worst_gradient(model, reference, placed, axis) < 1e-5
    finally:
        regions.Linear.gradients = product  # type: ignore[method-assign]
        installed.close()
        axis.close()
    return happened


@pytest.mark.parametrize("deferring", [False, True])
def test_the_gradient_of_the_input_travels_while_those_of_weights_are_computed(
    ranks: RankPool, deferring: bool
) -> None:
    """Also where a schedule collects the gradients of weights: they are left to it after the sending."""
    block = ["weights", "send", "weights", "weights", "weights", "wait"]  # first the row's
    for happened in ranks(2, _order, deferring):
        assert happened == block * 2


def _hooks(rank: int) -> None:
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    with pair(axis, "module", False) as (reference, model, placed):
        seen: dict[str, list[Tensor]] = {}
        for model_name, each in (("reference", reference), ("model", model)):
            gate, mlp = each.blocks[0].mlp.gate, each.blocks[0].mlp
            found = seen.setdefault(model_name, [])
            gate.weight.register_hook(lambda grad: grad * 3)
            gate.weight.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
            mlp.register_full_backward_hook(lambda m, into, out, found=found: found.extend((into[0], out[0])))
            once(each)
        whole, part = seen["reference"], seen["model"]
        assert len(part) == len(whole) == 3
        by_size = sorted(whole, key=Tensor.numel), sorted(part, key=Tensor.numel)
        weights = next(t for t in whole if t.ndim == 2), next(t for t in part if t.ndim == 2)
        assert difference(weights[1], even(0, HIDDEN).part(weights[0], rank, 2)) < 1e-5
        for one, other in zip(*by_size, strict=True):
            if one.ndim == 3:
                assert difference(other, one) < 1e-5  # whole gradients, of input and of output
        assert worst_gradient(model, reference, placed, axis) < 1e-5
    # Who looks at the entered tensor sees all that comes to it.
    with pair(axis, "module", False) as (reference, model, _):
        looked: list[Tensor] = []
        for each in (reference, model):
            forward = each.blocks[0].mlp.gate.register_forward_pre_hook(
                lambda m, args: args[0].register_hook(looked.append) and None
            )
            once(each)
            forward.remove()
        mine = looked[-1].clone()
        dist.all_reduce(mine)
        assert difference(mine, looked[0]) < 1e-5
    axis.close()


def test_hooks_see_whole_gradients(ranks: RankPool) -> None:
    ranks(2, _hooks)


def _watched(rank: int) -> None:
    """Double backward is refused, evaluation leaves no graph, 16-bit weights work with and without autocast."""
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    with pair(axis, "module", False) as (_, model, _placed):
        x = batch().requires_grad_()
        with pytest.raises(RuntimeError, match="create_graph=True came to layers on the tensor axis"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
    for sequence in (False, True):
        with pair(axis, "layers", sequence) as (reference, model, _placed), torch.no_grad():
            assert not model(batch()).requires_grad
            assert difference(model(batch(tokens=5)), reference(batch(tokens=5))) < 1e-5
    for dtype, autocast in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
        for sequence in (False, True):
            with pair(axis, "module", sequence) as (reference, model, placed):
                reference.to(dtype), model.to(dtype)
                for each in (reference, model):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = each(batch().to(dtype)).float().sum()
                    loss.backward()
                assert worst_gradient(model, reference, placed, axis) < 0.06, (dtype, autocast, sequence)
                assert model.blocks[0].mlp.gate.weight.grad.dtype == dtype
    axis.close()


def test_double_backward_is_refused_and_16_bit_weights_and_autocast_work(ranks: RankPool) -> None:
    ranks(2, _watched)


def _head(rank: int) -> None:
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, 8)
    linear = copy.deepcopy(whole)
    cut_weights(linear, {"weight": even(0, 8), "bias": even(0, 8)}, axis)
    product = product_of(linear)
    assert product is not None
    layer = regions.Linear(product)
    scale = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(3))
    for sliced in (False, True):
        for model in (whole, linear):
            model.zero_grad()
        x = batch(tokens=7).requires_grad_()
        out = whole(x)
        ((out * scale).sum() + x.square().sum()).backward()
        expected, x.grad = x.grad, None
        pieces = regions.Pieces(axis, 1, 7)
        piece = regions.take(x, pieces)
        joined = regions.join(piece * 1, pieces)
        axis.traffic.reset()
        given = joined[:, slice(0, None), :][..., :] if sliced else joined
        local = regions.head(given, linear.weight, linear.bias, layer, axis)
        # Others read the whole tensor beside the head.
        ((local * scale.chunk(2, -1)[rank]).sum() + joined.square().sum()).backward(retain_graph=True)
        assert difference(local, out.chunk(2, -1)[rank]) < 1e-5
        assert difference(x.grad, expected) < 1e-5
        assert difference(linear.weight.grad, whole.weight.grad.chunk(2)[rank]) < 1e-5
        assert difference(linear.bias.grad, whole.bias.grad.chunk(2)[rank]) < 1e-5
        # The head's gradient goes straight to the pieces; the gather is that of the cut.
        assert axis.traffic.calls == {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 1}
        part = regions.head(joined[:, 1:], linear.weight, linear.bias, layer, axis)
        assert difference(part, out.chunk(2, -1)[rank][:, 1:]) < 1e-5
        part.sum().backward()
        assert axis.traffic.calls["all_reduce"] == 1  # a real slice takes the long way
    axis.close()


def test_a_head_behind_the_sequence_sends_its_gradient_once_and_others_get_theirs(ranks: RankPool) -> None:
    ranks(2, _head)
