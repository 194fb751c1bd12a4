"""A backward in two halves gives the gradients of a whole one, and its second half holds what it needs and no more."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_5d import ActivationCheckpointing
from lightning_5d.activation_checkpointing import Checkpointed
from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights, WeightQueue
from lightning_5d.plan import find_plan
from tests.modules import Block

Make = Callable[[], tuple[nn.Module, Tensor]]
"""A module, and an input of it."""


class Stack(nn.Module):
    """Some blocks, as a stage has them."""

    def __init__(self, blocks: int = 2, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack() -> tuple[nn.Module, Tensor]:
    return Stack(), torch.randn(2, 3, 8)


def images() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 2, stride=2, groups=2, bias=False), nn.Flatten(2)]
    return nn.Sequential(*layers, nn.Conv1d(6, 5, 3, dilation=2), nn.Linear(12, 2)), torch.randn(2, 3, 8, 8)


def hugging_face(name: str, **sizes: Any) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=11, bos_token_id=1, eos_token_id=2, **sizes)
    return getattr(transformers, f"{name}Model")(config).eval(), torch.randint(11, (2, 5))


LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[Make, int]] = {
    "linear": (lambda: (nn.Linear(4, 3), torch.randn(5, 4)), 1),
    "linear, one row": (lambda: (nn.Linear(4, 3), torch.randn(4)), 1),
    "linear, no rows": (lambda: (nn.Linear(4, 3), torch.randn(0, 2, 4)), 1),
    "linear, strided rows": (lambda: (nn.Linear(4, 3), torch.randn(2, 4, 5).mT), 1),
    "blocks": (stack, 4),
    "convolutions": (images, 4),
    "Llama": (partial(hugging_face, "Llama", **LLAMA), 14),
    "GPT-2": (partial(hugging_face, "GPT2", n_embd=16, n_layer=2, n_head=2, n_positions=8), 8),
    "Mixtral": (partial(hugging_face, "Mixtral", **LLAMA, num_local_experts=2), 8),
}


def made(make: Make, seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    module, x = make()
    return module, x.requires_grad_() if x.is_floating_point() else x


def output(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    return out if isinstance(out, Tensor) else out.last_hidden_state


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def whole(
    module: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = output
) -> dict[str, Tensor | None]:
    """All gradients of an ordinary backward, that of the input among them."""
    module.zero_grad()
    x.grad = None
    y = run(module, x)
    y.backward(torch.ones_like(y).cumsum(-1) if y.numel() else y.detach())
    return {**gradients(module), "input": x.grad}


def first_half(
    module: nn.Module, x: Tensor, deferred: DeferredWeights, run: Callable[[nn.Module, Tensor], Tensor] = output
) -> WeightQueue:
    module.zero_grad()
    x.grad = None
    y = run(module, x)
    with deferred.collecting() as queue:
        y.backward(torch.ones_like(y).cumsum(-1) if y.numel() else y.detach())
    return queue


def halves(
    module: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = output, queued: int | None = None
) -> dict[str, Tensor | None]:
    """All gradients of both halves; the module is as before afterwards."""
    deferred = DeferredWeights([module])
    queue = first_half(module, x, deferred, run)
    if queued is not None:
        assert len(queue) == queued
    queue.run()
    deferred.close()
    return {**gradients(module), "input": x.grad}


def equal(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None], **tolerance: float) -> None:
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        got = ours[name]
        if expected is None:
            assert got is None, name
            continue
        assert got is not None, name
        assert got.dtype == expected.dtype, name
        torch.testing.assert_close(
            got, expected, **(tolerance or {"rtol": 1e-6, "atol": 1e-6}), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_both_halves_give_the_gradients_of_a_whole_backward(name: str) -> None:
    make, queued = MODELS[name]
    module, x = made(make)
    equal(halves(module, x, queued=queued), whole(module, x))


@pytest.mark.parametrize("name", ["blocks", "convolutions", "GPT-2"])
def test_the_first_half_has_every_gradient_but_those_of_the_layers(name: str) -> None:
    module, x = made(MODELS[name][0])
    deferred = DeferredWeights([module])
    queue = first_half(module, x, deferred)
    late = {id(p) for layer in deferred.layers for p in layer.parameters()}
    for parameter in module.parameters():
        assert (parameter.grad is None) == (id(parameter) in late)
    queue.run()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert len(queue) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtype_and_the_bits_of_a_whole_backward(dtype: torch.dtype) -> None:
    module, x = made(stack)
    module, x = module.to(dtype), x.detach().to(dtype).requires_grad_()
    equal(halves(module, x, queued=4), whole(module, x), rtol=0.0, atol=0.0)


def test_two_stages_and_four_microbatches_in_any_order() -> None:
    stages = [made(stack, seed)[0] for seed in (0, 1)]
    inputs = [torch.randn(2, 3, 8) for _ in range(4)]
    for x in inputs:
        stages[1](stages[0](x)).square().sum().backward()
    expected = [gradients(stage) for stage in stages]
    for stage in stages:
        stage.zero_grad()
    deferred = DeferredWeights(stages)
    queues, boundaries = {}, {}

    def forward(i: int) -> None:
        sent = stages[0](inputs[i])
        received = sent.detach().requires_grad_()
        boundaries[i] = sent, received, stages[1](received).square().sum()

    def backward(stage: int, i: int) -> None:
        sent, received, loss = boundaries[i]
        with deferred.collecting() as queues[stage, i]:
            torch.autograd.backward(*((loss,) if stage == 1 else (sent, received.grad)))

    forward(0), forward(1), backward(1, 1), backward(1, 0), forward(2)
    queues[1, 0].run(), backward(0, 0), backward(1, 2), backward(0, 2), queues[0, 2].run(), queues[1, 1].run()
    forward(3), backward(0, 1), backward(1, 3), queues[0, 0].run(), backward(0, 3), queues[0, 3].run()
    queues[1, 3].run(), queues[1, 2].run(), queues[0, 1].run()
    for stage, gradient in zip(stages, expected, strict=True):
        equal(gradients(stage), gradient, rtol=1e-5, atol=1e-5)


def test_outside_of_collecting_a_backward_is_an_ordinary_one() -> None:
    module, x = made(stack)
    expected = whole(module, x)
    DeferredWeights([module])
    equal(whole(module, x), expected, rtol=0.0, atol=0.0)


def test_an_input_without_gradient_leaves_everything_to_the_second_half() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(5, 4)
    equal(halves(module, x, queued=2), whole(module, x))


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_weights_get_no_gradient(frozen: str) -> None:
    module, x = made(lambda: (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4)))
    for name, parameter in module[1].named_parameters():
        parameter.requires_grad_(frozen not in (name, "both"))
    equal(halves(module, x, queued=2 if frozen == "bias" else 1), whole(module, x))


def test_a_layer_called_twice_gets_both_gradients() -> None:
    module, x = made(lambda: (nn.Linear(4, 4), torch.randn(5, 4)))
    run = lambda module, x: module(module(x).tanh())  # noqa: E731
    equal(halves(module, x, run, queued=2), whole(module, x, run))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_head_tied_to_an_embedding_gets_both_gradients(sparse: bool) -> None:
    embedding, head = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    module, ids = nn.Sequential(embedding, head), torch.tensor([[0, 3, 3]])
    equal(halves(module, ids, queued=1), whole(module, ids))


def test_a_gradient_that_may_have_another_dtype_is_cast_as_autograd_does() -> None:
    module, x = made(lambda: (nn.Linear(4, 3).bfloat16(), torch.randn(5, 4).bfloat16()))
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    ours = halves(module, x)
    assert ours["weight"].dtype == torch.float32  # type: ignore[union-attr]
    equal(ours, whole(module, x))


def test_halves_are_added_to_an_fp32_gradient_of_a_bf16_weight() -> None:
    module, x = made(lambda: (nn.Linear(4, 3).bfloat16(), torch.randn(5, 4).bfloat16()))
    expected = whole(module, x)
    deferred = DeferredWeights([module])
    queue = first_half(module, x, deferred)
    for parameter in module.parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    queue.run()
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, expected[name].float() + 1 / 3)


# Hooks


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_hooks_on_its_gradient_has_it_in_the_first_half(kind: str) -> None:
    module, x = made(stack)
    calls: list[Tensor] = []

    def hook(given: Tensor) -> None:
        gradient = given if kind == "register_hook" else given.grad
        calls.append(gradient.clone())
        gradient.mul_(2)

    getattr(module.blocks[0].up.weight, kind)(hook)
    expected = whole(module, x)
    deferred = DeferredWeights([module])
    queue = first_half(module, x, deferred)
    assert module.blocks[0].up.weight.grad is not None
    assert module.blocks[0].up.bias.grad is None
    queue.run()
    equal({**gradients(module), "input": x.grad}, expected)
    assert len(calls) == 2
    assert torch.equal(*calls)


def test_hooks_of_an_axis_learn_of_the_gradient_in_the_second_half() -> None:
    module, x = made(stack)
    expected = whole(module, x)
    seen: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():

        def hook(p: Tensor, name: str = name) -> None:
            if p.grad is not None:
                assert name not in seen
                seen[name] = p.grad.clone()

        hook.__module__ = "lightning_5d.data_parallel.reducer"
        parameter.register_post_accumulate_grad_hook(hook)
    queue = first_half(module, x, DeferredWeights([module]))
    assert sorted(seen) == sorted(name for name in gradients(module) if "norm" in name)
    assert len(queue) == 4
    queue.run()
    equal({name: seen[name] for name in gradients(module)}, gradients(module), rtol=0.0, atol=0.0)
    equal({**gradients(module), "input": x.grad}, expected)


def test_hooks_of_layers_run_as_ever() -> None:
    module, x = made(stack)
    calls: list[str] = []
    up = module.blocks[0].up
    up.register_forward_hook(lambda *_: calls.append("forward"))
    up.register_full_backward_hook(lambda *_: calls.append("backward"))
    equal(halves(module, x, queued=4), whole(module, x))
    assert calls == ["forward", "backward"] * 2


# Where the ordinary backward stays


def test_a_compiled_region_has_its_gradients_in_the_first_half() -> None:
    module, x = made(stack)
    expected = whole(module, x)
    deferred = DeferredWeights([module])
    module.blocks[0].compile(backend="aot_eager", fullgraph=True)
    queue = first_half(module, x, deferred)
    assert len(queue) == 2
    assert module.blocks[0].up.weight.grad is not None
    queue.run()
    equal({**gradients(module), "input": x.grad}, expected)


@pytest.mark.parametrize(("dtype", "queued"), [(torch.float32, 0), (torch.bfloat16, 4)])
def test_autocast_puts_off_what_it_does_not_cast(dtype: torch.dtype, queued: int) -> None:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in module.blocks:
                x = x + block.down(F.gelu(block.up(block.norm(x).to(dtype))))
            return x

    module, x = made(stack)
    module, x = module.to(dtype), x.detach().to(dtype).requires_grad_()
    equal(halves(module, x, run, queued=queued), whole(module, x, run), rtol=0.0, atol=0.0)


def test_gradients_of_gradients() -> None:
    module, x = made(stack)

    def penalty() -> Tensor:
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    penalty().backward()
    expected = {**gradients(module), "input": x.grad}
    module.zero_grad()
    x.grad = None
    deferred = DeferredWeights([module])
    with deferred.collecting() as queue:
        loss = penalty()
        assert len(queue) == 0
        loss.backward()
    queue.run()
    equal({**gradients(module), "input": x.grad}, expected, rtol=1e-5, atol=1e-5)


def test_functional_transforms_and_functional_calls() -> None:
    module, x = made(stack)
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, x).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    of_input = torch.func.grad(lambda x: module(x).square().sum())
    expected_of_input = of_input(x.detach())
    forward_mode = torch.func.jvp(module, (x.detach(),), (torch.ones_like(x),))[1]
    deferred = DeferredWeights([module])
    with deferred.collecting() as queue:
        equal(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x), expected, rtol=0.0, atol=0.0)
        assert torch.equal(of_input(x.detach()), expected_of_input)
        assert torch.equal(torch.func.jvp(module, (x.detach(),), (torch.ones_like(x),))[1], forward_mode)
    assert len(queue) == 0


def test_a_parametrized_weight_has_its_gradient_in_the_first_half() -> None:
    module, x = made(lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(5, 4)))
    equal(halves(module, x, queued=0), whole(module, x))


def test_layers_with_another_forward_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Named(nn.Linear):
        pass

    patched = nn.Linear(4, 4)
    patched.forward = lambda x: 3 * x  # type: ignore[method-assign]
    module = nn.Sequential(Scaled(4, 4), Named(4, 4), patched, nn.Conv2d(4, 4, 3, padding="same"))
    assert DeferredWeights([module]).layers == [module[1]]
    assert torch.equal(patched(torch.ones(4)), torch.full((4,), 3.0))


# Checkpointing


@pytest.mark.parametrize(
    "options",
    [
        ActivationCheckpointing(),
        ActivationCheckpointing("selective"),
        ActivationCheckpointing(memory_budget=0.5),
        ActivationCheckpointing(modules=("*.up",)),
    ],
    ids=["full", "selective", "budget", "single layers"],
)
@pytest.mark.parametrize("deferred_first", [True, False])
def test_activation_checkpointing_fills_the_queue_when_it_runs_blocks_again(
    options: ActivationCheckpointing, deferred_first: bool
) -> None:
    module, x = made(lambda: (Stack(dropout=0.3), torch.randn(2, 3, 8)))
    seeded = lambda module, x: (torch.manual_seed(3), module(x))[1]  # noqa: E731
    expected = whole(module, x, seeded)
    if deferred_first:
        deferred = DeferredWeights([module])
    Checkpointed(module, options, find_plan(module))
    if not deferred_first:
        deferred = DeferredWeights([module])
    queue = first_half(module, x, deferred, seeded)
    assert len(queue) == (2 if options.modules and not deferred_first else 4)
    queue.run()
    equal({**gradients(module), "input": x.grad}, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_checkpoint_fills_the_queue(use_reentrant: bool) -> None:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        for block in module.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    module, x = made(stack)
    equal(halves(module, x, run, queued=4), whole(module, x, output))


# What is held


def test_forward_saves_what_autograd_saves() -> None:
    def saved(module: nn.Module, x: Tensor) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = module(x)
        total = sum(storages.values())
        del y
        return total

    for name in ("blocks", "convolutions"):
        module, x = made(MODELS[name][0])
        expected = saved(module, x)
        DeferredWeights([module])
        assert saved(module, x) == expected


def test_the_second_half_holds_inputs_and_output_gradients_only_and_lets_go_of_them_as_it_runs() -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(tensor: Tensor) -> Tensor:
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in module:
        layer.register_forward_hook(lambda *call: alive.append(weakref.ref(call[-1].untyped_storage())))
    deferred = DeferredWeights([module])
    x = torch.randn(3, 4)
    y = module(watched(x)).exp()
    watched(y)
    with deferred.collecting() as queue:
        y.sum().backward()
    del x, y
    gc.collect()
    # The input, the first output, which is the second layer's input; not the second, which `exp` does not keep, nor its own.
    assert [ref() is not None for ref in alive] == [True, True, False, False]
    entry = queue._entries.popleft()  # the last layer's comes first
    entry.run()
    del entry
    assert [ref() is not None for ref in alive] == [True, False, False, False]
    queue.run()
    assert [ref() is not None for ref in alive] == [False, False, False, False]


def test_a_weight_changed_before_the_first_half_is_an_error_as_it_is_for_autograd() -> None:
    module, x = made(lambda: (nn.Linear(4, 3), torch.randn(5, 4)))
    deferred = DeferredWeights([module])
    y = module(x)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), deferred.collecting():
        y.sum().backward()
    assert deferred.queue is None


def test_a_weight_may_change_between_the_halves_and_an_input_may_not() -> None:
    module, x = made(stack)
    expected = whole(module, x)
    deferred = DeferredWeights([module])
    queue = first_half(module, x, deferred)
    with torch.no_grad():
        module.blocks[0].up.weight.mul_(2)
    queue.run()
    equal({**gradients(module), "input": x.grad}, expected)
    module, x = made(lambda: (nn.Linear(4, 3), torch.randn(5, 4)))
    queue = first_half(module, x, DeferredWeights([module]))
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match=r"input of a layer \(5 x 4\).*written to in place between the two halves"):
        queue.run()


# The modules


def test_close_gives_the_forwards_back() -> None:
    module, x = made(stack)
    deferred = DeferredWeights([module, module.blocks[0]])
    assert len(deferred.layers) == len(set(deferred.layers)) == 4
    queue = first_half(module, x, deferred)
    deferred.close()
    assert not any("forward" in layer.__dict__ for layer in module.modules())
    queue.run()
    ours = {**gradients(module), "input": x.grad}
    equal(ours, whole(module, x))


def test_copies_have_an_ordinary_backward() -> None:
    module, x = made(stack)
    expected = whole(module, x)
    module.zero_grad()
    deferred = DeferredWeights([module])
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.blocks[0].up.forward.module is twin.blocks[0].up
        with deferred.collecting() as queue:
            equal(whole(twin, x), expected, rtol=0.0, atol=0.0)
        assert len(queue) == 0
        assert all(p.grad is None for p in module.parameters())


def test_state_and_names_stay(tmp_path: Any) -> None:
    module, _ = made(stack)
    before: Sequence[str] = list(module.state_dict()), repr(module), [type(m) for m in module.modules()]
    DeferredWeights([module])
    assert (list(module.state_dict()), repr(module), [type(m) for m in module.modules()]) == before
