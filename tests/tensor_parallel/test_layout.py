import pytest
import torch
from torch import nn

from benchmarks.decoder import Decoder as BenchmarkDecoder
from benchmarks.decoder import Size
from lightning_5d import ParallelPlan
from lightning_5d.models import Decoder, DecoderConfig
from lightning_5d.plan import find_plan
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.plan import layout_of
from lightning_5d.tensor_parallel.report import describe_layout
from lightning_5d.tensor_parallel.rows import Rows, even
from lightning_5d.tensor_parallel.styles import STYLES
from tests.tensor_parallel.models import (
    ENCODER_PLAN,
    HUGGING_FACE,
    POST_NORM_PLAN,
    Attention,
    Encoder,
    GatedMLP,
    Holder,
    PostNormAttention,
    hugging_face,
    with_adapters,
)
from tests.tensor_parallel.simulated import simulated

BENCHMARK_PLAN = {
    "layers.*.attention.q": "colwise",
    "layers.*.attention.k": "colwise",
    "layers.*.attention.v": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.gate": "colwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "vocabulary",
}


def layout(module: nn.Module, size: int, plan: dict | None = None, *, sequence: bool = False) -> TensorLayout:
    made, problems = layout_of(module, find_plan(module, plan and ParallelPlan(tensor=plan)), size, sequence)
    assert not problems, "\n".join(map(str, problems))
    return made


def gradients(module, ids):
    module.zero_grad()
    out = module(ids)
    out = getattr(out, "logits", out)
    out.float().pow(2).mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_the_same(module, made, size, vocabulary):
    """Outputs and all gradients of the whole module, and of `size` simulated ranks with that layout."""
    ids = torch.randint(0, vocabulary, (1, 6), generator=torch.Generator().manual_seed(1))
    wanted, whole = gradients(module, ids)
    with simulated(module, made, size):
        got, parts = gradients(module, ids)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(
            parts[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_hugging_face_models_own_plan_computes_what_the_model_does(kind):
    module = Holder(hugging_face(kind)).eval()
    for size in (2, 4):
        made = layout(module, size)
        assert_the_same(module, made, size, 61)
        assert made.heads == ("net.lm_head",)
        assert len(made.embeddings) == 1
        assert made.weights["net.lm_head.weight"].stored == -(-61 // size) * size


def test_the_native_decoder_is_cut_everywhere_but_in_its_norms():
    module = Decoder(DecoderConfig.preset("tiny", vocab_size=13))
    for size in (2, 4):
        made = layout(module, size)
        assert_the_same(module, made, size, 13)
        whole = {name for name, _ in module.named_parameters()} - made.weights.keys()
        assert whole == {name for name, _ in module.named_parameters() if "norm" in name}
        assert not made.partial


def test_layers_that_hang_on_a_block_are_entered_one_by_one():
    module = BenchmarkDecoder(Size(layers=2, width=32, batch=1, heads=4, kv_heads=2, vocabulary=13, tokens=6))
    run = module.forward
    module.forward = lambda ids: run(ids, ids)
    for size in (2, 4):
        made = layout(module, size, BENCHMARK_PLAN)
        attention, mlp = made.regions[:2]
        assert (attention.name, attention.door) == ("layers.0.attention", "module")
        assert (mlp.name, mlp.door, mlp.columns, mlp.rows) == (
            "layers.0", "layers", ("layers.0.gate", "layers.0.up"), ("layers.0.down",),
        )  # fmt: skip
        assert attention.attributes == {
            ("layers.0.attention", "heads"): 4 // size,
            ("layers.0.attention", "kv_heads"): max(1, 2 // size),
        }
        assert_the_same(module, made, size, 13)


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [(4, 4, (2, 4)), (4, 2, (2,)), (8, 4, (2, 4))])
def test_queries_keys_and_values_in_one_weight_are_cut_part_by_part(heads, kv_heads, sizes):
    module = Encoder(lambda: Attention(16, heads, kv_heads, fused=True))
    plan = {**ENCODER_PLAN, "blocks.*.attention.qkv": "fused_qkv"}
    plan = {pattern: style for pattern, style in plan.items() if pattern[-2:] not in (".q", ".k", ".v")}
    for size in sizes:
        made = layout(module, size, plan)
        assert_the_same(module, made, size, 13)
    # Rank 0 of 2 has the first half of the queries, of the keys and of the values.
    width, kv = 16, 16 * kv_heads // heads
    rows = layout(module, 2, plan).weights["blocks.0.attention.qkv.weight"]
    first = [*range(width // 2), *range(width, width + kv // 2), *range(width + kv, width + kv + kv // 2)]
    assert list(rows.index[: len(first)]) == first
    assert layout(module, 2, plan).weights["blocks.0.attention.qkv.bias"] == rows


def test_key_and_value_heads_that_ranks_share_are_stored_by_each():
    module = Encoder(lambda: Attention(16, 4, 2))
    made = layout(module, 4, ENCODER_PLAN)
    rows = made.weights["blocks.0.attention.k.weight"]
    assert rows == Rows(0, 8, (*range(4), *range(4), *range(4, 8), *range(4, 8)), copies=2)
    assert made.weights["blocks.0.attention.k.bias"] == rows
    assert made.weights["blocks.0.attention.q.weight"] == even(0, 16)
    assert_the_same(module, made, 4, 13)
    single = layout(Encoder(lambda: Attention(16, 4, 1)), 2, ENCODER_PLAN)
    assert single.weights["blocks.0.attention.v.weight"] == Rows(0, 4, (0, 1, 2, 3, 0, 1, 2, 3), copies=2)


def test_a_vocabulary_that_ranks_do_not_divide_is_padded_under_all_names_of_a_tied_weight():
    made = layout(Encoder(tied=True), 4, ENCODER_PLAN)
    assert made.weights["embed.weight"] == Rows(0, 13, (*range(13), -1, -1, -1))
    assert made.weights["head.weight"] == made.weights["embed.weight"]
    assert (made.embeddings, made.heads) == (("embed",), ("head",))


@pytest.mark.parametrize("named", ["head", "embed"])
def test_embedding_and_head_are_cut_if_the_plan_names_one_of_them(named):
    plan = {pattern: style for pattern, style in ENCODER_PLAN.items() if pattern != "head"} | {named: "vocabulary"}
    made = layout(Encoder(), 2, plan)
    assert (made.embeddings, made.heads) == (("embed",), ("head",))
    kept = layout(Encoder(), 2, plan | {"head" if named == "embed" else "embed": "replicate"})
    assert len(kept.embeddings) + len(kept.heads) == 1


def test_a_residual_beside_the_row_layer_is_left_out_of_the_region():
    module = Encoder(PostNormAttention)
    made = layout(module, 2, POST_NORM_PLAN)
    region = made.regions[0]
    assert (region.name, region.door) == ("blocks.0.attention.self", "module")
    assert region.rows == ("blocks.0.attention.output.dense",)
    assert region.attributes == {
        ("blocks.0.attention.self", "num_attention_heads"): 2,
        ("blocks.0.attention.self", "all_head_size"): 8,
    }
    assert not made.partial
    assert_the_same(module, made, 2, 13)


def test_layers_of_attention_and_mlp_that_hang_on_one_block_are_two_regions():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = 4
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
            self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
            return x + self.down(self.up(x).relu())

    module = Encoder()
    module.blocks = nn.ModuleList(Flat() for _ in range(2))
    plan = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")}
    plan |= {f"blocks.*.{name}": "rowwise" for name in ("o", "down")}
    made = layout(module, 2, plan)
    assert [(r.door, len(r.columns), r.rows[0]) for r in made.regions[:2]] == [
        ("layers", 3, "blocks.0.o"),
        ("layers", 1, "blocks.0.down"),
    ]
    assert made.regions[0].attributes == {("blocks.0", "heads"): 2}
    assert_the_same(module, made, 2, 13)


def adapted(size: int = 2) -> tuple[nn.Module, TensorLayout]:
    module = with_adapters(Encoder())
    return module, layout(module, size, ENCODER_PLAN)


def test_adapters_are_cut_on_the_side_of_their_layer():
    module, made = adapted()
    q, out = "blocks.0.attention.q", "blocks.0.attention.out"
    assert made.weights[f"{q}.base_layer.weight"] == made.weights[f"{q}.lora_B.default.weight"] == even(0, 16)
    assert made.weights[f"{out}.base_layer.weight"] == made.weights[f"{out}.lora_A.default.weight"] == even(1, 16)
    gate_up = "blocks.0.mlp.gate_up"
    assert made.weights[f"{gate_up}.lora_B.default.weight"] == made.weights[f"{gate_up}.base_layer.weight"]
    assert {f"{q}.lora_A.default.weight", f"{out}.lora_B.default.weight"} <= made.partial
    assert f"{out}.base_layer.bias" not in made.weights.keys() | made.partial
    assert made.regions[0].rows == (out,)
    assert made.regions[0].columns[0] == q
    assert_the_same(module, made, 2, 13)


def test_whole_weights_inside_regions_have_partial_gradients():
    made = layout(Holder(hugging_face("Qwen3")), 2)
    layers = [f"net.model.layers.{i}.self_attn" for i in range(2)]
    assert made.partial == {f"{layer}.{norm}.weight" for layer in layers for norm in ("q_norm", "k_norm")}


def test_what_every_rank_computes_between_gathered_and_split_has_complete_gradients():
    module = Holder(hugging_face("Olmo2"))
    for sequence in (False, True):
        made = layout(module, 2, sequence=sequence)
        assert not any("q_norm" in name or "k_norm" in name for name in made.partial | made.weights.keys())
        attention = made.regions[0]
        assert set(attention.columns) <= set(made.gathered)
        assert set(attention.rows) <= set(made.split)
        assert not attention.attributes


def test_with_the_sequence_cut_all_whole_weights_of_blocks_and_the_final_norm_have_partial_gradients():
    module = Encoder()
    made = layout(module, 2, ENCODER_PLAN, sequence=True)
    assert made.sequence.blocks == ("blocks.0", "blocks.1")
    assert made.sequence.whole == "norm"
    whole = {name for name, _ in module.named_parameters() if name not in made.weights}
    assert made.partial == whole
    assert "blocks.0.attention.out.bias" in made.partial


def test_without_a_norm_that_is_surely_the_last_the_sequence_is_whole_behind_the_last_block():
    module = Encoder()
    module.pool_norm = nn.LayerNorm(16)
    module.another = nn.LayerNorm(16)
    made = layout(module, 2, ENCODER_PLAN, sequence=True)
    assert made.sequence.whole == "blocks.1"
    assert "norm.weight" not in made.partial


def test_experts_and_their_router_stay_whole():
    made = layout(Holder(hugging_face("Mixtral")), 2)
    assert not any("mlp" in name for name in made.weights)
    assert "replicated" in made.became["net.model.layers.0.mlp.experts"].what


def test_an_attention_with_norms_of_each_head_has_those_of_its_heads():
    made = layout(Holder(hugging_face("Cohere")), 4)
    norms = "net.model.layers.0.self_attn"
    assert made.weights[f"{norms}.q_norm.weight"] == even(0, 4)
    assert made.weights[f"{norms}.k_norm.weight"] == Rows(0, 2, (0, 0, 1, 1), copies=2)


def test_layouts_are_made_of_modules_without_memory_and_leave_them_as_they_are():
    with torch.device("meta"):
        module = Encoder(tied=True)
    before = {name: p.shape for name, p in module.named_parameters()}
    assert layout(module, 2, ENCODER_PLAN) == layout(Encoder(tied=True), 2, ENCODER_PLAN)
    assert {name: p.shape for name, p in module.named_parameters()} == before
    assert module.blocks[0].attention.num_heads == 4


def test_the_report_groups_layers_and_counts_weights():
    module = Encoder(tied=True)
    made = layout(module, 2, ENCODER_PLAN, sequence=True)
    lines = describe_layout(made, 2).splitlines()
    q = next(line for line in lines if line.startswith("blocks.*.attention.q "))
    assert "(2)" in q
    assert "column, 2 of 4 heads" in q
    assert "weight 8x16, bias 8" in q
    assert next(line for line in lines if line.startswith("norm")).rstrip().endswith("weight, bias")
    head = next(line for line in lines if line.startswith("head"))
    assert "7 of 13 rows (1 of padding)" in head
    assert "tied to embed.weight" in head
    local = sum(
        rows.part(module.get_parameter(n), 0, 2).numel() for n, rows in made.weights.items() if n != "head.weight"
    )
    local += sum(p.numel() for n, p in module.named_parameters() if n not in made.weights)
    whole = sum(p.numel() for p in module.parameters())
    assert lines[-1].startswith(f"Tensor axis of 2: {local:,} of {whole:,} weights")


def test_every_weight_is_in_the_report_once():
    for made, module in [(layout(m := Holder(hugging_face("Mixtral")), 2), m), (adapted()[1], adapted()[0])]:
        told = [f"{name}.{own}" for name, became in made.became.items() for own in became.shapes]
        assert sorted(told) == sorted(name for name, _ in module.named_parameters())


def test_style_words_of_hugging_face_are_all_known():
    tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    assert set(tensor_parallel.ALL_PARALLEL_STYLES.keys()) <= STYLES.keys()


def test_a_gated_mlp_in_one_weight_is_cut_half_by_half():
    module = Encoder(mlp=lambda: GatedMLP(16, 8))
    rows = layout(module, 2, ENCODER_PLAN).weights["blocks.0.mlp.gate_up.weight"]
    assert rows.index == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)
