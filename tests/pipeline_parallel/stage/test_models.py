import lightning as L
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tests.pipeline_parallel.stage.pipelines import assert_same_gradients  # noqa: E402

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
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
