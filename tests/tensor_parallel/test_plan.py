import lightning as L
import pytest
from torch import nn

from lightning_5d import ParallelPlan
from lightning_5d.models import Decoder, DecoderConfig
from lightning_5d.plan import find_plan, find_styles
from lightning_5d.tensor_parallel.styles import STYLES, read_style
from tests.tensor_parallel.models import ENCODER_PLAN, Encoder, Holder, hugging_face

LLAMA = {
    "lm_head": "colwise_gather_output",
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def under(prefix, styles):
    return {prefix + pattern: style for pattern, style in styles.items()}


def test_a_hugging_face_model_brings_its_styles_wherever_it_is_held():
    class Deep(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.system = nn.ModuleDict({"student": Holder(hugging_face("Llama"))})

    plan = find_plan(Deep())
    assert plan.tensor == under("system.student.net.", LLAMA)
    assert plan.tensor_source == "LlamaForCausalLM._tp_plan"
    assert plan.source == "automatic"
    assert plan.blocks == tuple(f"system.student.net.model.layers.{i}" for i in range(2))


def test_the_plans_of_class_and_config_do_where_a_model_has_not_merged_them():
    model = hugging_face("Llama")
    for inner in model.modules():
        inner.__dict__.pop("_tp_plan", None)
    assert find_plan(Holder(model)).tensor == under("net.", {k: v for k, v in LLAMA.items() if "embed" not in k})


def test_patterns_for_layers_that_a_size_of_the_model_has_not_are_left_out():
    tensor = find_plan(Holder(hugging_face("Mixtral"))).tensor
    assert tensor["net.model.layers.*.mlp.experts"] == "moe_tp_experts"
    assert not any("gate_proj" in pattern for pattern in tensor)


def test_a_wrapper_that_answers_for_what_it_holds_is_looked_through():
    class Wrapper(nn.Module):
        """As PEFT's, and compiled modules, are."""

        def __init__(self, base):
            super().__init__()
            self.base = base

        def __getattr__(self, name):
            return super().__getattr__(name) if name == "base" else getattr(self.base, name)

    for model in (Decoder(DecoderConfig.preset("tiny")), hugging_face("Llama")):
        tensor = find_plan(Holder(Wrapper(model))).tensor
        assert tensor
        assert all(pattern.startswith("net.base.") for pattern in tensor)


def test_styles_come_from_the_argument_then_the_module_then_the_model():
    class Own(Holder):
        def parallel_plan(self):
            return ParallelPlan(tensor={"net.model.layers.*.mlp.up_proj": "colwise"})

    model = hugging_face("Llama")
    given = ParallelPlan(tensor={"net.lm_head": "vocabulary"})
    assert find_plan(Own(model), given).tensor == given.tensor
    assert find_plan(Own(model)).tensor == {"net.model.layers.*.mlp.up_proj": "colwise"}
    assert find_plan(Own(model)).tensor_source == "Own.parallel_plan"
    assert find_plan(Own(model)).source == "automatic"
    assert find_styles(Holder(model)) == under("net.", LLAMA)


def test_blocks_given_alone_leave_the_models_styles_and_styles_given_alone_its_blocks():
    class Model(Encoder):
        parallel_plan = ParallelPlan(("blocks.*",), tensor=ENCODER_PLAN)

    holder = Holder(Model())
    blocks_given = find_plan(holder, ParallelPlan(("net.blocks.1",)))
    assert blocks_given.blocks == ("net.blocks.1",)
    assert blocks_given.tensor == under("net.", ENCODER_PLAN)
    styles_given = find_plan(holder, ParallelPlan(tensor={"net.head": "vocabulary"}))
    assert styles_given.blocks == ("net.blocks.*",)
    assert styles_given.source == "Model.parallel_plan"


def test_two_models_in_one_module_both_bring_their_styles():
    both = nn.ModuleDict({"teacher": Decoder(DecoderConfig.preset("tiny")), "student": Encoder()})
    both["student"].parallel_plan = ENCODER_PLAN
    tensor = find_plan(both).tensor
    assert tensor["teacher.lm_head"] == "vocabulary"
    assert tensor["student.blocks.*.mlp.down"] == "rowwise"


def test_a_plan_of_another_type_is_refused_by_name():
    class Wrong(Encoder):
        parallel_plan = ("blocks.*",)

    with pytest.raises(TypeError, match=r"Wrong\.parallel_plan is a tuple"):
        find_plan(Holder(Wrong()))


@pytest.mark.parametrize("word", ["packed_colwise:3", "packed_rowwise:2", "fused_qkv:8,2", "fused_qkv:4", *STYLES])
def test_style_words_are_read(word):
    assert read_style(word) is not None


@pytest.mark.parametrize(
    "word", ["colwise:", "colwise:2", "packed_colwise:0", "fused_qkv:a", "fused_qkv:1,2,3", "Colwise", None]
)
def test_other_words_are_not(word):
    assert read_style(word) is None


def test_numbers_in_a_style_are_parts_and_heads():
    assert read_style("packed_colwise:3").packed == 3
    assert read_style("fused_qkv:8,2").heads == (8, 2)
    assert read_style("fused_qkv:8").heads == (8, 8)


def test_what_looks_like_a_hugging_face_model_is_read_like_one():
    class Config:
        base_model_tp_plan = {"blocks.*.mlp.down": "rowwise", "blocks.*.mlp.experts": "moe_tp_experts"}

    class Headed(nn.Module):
        base_model_prefix = "encoder"
        _tp_plan = {"encoder.head": "colwise_gather_output"}

        def __init__(self):
            super().__init__()
            self.config, self.encoder = Config(), Encoder()

    plan = find_plan(Holder(Headed()))
    assert plan.tensor == {"net.encoder.blocks.*.mlp.down": "rowwise", "net.encoder.head": "colwise_gather_output"}
