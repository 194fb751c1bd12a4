import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tests.pipeline_parallel.stage.pipelines import Pipeline, assert_same_gradients  # noqa: E402
from tests.pipeline_parallel.zoo import SIZES  # noqa: E402

GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
CAUSAL = {
    "Llama": {**SIZES, "num_key_value_heads": 1},
    "Qwen3": {**SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "Mistral": {**SIZES, "num_key_value_heads": 1, "sliding_window": 4},
    "Mixtral": {**SIZES, "num_key_value_heads": 1, "num_local_experts": 2},
    "GPT2": {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "Phi": {**SIZES, "num_key_value_heads": 2},
    "GPTNeoX": {**SIZES},
}


class CausalLM(L.LightningModule):
    def __init__(self, name: str, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**CAUSAL[name], **options})
        kind = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
        self.model = getattr(transformers, kind)(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, labels=batch["input_ids"]).loss


def rows(count: int, mask: bool = False) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        batch = {"input_ids": torch.randint(1, 31, (2, 7))}
        if mask:
            batch["attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
        found.append(batch)
    return found


@pytest.mark.parametrize("ranks", [[(0,), (1,)], [(0, 3), (1, 2)]], ids=["two", "v"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_keeps_its_gradients(name: str, ranks: list[tuple[int, ...]]) -> None:
    assert_same_gradients(CausalLM(name), [*rows(2), *rows(1, mask=True)], ranks)


class MaskedLM(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.bert = transformers.BertForMaskedLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.bert(**batch, labels=batch["input_ids"]).loss


class Images(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        self.vit = transformers.ViTForImageClassification(
            transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4, num_labels=3)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.vit(pixel_values=batch[0], labels=batch[1]).loss


@pytest.mark.parametrize("split", [None, [0, 2, 2, 0]], ids=["even", "empty ends"])
def test_bert_keeps_its_gradients_with_padding(split: list[int] | None) -> None:
    ranks = [(0,), (1,)] if split is None else [(0,), (1,), (2,), (3,)]
    assert_same_gradients(MaskedLM(), [*rows(1), *rows(2, mask=True)], ranks, split=split or "even")


@pytest.mark.parametrize("split", [None, [0, 2, 2, 0]], ids=["even", "empty ends"])
def test_a_vision_transformer_keeps_its_gradients(split: list[int] | None) -> None:
    ranks = [(0,), (1,)] if split is None else [(0,), (1,), (2,), (3,)]
    images = [(torch.randn(2, 3, 8, 8), torch.tensor([0, 2])) for _ in range(2)]
    assert_same_gradients(Images(), images, ranks, split=split or "even")


@pytest.mark.parametrize("split", [[0, 4], [4, 0], [0, 2, 2, 0], [2, 0, 2], [0, 0, 4], [4, 0, 0]], ids=str)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_stages_without_blocks_change_nothing(name: str, split: list[int]) -> None:
    assert_same_gradients(CausalLM(name), rows(2), [(stage,) for stage in range(len(split))], split=split)
    if len(split) == 4:
        assert_same_gradients(CausalLM(name), rows(2), [(0, 3), (1, 2)], split=split)


@pytest.mark.parametrize("ranks", [[(0,), (1,)], [(0, 3), (1, 2)]], ids=["two", "v"])
@pytest.mark.parametrize("name", ["Llama", "Gemma", "GPT2"])
def test_tied_embeddings_stay_one_weight_and_their_gradients_add_up(name: str, ranks: list[tuple[int, ...]]) -> None:
    pipeline = assert_same_gradients(CausalLM(name, tie_word_embeddings=True), rows(2), ranks)
    last = pipeline.layout.stages - 1
    tied = [n for n, stages in pipeline.layout.owners.items() if stages == (0, last)]
    assert len(tied) == 2
    for module, rank in zip(pipeline.modules, ranks, strict=True):
        here = dict(module.named_parameters(remove_duplicate=False))
        assert len([n for n in tied if n in here]) == len({0, last}.intersection(rank))
        assert len({id(here[n]) for n in tied if n in here}) <= 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_by_itself_keeps_its_gradients(reentrant: bool) -> None:
    module = CausalLM("Llama")
    module.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_gradients(module, rows(2), [(0, 3), (1, 2)])


@pytest.mark.parametrize(
    ("split", "ranks"),
    [
        ("even", [(0,), (1,)]),
        ("even", [(0, 3), (1, 2)]),
        ([2, 0, 2], [(0,), (1,), (2,)]),
        ([0, 4], [(0,), (1,)]),
        ([3, 1, 0], [(0, 2), (1,)]),
    ],
)
def test_the_logits_of_routers_come_to_a_loss_behind_the_blocks(split: object, ranks: list[tuple[int, ...]]) -> None:
    module = CausalLM("Mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    assert_same_gradients(module, [*rows(2), *rows(1, mask=True)], ranks, split=split)


def test_another_loss_of_what_hooks_keep_of_blocks_is_refused() -> None:
    class Penalised(CausalLM):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            kept: list[Tensor] = []
            handles = [
                layer.mlp.gate.register_forward_hook(lambda *call: kept.append(call[2][0].square().mean()))
                for layer in self.model.model.layers
                if hasattr(layer.mlp, "gate") and type(layer).__name__ == "MixtralDecoderLayer"
            ]
            loss = super().training_step(batch, batch_idx)
            for handle in handles:
                handle.remove()
            return loss + sum(kept)

    with pytest.raises(MisconfigurationException, match=r"layers\.\d\.mlp\.gate\.weight otherwise.*a hook keeps"):
        Pipeline(Penalised("Mixtral"), [(0,), (1,)]).forward(rows(1)[0], 0)
