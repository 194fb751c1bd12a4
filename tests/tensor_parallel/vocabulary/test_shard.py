# ruff: noqa: B023 - the expressions are run at once
import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from lightning_5d.tensor_parallel.vocabulary import VocabularyShard
from tests.ranks import RankPool
from tests.tensor_parallel.vocabulary.parity import axis, columns, compare, logits, plain

V = 7


def shard_of(whole: Tensor, graph: bool = False) -> tuple[Tensor, VocabularyShard]:
    local = columns(whole, axis()).requires_grad_(graph)
    return local, VocabularyShard.wrap(local, vocabulary=whole.shape[-1], axis=axis())


def looks_whole(rank: int) -> None:
    whole = logits(2, 3, V, dtype=torch.float32)
    _, shard = shard_of(whole)
    assert isinstance(shard, Tensor)
    assert torch.is_tensor(shard)
    assert (shard.shape, shard.size(), shard.size(-1), shard.ndim, shard.dim()) == (whole.shape, whole.shape, V, 3, 3)
    assert (shard.numel(), len(shard), shard.dtype, shard.device) == (42, 2, torch.float32, whole.device)
    assert (shard.stride(), shard.is_contiguous(), shard.is_floating_point()) == ((21, 7, 1), True, True)
    assert shard.mT.stride() == whole.mT.stride()
    assert (shard.requires_grad, shard.is_leaf, shard.grad_fn) == (False, True, None)
    assert torch.equal(shard.whole(), whole)
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(shard)
    text = repr(shard)
    assert "columns 0 to 3 of 7" in text if rank == 0 else "columns 4 to 6 of 7" in text
    assert "nan" not in text
    same = tree_map(lambda x: x, {"logits": shard})["logits"]
    assert same is shard
    copied = copy.deepcopy(shard)
    copied.zero_()
    assert torch.equal(shard.whole(), whole)
    assert not copied.whole().any()


def test_a_shard_looks_like_the_whole(ranks: RankPool) -> None:
    ranks(2, looks_whole)


def refusals(rank: int) -> None:
    _, shard = shard_of(logits(2, V), graph=True)
    with pytest.raises(TypeError, match=r"holds 4 of the 7 columns.*\.whole\(\)" if rank == 0 else "holds 3 of the 7"):
        pickle.dumps(shard.detach())
    with pytest.raises(RuntimeError, match="scalar outputs"):
        shard.backward()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(shard)
    with pytest.raises(ValueError, match="2 ranks with 4 columns each hold 8, the vocabulary has 9; each rank needs 5"):
        VocabularyShard.wrap(torch.zeros(2, 4), vocabulary=9, axis=axis())
    with pytest.raises(NotImplementedError, match=r"Use torch\.where"):
        shard.detach()[0] = torch.zeros(V)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(7\) must match the size of tensor b \(4\)"):
        shard + torch.zeros(4)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        shard.topk(8)
    with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
        shard.gather(-1, torch.full((2, 1), 7))


def test_what_cannot_be_done_is_said(ranks: RankPool) -> None:
    ranks(2, refusals)


def gradients(rank: int) -> None:
    whole, target = logits(4, V), torch.tensor([0, 6, 3, 5])
    leaf = whole.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(F.cross_entropy(leaf, target), leaf)
    local, shard = shard_of(whole, graph=True)
    seen = []
    assert (shard.requires_grad, shard.is_leaf) == (True, False)
    loss = F.cross_entropy(shard, target)
    (asked,) = torch.autograd.grad(loss, shard, retain_graph=True)
    shard.register_hook(lambda gradient: seen.append(gradient))
    shard.retain_grad()
    loss.backward()
    for gradient in (asked, shard.grad, seen[-1]):
        assert isinstance(gradient, VocabularyShard)
        torch.testing.assert_close(gradient.whole(), wanted)
    assert type(local.grad) is Tensor
    # A hook may give another gradient.
    local, shard = shard_of(whole, graph=True)
    shard.register_hook(lambda gradient: gradient * 3)
    F.cross_entropy(shard, target).backward()
    torch.testing.assert_close(local.grad, columns(3 * wanted, axis()).nan_to_num(nan=0.0))
    # Weights that meet the logits get plain gradients.
    bias, scale = logits(V, seed=1).requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(shard.detach() * scale + bias, target).backward()
    got = type(bias.grad), bias.grad, scale.grad
    bias.grad = scale.grad = None
    F.cross_entropy(whole * scale + bias, target).backward()
    assert got[0] is Tensor
    torch.testing.assert_close(got[1], bias.grad)
    torch.testing.assert_close(got[2], scale.grad)
    # Twice through the graph.
    penalty = lambda x: torch.autograd.grad(x.logsumexp(-1).square().sum(), x, create_graph=True)[0].square().sum()  # noqa: E731
    compare(penalty, whole, axis())


def test_gradients_go_where_autograd_is_asked_for_them(ranks: RankPool) -> None:
    ranks(2, gradients)


class Head(nn.Linear):
    """As the tensor axis installs it: this rank's rows of the weight, and a shard as output."""

    def __init__(self, whole: Tensor) -> None:
        part = columns(whole.mT, axis()).mT.nan_to_num(nan=0.0)
        super().__init__(part.shape[1], part.shape[0], bias=False, dtype=part.dtype)
        self.weight = nn.Parameter(part.contiguous())
        self.register_forward_hook(
            lambda module, args, out: VocabularyShard.wrap(out, vocabulary=len(whole), axis=axis())
        )


def through_modules(rank: int) -> None:
    weight, x, target = logits(V, 5, seed=1), logits(4, 5, seed=2), torch.tensor([0, 6, 3, 5])
    wanted = weight.clone().requires_grad_()
    F.cross_entropy(x @ wanted.mT, target).backward()
    expected = columns(wanted.grad.mT, axis()).mT.nan_to_num(nan=0.0)
    for kind in ("plain", "module hooks", "checkpointed", "checkpointed in the old way", "autocast", "saved elsewhere"):
        head, seen = Head(weight), []
        start = x.clone().requires_grad_()
        if kind == "module hooks":
            head.register_full_backward_hook(lambda module, gone, came: seen.append(came[0]))
        loss_of = lambda y: F.cross_entropy(3 * torch.tanh(head(y) / 3), target)  # noqa: E731
        plain_of = lambda y: F.cross_entropy(head(y), target)  # noqa: E731
        if kind.startswith("checkpointed"):
            checkpoint(plain_of, start, use_reentrant=kind != "checkpointed").backward()
        elif kind == "saved elsewhere":
            with torch.autograd.graph.save_on_cpu():
                loss = loss_of(start)
            loss.backward()
            continue
        elif kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                plain_of(start.float()).backward() if head.weight.dtype == torch.float32 else plain_of(start).backward()
        else:
            plain_of(start).backward()
        torch.testing.assert_close(head.weight.grad, expected, rtol=1e-6, atol=1e-8)
        assert [type(one) for one in seen] == ([VocabularyShard] if kind == "module hooks" else [])


def test_shards_pass_through_module_hooks_and_checkpoints(ranks: RankPool) -> None:
    ranks(2, through_modules)


def without_gradients(rank: int) -> None:
    whole, target = logits(2, 3, V), torch.randint(V, (2, 3))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            _, shard = shard_of(whole)
            flat = shard.float().view(-1, V)
            assert isinstance(flat, VocabularyShard)
            pairs = [
                (F.cross_entropy(flat, target.flatten()), F.cross_entropy(whole.float().view(-1, V), target.flatten())),
                (F.cross_entropy(shard.transpose(1, 2), target), F.cross_entropy(whole.transpose(1, 2), target)),
                (shard.argmax(-1), whole.argmax(-1)),
                (shard.softmax(-1).topk(2).values, whole.softmax(-1).topk(2).values),
                (
                    F.log_softmax(shard, -1).gather(-1, target[..., None]),
                    F.log_softmax(whole, -1).gather(-1, target[..., None]),
                ),
                (shard.reshape(-1, V)[:, 5], whole.reshape(-1, V)[:, 5]),
                (plain(shard.reshape(6, V).chunk(2)[1]), whole.reshape(6, V).chunk(2)[1]),
                (shard @ torch.ones(V, dtype=whole.dtype), whole.sum(-1)),
                (shard.flatten().sum(), whole.sum()),
                (
                    torch.take_along_dim(shard, target[..., None], -1),
                    torch.take_along_dim(whole, target[..., None], -1),
                ),
            ]
            for got, wanted in pairs:
                torch.testing.assert_close(got, wanted)


def test_without_gradients_and_in_inference_mode(ranks: RankPool) -> None:
    ranks(2, without_gradients)


def random_numbers(rank: int) -> list[Any]:
    _, shard = shard_of(logits(5, V))
    results = []
    for x in (shard, shard.whole()):
        torch.manual_seed(3)
        noise = torch.empty_like(x).exponential_().log()
        gumbel = (x - noise).argmax(-1)
        dropped = F.dropout(x, 0.5)
        drawn = torch.multinomial(x.softmax(-1), 2)
        results.append([plain(noise), gumbel, plain(dropped), drawn])
    torch.manual_seed(rank)
    results.append(torch.multinomial(shard.softmax(-1), 1))
    return results


def test_random_numbers_are_those_of_one_process(ranks: RankPool) -> None:
    (cut, whole, drawn), (other, _, also_drawn) = ranks(2, random_numbers)
    for one, two, three in zip(cut, whole, other, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert torch.equal(drawn, also_drawn)


def compiled(rank: int) -> None:
    weight, x, target = logits(V, 5, seed=1), logits(4, 5, seed=2), torch.tensor([0, 6, 3, 5])
    head = Head(weight)

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(3 * torch.tanh(head(torch.tanh(x)) / 3), target)

    loss_of(x).backward()
    wanted, head.weight.grad = head.weight.grad, None
    torch.compile(loss_of, backend="eager")(x).backward()
    torch.testing.assert_close(head.weight.grad, wanted)
    made = torch.compile(lambda y: (2 * y).whole().argmax(-1), backend="eager")(head(x))
    assert torch.equal(made, (x @ weight.mT).argmax(-1))


def test_compiled_functions_leave_shards_to_python(ranks: RankPool) -> None:
    ranks(1, compiled)
