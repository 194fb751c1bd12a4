import re
from dataclasses import replace

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from lightning_5d import ParallelPlan
from lightning_5d.models import Decoder, DecoderConfig
from lightning_5d.plan import find_plan, find_styles
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.plan import layout_of
from tests.tensor_parallel.models import ENCODER_PLAN, Attention, Encoder, GatedMLP, Holder, LoRA, hugging_face


def problems(module: nn.Module, size: int = 2, plan: dict | None = None, *, sequence: bool = False) -> list[str]:
    given = None if plan is None else ParallelPlan(tensor=plan)
    layout, found = layout_of(module, find_plan(module, given), size, sequence)
    assert bool(found) == (layout == TensorLayout())
    return [str(problem) for problem in found]


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def without(*patterns: str, **styles: str) -> dict[str, str]:
    return {
        pattern: style for pattern, style in ENCODER_PLAN.items() if pattern.rpartition(".")[2] not in patterns
    } | styles


def test_a_degree_that_does_not_divide_the_heads_names_those_that_do():
    text = only(problems(Holder(hugging_face("Llama")), 3))
    assert "tp=3 does not divide the heads of net.model.layers.*.self_attn (4 query heads, 2 key/value heads)" in text
    assert text.endswith("Degrees that work for the whole model: 1, 2, 4 (with each key/value head on 2 ranks).")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "works"),
    [
        (6, 3, "1, 3, 6 (with each key/value head on 2 ranks)"),
        (12, 12, "1, 2, 3, 4, 6, 12"),
        (12, 2, "1, 2, 4 (with each key/value head on 2 ranks), 6 (with each key/value head on 3 ranks), 12 (with each key/value head on 6 ranks)"),
    ],
)  # fmt: skip
def test_query_heads_stay_whole_and_key_value_heads_are_shared_evenly(heads, kv_heads, works):
    module = Encoder(lambda: Attention(24, heads, kv_heads), lambda: GatedMLP(24, 24), width=24)
    text = only(problems(module, 5, ENCODER_PLAN))
    assert text.endswith(f"Degrees that work for the whole model: {works}.")
    for degree in re.findall(r"(\d+)(?:,| \(|$)", works):
        assert not problems(module, int(degree), ENCODER_PLAN)


def test_heads_and_features_that_clash_are_one_problem_with_degrees_for_both():
    module = Encoder(lambda: Attention(16, 4, 4), lambda: GatedMLP(16, 10))
    text = only(problems(module, 4, ENCODER_PLAN))
    assert "the 10 features of blocks.*.mlp" in text
    assert "heads" not in text.partition("Degrees")[0]
    assert text.endswith("whole model: 1, 2.")


def test_heads_in_a_fused_weight_are_not_shared():
    module = Encoder(lambda: Attention(16, 4, 2, fused=True))
    plan = without("q", "k", "v") | {"blocks.*.attention.qkv": "fused_qkv"}
    assert only(problems(module, 4, plan)).endswith("whole model: 1, 2.")
    found = problems(module, 2, plan | {"blocks.*.attention.qkv": "fused_qkv:6,2"})
    assert "blocks.*.attention.qkv is 32 wide, which 6 query heads, 2 key/value heads do not make" in found[0]
    assert "blocks.*.attention.out is 16 wide" in found[1]


def test_a_pattern_that_matches_nothing_says_what_is_near():
    text = only(
        problems(Encoder(), 2, without("down") | {"blocks.*.mlp.down": "rowwise", "blocks.*.mlp.dwn": "rowwise"})
    )
    assert "'blocks.*.mlp.dwn', which matches no module" in text
    assert "'blocks.*.mlp.down'" in text


def test_everything_wrong_is_found_at_once():
    plan = without("down") | {"blocks.*.mlp.down": "rowwize", "blocks.*.norm": "colwise", "nope": "colwise"}
    found = problems(Encoder(), 3, plan)
    for text in (
        "'rowwize', which is unknown. Did you mean 'rowwise'?",
        "blocks.*.norm 'colwise', but that is a LayerNorm",
        "'nope', which matches no module",
        "tp=3 does not divide",
        "cuts the outputs of blocks.*.mlp.gate_up ('colwise'), but no layer behind it",
    ):
        assert sum(text in problem for problem in found) == 1, text
    assert len(found) == 5


def test_column_layers_without_a_row_layer_and_the_reverse_are_named():
    text = only(problems(Encoder(), 2, without("out")))
    assert "blocks.*.attention.q, blocks.*.attention.k, blocks.*.attention.v ('colwise')" in text
    text = only(problems(Encoder(), 2, without("q", "k", "v")))
    assert "the inputs of blocks.*.attention.out ('rowwise'), but no layer before it" in text
    assert "rowwise_split_input" in text


def test_a_row_layer_of_another_width_is_no_partner():
    class Wide(GatedMLP):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(40, 16)

    plan = without("down") | {"blocks.*.mlp.other": "rowwise"}
    found = problems(Encoder(mlp=Wide), 2, plan)
    assert any("blocks.*.mlp.gate_up ('colwise')" in text for text in found)
    assert any("blocks.*.mlp.other ('rowwise')" in text for text in found)


def test_two_styles_for_one_module_name_both_patterns():
    text = only(problems(Encoder(), 2, {**ENCODER_PLAN, "blocks.*.mlp.d*": "replicate"}))
    assert "'blocks.*.mlp.down' as 'rowwise' and by 'blocks.*.mlp.d*' as 'replicate'" in text


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(16, 24, 1), nn.Conv1d(24, 16, 1)


class Conv1D(nn.Module):
    """As GPT-2's."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.weight = nf, nn.Parameter(nn.Linear(nf, nx).weight.detach())


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(24, 16), Conv1D(16, 24)


@pytest.mark.parametrize(
    ("kind", "why"), [(Convolution, "is a convolution"), (Transposed, "is a Conv1D, whose weight lies the other way")]
)
def test_layers_of_the_wrong_type_are_named(kind, why):
    plan = without("gate_up", "down") | {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    found = problems(Encoder(mlp=kind), 2, plan)
    assert len(found) == 2
    assert all(why in text for text in found)


def test_torchs_attention_is_refused_with_its_reason():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(16, 4)

    plan = without("q", "k", "v", "out") | {
        "blocks.*.attention.mha": "colwise",
        "blocks.*.attention.mha.out_proj": "rowwise",
    }
    found = problems(Encoder(Packed), 2, plan)
    assert any("one packed weight" in text for text in found)
    assert any("out_proj 'rowwise', but that belongs to an nn.MultiheadAttention" in text for text in found)


def test_layers_whose_weight_is_computed_are_refused():
    module = Encoder()
    for block in module.blocks:
        parametrizations.weight_norm(block.mlp.down)
        nn.utils.weight_norm(block.mlp.gate_up)
    found = problems(module, 2, ENCODER_PLAN)
    assert any("mlp.down 'rowwise', but that has a parametrization" in text for text in found)
    assert any("mlp.gate_up 'packed_colwise', but that has no parameter `weight`" in text for text in found)
    assert len(found) == 2


def test_a_tied_weight_that_is_cut_under_one_name_only_is_refused():
    text = only(problems(Encoder(tied=True), 2, {**ENCODER_PLAN, "embed": "replicate"}))
    assert "embed.weight replicated" in text
    assert "head.weight head" in text
    module = Encoder()
    module.blocks[1].mlp.down.weight = module.blocks[0].mlp.down.weight
    plan = {pattern.replace("blocks.*.mlp", "blocks.0.mlp"): style for pattern, style in ENCODER_PLAN.items()}
    assert "One weight has several names" in only(problems(module, 2, plan))


def test_a_model_without_a_plan_is_told_how_to_give_one():
    text = only(problems(Encoder()))
    assert "Encoder has no plan for the tensor axis" in text
    assert "'blocks.*.mlp.gate_up'" in text
    assert "packed_colwise[:PARTS]" in text


def test_blocks_that_are_not_there_are_a_problem_too():
    module = Encoder()
    _, (problem,) = layout_of(module, find_plan(module, ParallelPlan(("layers.*",), tensor=ENCODER_PLAN)), 2)
    assert "names blocks that the module does not have: layers.*" in str(problem)


def test_an_attention_of_unknown_heads_is_not_guessed():
    class Silent(Attention):
        def __init__(self):
            super().__init__()
            self.counts = (
                self.__dict__.pop("num_heads"),
                self.__dict__.pop("num_kv_heads"),
                self.__dict__.pop("head_dim"),
            )

    text = only(problems(Encoder(Silent), 2, ENCODER_PLAN))
    assert "The attention blocks.*.attention does not say how many heads its 16 queries make" in text


def test_halves_in_one_weight_that_nothing_says_are_halves_are_asked_about():
    text = only(problems(Encoder(), 2, {**ENCODER_PLAN, "blocks.*.mlp.gate_up": "colwise"}))
    assert "its 48 outputs are twice the 24 inputs of blocks.*.mlp.down" in text
    assert "'packed_colwise'" in text


def test_a_norm_over_all_queries_needs_them_gathered():
    class Normed(Attention):
        def __init__(self):
            super().__init__()
            self.q_norm, self.k_norm = nn.RMSNorm(16), nn.RMSNorm(16)

    found = problems(Encoder(Normed), 2, ENCODER_PLAN)
    assert len(found) == 2
    assert "blocks.*.attention.q_norm normalises over all 16 queries or keys" in found[0]
    assert "colwise_gather_output" in found[0]


def test_an_adapters_bias_behind_a_row_layer_would_be_added_by_every_rank():
    module = Encoder()
    for block in module.blocks:
        block.mlp.down = LoRA(block.mlp.down)
        block.mlp.down.lora_B["default"] = nn.Linear(2, 16)
    assert "blocks.*.mlp.down.lora_B.default.bias acts on outputs that are still summands" in only(
        problems(module, 2, ENCODER_PLAN)
    )


def test_an_adapter_around_the_head_is_refused_until_the_plan_leaves_it_whole():
    module = Holder(hugging_face("Llama"))
    module.net.lm_head = LoRA(module.net.lm_head)
    plan = find_plan(module)
    _, found = layout_of(module, plan, 2, True)
    assert "net.lm_head is a module around the linear layer that makes the logits" in only([str(p) for p in found])
    own = {**find_styles(module), "net.lm_head": "replicate", "net.model.embed_tokens": "replicate"}
    layout, found = layout_of(module, replace(plan, tensor=own), 2, True)
    assert (found, layout.heads, layout.embeddings) == ([], (), ())


def test_a_module_of_layers_is_no_adapter():
    text = only(problems(Encoder(), 2, {**ENCODER_PLAN, "blocks.*.attention.q": "colwise", "blocks.*.mlp": "colwise"}))
    assert "blocks.*.mlp 'colwise', but that is a GatedMLP whose down" in text


def test_the_sequence_needs_one_list_of_blocks():
    module = Decoder(DecoderConfig.preset("tiny", num_layers=1))
    assert "Decoder has no list of blocks of one class" in only(problems(module, 2, sequence=True))
    both = nn.ModuleDict({"encoder": Encoder(), "decoder": Encoder()})
    plan = {f"{part}.{pattern}": style for part in both for pattern, style in ENCODER_PLAN.items()}
    assert not problems(both, 2, plan)
    text = only(problems(both, 2, plan, sequence=True))
    assert "2 lists of blocks are cut: encoder.blocks, decoder.blocks" in text


def test_experts_that_are_modules_get_no_sequence():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(GatedMLP() for _ in range(2))

    plan = without("gate_up", "down") | {
        "blocks.*.mlp.experts.*.gate_up": "packed_colwise",
        "blocks.*.mlp.experts.*.down": "rowwise",
    }
    assert not problems(Encoder(mlp=Experts), 2, plan)
    assert "blocks.*.mlp.experts.* is one of several experts" in only(
        problems(Encoder(mlp=Experts), 2, plan, sequence=True)
    )


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_look_at_other_words_are_refused(option):
    module = Encoder()
    module.embed = nn.Embedding(13, 16, **option)
    (name,) = option
    assert f"The embedding embed has {name}=" in only(problems(module, 2, ENCODER_PLAN))


@pytest.mark.parametrize("style", ["all_reduce", "embedding_colwise"])
def test_styles_that_are_not_done_here_are_refused(style):
    assert f"'head' the style {style!r}, which is not supported" in problems(Encoder(), 2, {"head": style})[0]
