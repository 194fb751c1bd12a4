"""What the first step refuses, on small modules with layouts made by hand; one process plays rank 0 of two unless ranks are named."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d import FiveD, TensorParallel, ZeRO
from lightning_5d.launch.failure import RankFailure
from lightning_5d.models import DecoderConfig, LanguageModel
from lightning_5d.models.decoder import Attention as DecoderAttention
from lightning_5d.parallelism import RunContext
from lightning_5d.pipeline_parallel.stage.run import StageBoundary
from lightning_5d.tensor_parallel.axis import CollectiveAxis
from lightning_5d.tensor_parallel.first_step import FirstStep
from lightning_5d.tensor_parallel.layout import Region, Sequence, TensorLayout
from lightning_5d.tensor_parallel.rows import Rows, even
from lightning_5d.tensor_parallel.sequence_mixing import mixes_positions, mixing_problems
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SIZES, Dealt
from tests.tensor_parallel.parity import Rows as TokenRows
from tests.trainers import quiet

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 12, 6


class Two:
    """What the guards ask of an axis before any gradient: nothing but its size."""

    rank, size = 0, 2


class Attention(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_size = WIDTH // heads
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x = x + shift
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), attention()

    def forward(self, x: Tensor) -> Tensor:
        shift = x.new_zeros(1, LENGTH, WIDTH)  # as positions, which a model makes for the whole sequence
        return x + self.attn(self.norm(x), shift)


class Model(nn.Module):
    def __init__(self, attention: type[Attention] = Attention, block: Callable[..., nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(attention) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids % 6)  # rank 0 has these
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def layout(sequence: bool = False) -> TensorLayout:
    weights: dict[str, Rows] = {"embed.weight": even(0, VOCABULARY), "head.weight": even(0, VOCABULARY)}
    regions = []
    for i in range(2):
        at = f"blocks.{i}.attn"
        weights |= {f"{at}.{name}.weight": even(0, WIDTH) for name in "qkv"} | {f"{at}.out.weight": even(1, WIDTH)}
        regions.append(Region(at, tuple(f"{at}.{name}" for name in "qkv"), (f"{at}.out",)))
    partial = (
        frozenset(f"{name}.weight" for name in ("blocks.0.norm", "blocks.1.norm", "norm")) if sequence else frozenset()
    )
    cut = Sequence(("blocks.0", "blocks.1"), "norm") if sequence else None
    return TensorLayout(tuple(regions), ("embed",), ("head",), weights=weights, partial=partial, sequence=cut)


def _with_whole_sequence(forward: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
    return forward(x.repeat(1, 2, 1), *rest)


def installed(model: nn.Module, plan: TensorLayout) -> FirstStep:
    """Guards of a model of which rank 0 of 2 then has its part; with a sequence each rank gets half of it."""
    guards = FirstStep(model, plan, Two())  # type: ignore[arg-type]
    for name, rows in plan.weights.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, attribute, nn.Parameter(rows.part(getattr(module, attribute).detach(), 0, 2)))
    if plan.sequence is not None:
        first = model.get_submodule(plan.sequence.blocks[0])
        first.register_forward_pre_hook(lambda _, args: (args[0][:, : LENGTH // 2], *args[1:]))
        for region in plan.regions:
            module = model.get_submodule(region.name)
            # As the real one: behind all hooks.
            module.__dict__["forward"] = partial(_with_whole_sequence, module.forward)
            model.get_submodule(region.rows[0]).register_forward_hook(lambda _, args, out: out[:, : LENGTH // 2])
    return guards


IDS = torch.arange(2 * LENGTH).view(2, LENGTH)


def step(guards: FirstStep, run: Callable[[], Any], kind: str = "train") -> None:
    with guards.watching(kind):
        run()


def refusal(guards: FirstStep, run: Callable[[], Any], kind: str = "train") -> str:
    with pytest.raises(MisconfigurationException) as caught:
        step(guards, run, kind)
    return str(caught.value)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_that_fits_passes_and_is_left_as_it_was(sequence: bool) -> None:
    model = Model()
    guards = installed(model, layout(sequence))
    before = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    step(guards, lambda: model(IDS))
    step(guards, lambda: model(IDS), "validate")
    assert before == {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}


def test_a_penalty_on_a_weight_that_is_cut_is_refused_by_name_and_line() -> None:
    model = Model()
    message = refusal(installed(model, layout()), lambda: model(IDS).sum() + model.head.weight.pow(2).sum())
    assert re.search(r"head\.weight is cut over the 2 ranks.*the step uses it.*pow, test_first_step\.py:\d+", message)
    assert "weight_decay" in message


class FunctionalHead(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.embed(ids % 6), self.embed.weight)


def test_an_output_layer_made_of_the_embeddings_weight_is_named_as_that() -> None:
    model = FunctionalHead()
    message = refusal(installed(model, layout()), lambda: model(IDS))
    assert "the forward of FunctionalHead uses it" in message
    assert "head.weight = embed.weight" in message


class BesideItsModule(Attention):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return F.linear(super().forward(x, shift)[..., : WIDTH // 2], self.out.weight)


@pytest.mark.parametrize("kind", ["train", "validate"])
def test_a_row_layers_weight_in_its_parents_forward_is_refused_in_every_kind_of_step(kind: str) -> None:
    model = Model(BesideItsModule)
    guards = installed(model, layout())
    with torch.set_grad_enabled(kind == "train"):
        assert "blocks.0.attn.out.weight is cut" in refusal(guards, lambda: model(IDS), kind)


def test_shapes_dtypes_and_averages_of_cut_weights_are_nobodys_fault() -> None:
    model, other = Model(), Model()
    installed(other, layout())

    def run() -> None:
        out = model(IDS)
        assert model.head.weight.dtype == out.dtype
        assert out.to(model.head.weight).shape[-1] == model.head.weight.size(0)
        model.head.weight.new_zeros(3)
        with torch.no_grad():
            for mine, others in zip(model.parameters(), other.parameters(), strict=True):
                others.lerp_(mine, 0.1)
                others.data.add_(mine.data)

    step(installed(model, layout()), run)


def test_a_norm_of_a_part_of_the_sequence_may_be_used_inside_blocks_and_not_in_the_step() -> None:
    model = Model()
    message = refusal(installed(model, layout(True)), lambda: (model(IDS), model.blocks[0].norm.weight.sum()))
    assert "blocks.0.norm.weight is used on other activations by each of the 2 ranks" in message
    model = Model()
    step(installed(model, layout(False)), lambda: (model(IDS), model.blocks[0].norm.weight.sum()))


def test_backward_inside_a_step_is_not_looked_at() -> None:
    model = Model()
    weight = model.head.weight

    class OwnProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *grad: Tensor) -> Any:
            (weight,) = ctx.saved_tensors
            return grad[0] @ weight, None

    guards = installed(model, layout())
    assert weight is not model.head.weight
    model.head.__dict__["forward"] = lambda x: OwnProduct.apply(x, model.head.weight)
    step(guards, lambda: model(IDS).sum().backward())


class GlobalCount(Attention):
    """Fails: features and heads do not fit."""

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_size).transpose(1, 2)


class HalfHeads(Attention):
    """Does not fail."""

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


class ByHand(HalfHeads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Merged(HalfHeads):
    """Three dimensions: batch and heads are one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = q.shape
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return (F.softmax(torch.bmm(q, k.mT), dim=-1) @ v).view(shape)


@pytest.mark.parametrize("sequence", [False, True])
def test_an_error_of_a_reshape_names_the_module_its_class_and_the_count(sequence: bool) -> None:
    model = Model(GlobalCount)
    with pytest.raises(MisconfigurationException) as caught:
        step(installed(model, layout(sequence)), lambda: model(IDS))
    assert re.search(r"blocks\.0\.attn \(GlobalCount\) failed in its first run.*num_heads=4", str(caught.value))
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("attention", [HalfHeads, ByHand, Merged])
def test_heads_of_half_the_size_are_noticed_though_nothing_fails(attention: type[Attention], sequence: bool) -> None:
    model = Model(attention)
    message = refusal(installed(model, layout(sequence)), lambda: model(IDS))
    assert f"blocks.0.attn ({attention.__name__}) makes" in message
    assert "num_heads=4" in message
    assert "head_size=" not in message


@pytest.mark.parametrize("attention", [HalfHeads, ByHand, Merged])
def test_the_same_attention_passes_with_its_count_set_to_the_ranks(attention: type[Attention]) -> None:
    model = Model(attention)
    guards = installed(model, layout())
    for block in model.blocks:
        block.attn.num_heads = HEADS // 2
    step(guards, lambda: model(IDS))


class Wrong(Attention):
    def heads(self, x: Tensor) -> Tensor:
        return super().heads(x) + torch.zeros(7)


def test_an_error_that_the_whole_module_has_as_well_stays_what_it_is() -> None:
    model = Model(Wrong)
    with pytest.raises(RuntimeError, match="size of tensor"):
        step(installed(model, layout()), lambda: model(IDS))


def test_an_error_elsewhere_stays_what_it_is() -> None:
    model = Model()

    def run() -> None:
        model(IDS)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step(installed(model, layout()), run)


def test_only_the_first_step_of_a_kind_that_ends_well_is_watched() -> None:
    model = Model()
    guards = installed(model, layout())
    with pytest.raises(KeyError):
        step(guards, lambda: {}["x"])
    step(guards, lambda: model(IDS))
    step(guards, lambda: model.head.weight.pow(2))
    assert "head.weight" in refusal(guards, lambda: model.head.weight.pow(2), "validate")


def test_a_stage_that_comes_to_its_end_is_watched_once() -> None:
    model = Model()
    guards = installed(model, layout())

    def stage(run: Callable[[], Any]) -> None:
        run()
        raise StageBoundary(None)

    with pytest.raises(StageBoundary):
        step(guards, lambda: stage(lambda: model(IDS)), "train 0")
    with pytest.raises(StageBoundary):
        step(guards, lambda: stage(lambda: model.head.weight.pow(2)), "train 0")
    assert "head.weight" in refusal(guards, lambda: stage(lambda: model.head.weight.pow(2)), "train 1")


class Averaging(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


class Shifting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.pad(x, (0, 0, 1, -1))


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, :1]


class Positions(Block):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__(attention)
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table


@pytest.mark.parametrize(("block", "operation"), [(Averaging, "mean"), (Shifting, "pad"), (Reading, "__getitem__")])
def test_positions_mixed_outside_of_regions_are_refused_under_sequence_parallelism(block: Any, operation: str) -> None:
    model = Model(block=block)
    message = refusal(installed(model, layout(True)), lambda: model(IDS))
    assert re.search(rf"blocks\.0 \({block.__name__}\) mixes positions \({operation}, test_first_step", message)
    model = Model(block=block)
    step(installed(model, layout(False)), lambda: model(IDS))


def test_a_block_that_needs_the_whole_sequence_is_named() -> None:
    model = Model(block=Positions)
    message = refusal(installed(model, layout(True)), lambda: model(IDS))
    assert (
        "blocks.0 (Positions) failed in its first run with sequence_parallel=True, where it gets 3 positions" in message
    )


def test_modules_known_to_mix_positions_are_problems_before_anything_runs() -> None:
    model = Model()
    model.blocks[1].add_module("conv", nn.Conv1d(WIDTH, WIDTH, 3))
    model.blocks[1].attn.add_module("conv", nn.Conv1d(WIDTH, WIDTH, 3))
    model.blocks[0].add_module("pointwise", nn.Conv1d(WIDTH, WIDTH, 1))
    assert [problem.what.partition(" ")[0] for problem in mixing_problems(model, layout(True))] == ["blocks.1.conv"]
    assert mixing_problems(model, layout(False)) == []
    model.config = SimpleNamespace(output_router_logits=True, output_hidden_states=False)
    assert "output_router_logits" in mixing_problems(model, layout(True))[0].what
    assert mixing_problems(model, layout(False)) == []
    module = LanguageModel(DecoderConfig(**SIZES), {"lr": 1e-2, "warmup_steps": 2})
    module.decoder.layers[1].add_module("conv", nn.Conv1d(16, 16, 3))
    context = RunContext(2, 1, "cpu", "32-true", {"tp": 2}, module)
    (problem,) = TensorParallel(2, sequence_parallel=True).validate(context)
    assert "decoder.layers.1.conv (Conv1d) mixes positions" in str(problem)
    assert TensorParallel(2).validate(context) == []


def test_compiled_blocks_are_left_alone_and_what_is_around_them_is_not() -> None:
    model = Model()
    for block in model.blocks:
        block.compile(backend="eager")
    guards = installed(model, layout())
    compiled = [block._compiled_call_impl for block in model.blocks]
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    assert "head.weight" in refusal(guards, lambda: (model(IDS), model.head.weight.pow(2)))
    assert compiled == [block._compiled_call_impl for block in model.blocks]
    assert 0 < frames["total"] - before < 10, "what looks at them is not traced"
    torch._dynamo.reset()


def _gradients(rank: int, what: str, dtype: torch.dtype = torch.float32) -> str | None:
    model = Model().to(dtype)
    guards = FirstStep(model, layout(what == "partial"), CollectiveAxis(dist.group.WORLD), dtype)
    with guards.watching("train"):
        model(IDS).float().logsumexp(-1).sum().backward()
    assert model.norm.weight.grad is not None
    if what == "NaN":
        model.norm.weight.grad += float("nan") if rank else 1
    elif what == "cut":
        model.head.weight.grad += rank
    elif what == "rounding":
        model.norm.weight.grad *= 1 + 1e-6 * rank
    elif what == "none":
        model.zero_grad()
    elif what != "equal":
        model.norm.weight.grad *= 1 + rank
    try:
        guards.check_gradients()
    except MisconfigurationException as error:
        return str(error)
    if what != "none":
        model.norm.weight.grad += rank
    guards.check_gradients()  # again only where there was nothing to compare
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["equal", "NaN", "cut", "partial", "rounding", "none"])
def test_gradients_that_agree_or_need_not_agree_pass(ranks: RankPool, what: str, dtype: torch.dtype) -> None:
    assert ranks(2, _gradients, what, dtype) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_ranks_have_a_summand_of_is_refused_on_all_of_them(ranks: RankPool, dtype: torch.dtype) -> None:
    one, other = ranks(2, _gradients, "summands", dtype)
    assert one == other
    assert one.startswith("After the first backward the gradient of norm.weight is not the same on the 2 ranks")


class Unasked(DecoderAttention):
    """Counts heads by numbers of its own, of names that nobody knows."""

    rows, others = 4, 4

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = ((self.q_proj, self.rows), (self.k_proj, self.others), (self.v_proj, self.others))
        q, k, v = (layer(x).view(*x.shape[:2], count, -1).transpose(1, 2) for layer, count in pairs)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Penalized(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.decoder.lm_head.weight.pow(2).sum()


def _fitted(rank: int, what: str, sequence: bool, checkpointing: str | None) -> str:
    kind = Penalized if what == "penalty" else LanguageModel
    module = kind(DecoderConfig(**{**SIZES, "num_kv_heads": 4}), {"lr": 1e-2, "warmup_steps": 2})
    if what == "heads":
        for block in module.decoder.layers:
            block.self_attn.__class__ = Unasked
    plugins = ZeRO(stage=1), TensorParallel(2, sequence_parallel=sequence)
    trainer = quiet(strategy=FiveD(*plugins, activation_checkpointing=checkpointing), devices=2)
    with pytest.raises((MisconfigurationException, RankFailure)) as caught:
        trainer.fit(module, datamodule=Dealt(TokenRows(8, 6), 4))
    return str(caught.value)


@pytest.mark.parametrize(("sequence", "checkpointing"), [(False, None), (True, "full")])
@pytest.mark.parametrize(
    ("what", "words"), [("penalty", "lm_head.weight is cut"), ("heads", "self_attn (Unasked) makes 4 heads of size 2")]
)
def test_in_a_trainer_all_ranks_end_with_the_error(
    ranks: RankPool, what: str, words: str, sequence: bool, checkpointing: str | None
) -> None:
    for message in ranks(2, _fitted, what, sequence, checkpointing, backend=None, timeout=60.0):
        assert words in message


def test_a_row_for_each_token_is_no_sequence() -> None:
    choices = torch.zeros(
        3 * 2, 2, 5
    )  # of a router: tokens x experts chosen x features, where a rank has 2 tokens of each of 3 rows
    assert not mixes_positions(torch.Tensor.sum, (choices,), {"dim": 1}, length=2, batch=3)
    assert mixes_positions(torch.Tensor.sum, (torch.zeros(3, 2, 5),), {"dim": 1}, length=2, batch=3)
