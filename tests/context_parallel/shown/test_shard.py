import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_5d.context_parallel.cut import Balance
from lightning_5d.context_parallel.shown import SequenceShard, is_shown, with_whole_sequences
from lightning_5d.context_parallel.step_sequence import StepSequence
from tests.context_parallel.shown.parity import numbers, sequence
from tests.ranks import RankPool

B, S, V = 2, 7, 5


def shown_of(whole: Tensor, graph: bool = False) -> tuple[Tensor, SequenceShard, StepSequence]:
    over = sequence(whole.shape[1])
    local = over.part(whole, 1, float("nan") if whole.is_floating_point() else 0).requires_grad_(graph)
    return local, SequenceShard.wrap(local, dim=1, sequence=over), over


def looks_whole(rank: int) -> None:
    whole = numbers(B, S, V, dtype=torch.float32)
    _, shown, over = shown_of(whole)
    assert is_shown(shown)
    assert not is_shown(whole)
    assert (shown.shape, shown.size(1), shown.ndim, shown.numel()) == (whole.shape, S, 3, whole.numel())
    assert (shown.stride(), shown.is_contiguous(), shown.dtype) == (whole.stride(), True, torch.float32)
    assert (shown.requires_grad, shown.is_leaf, shown.grad_fn) == (False, True, None)
    assert torch.equal(shown.whole(), whole)
    assert f"{4 if rank else 3} of 7 along dimension 1 here" in repr(shown)
    assert "nan" not in str(shown)
    copied = copy.deepcopy(shown)
    copied.zero_()
    assert torch.equal(shown.whole(), whole)
    assert f"{shown.sum():.3f}" == f"{whole.sum():.3f}"
    assert shown.sum().item() == pytest.approx(whole.sum().item(), rel=1e-5)
    assert (shown.detach().numpy() == whole.numpy()).all()
    assert shown[:, :1, :1][:1].item() == whole[0, 0, 0].item()
    with pytest.raises(TypeError, match=rf"holds {4 if rank else 3} of the 7 tokens.*\.whole\(\)"):
        pickle.dumps(shown)
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(shown)
    with pytest.raises(ValueError, match=r"Each of 2 ranks holds 4 of 7 tokens, but dimension 1 .* has 3"):
        SequenceShard.wrap(torch.zeros(B, 3), dim=1, sequence=over)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(7\) must match the size of tensor b \(4\)"):
        shown + torch.zeros(4, V)
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 1 with size 7"):
        shown[:, 7]


def test_a_shard_looks_like_the_whole(ranks: RankPool) -> None:
    ranks(2, looks_whole)


def outputs(rank: int) -> None:
    whole = numbers(B, S, V)
    _, shown, _ = shown_of(whole, graph=True)
    given = {"loss": shown.sum(), "logits": shown, "more": [shown.argmax(-1), (shown[:, 1:],)], "name": "x"}
    got = with_whole_sequences(given)
    assert torch.equal(got["logits"], whole)
    assert torch.equal(got["more"][0], whole.argmax(-1))
    assert torch.equal(got["more"][1][0], whole[:, 1:])
    assert got["loss"] is given["loss"]
    assert got["logits"].requires_grad
    trained = with_whole_sequences(given, training=True)
    assert not trained["logits"].requires_grad
    assert with_whole_sequences(trained) is trained
    assert all(type(one) is Tensor for one in (got["logits"], *got["more"][1], trained["logits"]))


def test_what_steps_return_is_whole_and_in_its_order(ranks: RankPool) -> None:
    ranks(2, outputs)


def gradients(rank: int) -> None:
    whole, weight = numbers(B, S, V), numbers(B, S, V, seed=1)
    local, shown, over = shown_of(whole, graph=True)
    seen: list[Any] = []
    assert (shown.requires_grad, shown.is_leaf) == (True, False)
    loss = (shown * weight).mean()
    (asked,) = torch.autograd.grad(loss, shown, retain_graph=True)
    shown.retain_grad()
    shown.register_hook(seen.append)
    loss.backward()
    for gradient in (asked, shown.grad, seen[-1]):
        torch.testing.assert_close(gradient.whole(), weight / weight.numel())
    torch.testing.assert_close(local.grad, over.part(weight, 1) / weight.numel() * 2)
    # Weights that meet the shown outside of doors get plain gradients of the whole, the same on all ranks.
    scale, bias, matrix = numbers(B, S, 1, seed=2), numbers(V, seed=3), numbers(3, V, seed=4)
    given = [x.requires_grad_() for x in (scale, bias, matrix)]
    found = []
    for x in (shown.detach(), whole):
        F.linear(x * scale + bias, matrix).square().mean().backward()
        assert all(type(one.grad) is Tensor for one in given)
        found.append([one.grad for one in given])
        for one in given:
            one.grad = None
    torch.testing.assert_close(*found)
    # One tensor used in two ways, with gradients of the two kinds.
    results = []
    for graph in (shown_of(whole, graph=True)[:2], [whole.clone().requires_grad_()] * 2):
        start, x = graph
        (x.sum() + x.cumsum(1).square().sum() + (x[:, 1:] * x[:, :-1]).sum()).backward()
        results.append(start.grad)
    torch.testing.assert_close(results[0], over.part(results[1], 1) * 2)
    # Twice through the graph.
    results = []
    for graph in (shown_of(whole, graph=True)[:2], [whole.clone().requires_grad_()] * 2):
        start, x = graph
        (inner,) = torch.autograd.grad(x.logsumexp(-1).square().sum(), x, create_graph=True)
        inner.square().sum().backward()
        results.append(start.grad)
    torch.testing.assert_close(results[0], over.part(results[1], 1) * 2)


def test_gradients_go_where_autograd_is_asked_for_them(ranks: RankPool) -> None:
    ranks(2, gradients)


def doors(rank: int, length: int, balance: Balance) -> None:
    """Two doors with something between; the mean over ranks of their weights' gradients is that of one process."""
    over = sequence(length, balance)
    x, target = numbers(B, length, 3), numbers(B, length, 2, seed=1)
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    between = lambda y: torch.tanh(y * 2 + 1)  # noqa: E731

    def door(module: nn.Module, whole: Tensor, dim: int = 1) -> SequenceShard:
        return SequenceShard.wrap(module(SequenceShard.enter(whole, dim, over)), dim=dim, sequence=over)

    given = x.clone().requires_grad_()
    loss = F.mse_loss(door(second, between(door(first, given))), target)
    loss.backward()
    parameters = [*first.parameters(), *second.parameters()]
    averaged = [over.axis.sum(p.grad) / over.cut.size for p in parameters]
    for p in parameters:
        p.grad = None
    leaf = x.clone().requires_grad_()
    wanted = F.mse_loss(second(between(first(leaf))), target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(given.grad, leaf.grad)
    torch.testing.assert_close(averaged, [p.grad for p in parameters])
    # What is laid out in another way is made whole at the door.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for p in parameters:
            p.grad = None
        local = over.part(x, 1, float("nan")).requires_grad_()
        shown = SequenceShard.wrap(local, dim=1, sequence=over).roll(1, 1)
        door(first, F.pad(shown[:, 1:].transpose(0, 1), (0, 0, 0, 0, 1, 0)), 0).square().sum().backward()
    assert any("made whole" in str(one.message) for one in caught)
    with torch.no_grad():
        entered = SequenceShard.enter(SequenceShard.wrap(local, dim=1, sequence=over), 1, over)
    assert torch.equal(entered, over.part(x, 1))
    # A module may begin with an in-place operation.
    shown = SequenceShard.wrap((local * 1), dim=1, sequence=over) * 1
    torch.relu_(SequenceShard.enter(shown, 1, over)).sum().backward()


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_gradients_of_two_doors_average_to_those_of_one_process(ranks: RankPool, balance: Balance) -> None:
    ranks(2, doors, 6, balance)
    ranks(4, doors, 8 if balance == "zigzag" else 6, balance)


def compiled_and_checkpointed(rank: int) -> None:
    whole, target = numbers(B, S, V), torch.arange(B * S) % V

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x).flatten(0, 1), target)

    local, shown, _ = shown_of(whole, graph=True)
    loss_of(shown).backward()
    wanted, local.grad = local.grad, None
    torch.compile(loss_of, backend="eager")(SequenceShard.wrap(local, dim=1, sequence=sequence(S))).backward()
    torch.testing.assert_close(local.grad, wanted)
    for reentrant in (False, True):
        local.grad = None
        shown = SequenceShard.wrap(local, dim=1, sequence=sequence(S))
        checkpoint(loss_of, shown, use_reentrant=reentrant).backward()
        torch.testing.assert_close(local.grad, wanted)
    with torch.inference_mode():
        shown = SequenceShard.wrap(local.detach(), dim=1, sequence=sequence(S))
        torch.testing.assert_close(loss_of(shown), loss_of(whole))
        torch.testing.assert_close((shown @ torch.ones(V, 2).double()).sum(), (whole @ torch.ones(V, 2).double()).sum())
        torch.testing.assert_close(shown[:, 1:].mean((0, 1)), whole[:, 1:].mean((0, 1)))


def test_losses_are_compiled_and_checkpointed_as_ever(ranks: RankPool) -> None:
    ranks(2, compiled_and_checkpointed)


def random_numbers(rank: int) -> list[Any]:
    whole = numbers(B, S, V)
    _, shown, _ = shown_of(whole)
    results = []
    for x in (shown, whole):
        torch.manual_seed(3)
        noise, dropped = x + torch.randn_like(x), F.dropout(x, 0.5)
        drawn = torch.multinomial(x.softmax(-1).flatten(0, 1), 1)
        results.append([one.whole() if is_shown(one) else one for one in (noise, dropped, drawn)])
    return results


def test_random_numbers_are_those_of_one_process(ranks: RankPool) -> None:
    for shown, whole in ranks(2, random_numbers):
        torch.testing.assert_close(shown, whole)


def metrics(rank: int) -> None:
    from torchmetrics import MeanMetric, MeanSquaredError
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
    from torchmetrics.text import Perplexity

    whole = numbers(B, S, V, dtype=torch.float32)
    labels = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(5))
    labels[:, 2] = -100
    _, shown, _ = shown_of(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make, update in [
            (lambda: MulticlassAccuracy(V, average="micro", ignore_index=-100), lambda m, x: m(x.flatten(0, 1), labels.flatten())),
            (lambda: MulticlassAccuracy(V, ignore_index=-100), lambda m, x: m(x.transpose(1, 2), labels)),
            (lambda: MulticlassF1Score(V, ignore_index=-100), lambda m, x: m(x.argmax(-1), labels)),
            (lambda: Perplexity(ignore_index=-100), lambda m, x: m(x, labels)),
            (MeanMetric, lambda m, x: m(x.logsumexp(-1), (labels >= 0).float())),
            (MeanMetric, lambda m, x: m(F.cross_entropy(x.flatten(0, 1), labels.flatten()))),
            (MeanSquaredError, lambda m, x: m(x[..., 0].contiguous(), labels.float())),
        ]:  # fmt: skip
            cut, one = make(), make()
            update(cut, shown)
            update(one, whole)
            torch.testing.assert_close(cut.compute(), one.compute())
            assert all(type(state) is Tensor for state in cut.metric_state.values())
            pickle.dumps(cut.metric_state)


def test_metrics_give_the_value_of_whole_sequences(ranks: RankPool) -> None:
    ranks(2, metrics)
