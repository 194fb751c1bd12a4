"""Models as people bring them, each as an ordinary LightningModule, with rows to train on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.modules import TinyLM

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {**SIZES, "num_key_value_heads": 1},
    "Mixtral": {**SIZES, "num_key_value_heads": 1, "num_local_experts": 2, "router_aux_loss_coef": 0.0},
    "GPT2": {
        "vocab_size": 31,
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 2,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "Bert": {**SIZES, **_NO_DROPOUT, "num_labels": 3},
    "ViT": {
        **{k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        **_NO_DROPOUT,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 3,
    },
}
_KINDS = {
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertForSequenceClassification",
    "ViT": "ViTForImageClassification",
}


class Pretrained(L.LightningModule):
    """A model of the transformers library, trained with its own loss."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**CONFIGS[name], **options})
        self.model = getattr(transformers, _KINDS.get(name, f"{name}ForCausalLM"))(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Rows(Dataset[Any]):
    def __init__(self, rows: dict[str, Tensor]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.rows.items()}


def text(masked: bool = False) -> dict[str, Tensor]:
    """16 rows of 7 tokens, each to be predicted from those before; masks are of a different length in each row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 31, (16, 7), generator=generator)
    if not masked:
        return {"input_ids": ids, "labels": ids}
    lengths = 1 + torch.arange(16) * 5 % 7
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(7) < lengths[:, None]).long(),
        "labels": torch.randint(3, (16,), generator=generator),
    }


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "pixel_values": torch.randn(16, 3, 8, 8, generator=generator),
        "labels": torch.randint(3, (16,), generator=generator),
    }


def deal(rows: Callable[[], dict[str, Tensor]], data_ranks: int = 1, data_rank: int = 0) -> DataLoader[Any]:
    """Batches of 8 over all data ranks."""
    data = Rows(rows())
    sampler = DistributedSampler(data, data_ranks, data_rank, shuffle=False)
    return DataLoader(data, batch_size=8 // data_ranks, sampler=sampler)


class Adapter(nn.Module):
    """A frozen layer with a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapted(Pretrained):
    """Adapters in a frozen model, and an optimizer of what is trained."""

    def __init__(self, blocks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__("Llama")
        self.model.requires_grad_(False)
        for index in blocks:
            attention = self.model.model.layers[index].self_attn
            attention.q_proj, attention.v_proj = Adapter(attention.q_proj), Adapter(attention.v_proj)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, fused=True)


class HeadOnly(TinyLM):
    """Trains its head and its last block, which the first stage does not have, by names of its own."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.requires_grad_(False)
        self.head.requires_grad_()
        self.layers[3].requires_grad_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": self.head.parameters(), "lr": 1e-2}, {"params": self.layers[3].parameters(), "lr": 5e-3}]
        return torch.optim.AdamW(groups, fused=True)


class FrozenStart(TinyLM):
    """All that the first of two stages has is frozen, and the optimizer is made of everything."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.embed.requires_grad_(False)
        self.layers[:2].requires_grad_(False)


MODELS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], dict[str, Tensor]]]] = {
    "Llama": (partial(Pretrained, "Llama"), text),
    "GPT-2": (partial(Pretrained, "GPT2", tie_word_embeddings=False), text),
    "BERT": (partial(Pretrained, "Bert"), partial(text, masked=True)),
    "Mixtral": (partial(Pretrained, "Mixtral"), text),
    "ViT": (partial(Pretrained, "ViT"), images),
    "adapters": (Adapted, text),
    "adapters at the end": (partial(Adapted, (2, 3)), text),
}
TIED: dict[str, Callable[[], L.LightningModule]] = {
    "Llama": partial(Pretrained, "Llama", tie_word_embeddings=True),
    "GPT-2": partial(Pretrained, "GPT2"),
}
