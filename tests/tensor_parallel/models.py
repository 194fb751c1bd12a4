"""Small models whose plans are looked at: Hugging Face's from configs, and hand-written ones."""

from typing import Any

import torch
from torch import Tensor, nn

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "Llama": _GROUPED | {"attention_bias": True},
    "Qwen3": _GROUPED | {"head_dim": 8},
    "Mistral": _GROUPED | {"head_dim": 8},
    "Mixtral": _GROUPED | {"num_local_experts": 4},
    "Gemma": _GROUPED | {"head_dim": 16},
    "Gemma2": _GROUPED | {"head_dim": 8},
    "Gemma3": _GROUPED | {"head_dim": 16},
    "Phi": _GROUPED,
    "Phi3": _GROUPED,
    "GPTNeoX": _SIZES,
    "Qwen2": _GROUPED,
    "Olmo2": _GROUPED,
    "Cohere": _GROUPED | {"use_qk_norm": True},
    "DeepseekV2": _GROUPED | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip


def hugging_face(kind: str, **changes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**HUGGING_FACE[kind] | changes))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


class Holder(nn.Module):
    """As a LightningModule holds a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


class Attention(nn.Module):
    """Queries, keys and values in one projection (all queries, then all keys, then all values), or in three."""

    def __init__(
        self, width: int = 16, heads: int = 4, kv_heads: int = 4, fused: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width // heads
        kv = kv_heads * self.head_dim
        if fused:
            self.qkv = nn.Linear(width, width + 2 * kv, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in (width, kv, kv))
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if hasattr(self, "qkv"):
            sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
            parts = self.qkv(x_BTD).split(sizes, -1)
        else:
            parts = (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    def __init__(self, width: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class PostNormAttention(nn.Module):
    """As BERT's: the projection behind the attention, a residual and a norm are one module beside it."""

    class Output(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.dense = nn.Linear(width, width)
            self.LayerNorm = nn.LayerNorm(width)

        def forward(self, y: Tensor, x: Tensor) -> Tensor:
            return self.LayerNorm(self.dense(y) + x)

    class Self(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.num_attention_heads, self.all_head_size = heads, width
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            shape = (*x.shape[:2], self.num_attention_heads, self.all_head_size // self.num_attention_heads)
            q, k, v = (layer(x) for layer in (self.query, self.key, self.value))
            q, k, v = (part.view(q.shape[0], *shape[1:]).transpose(1, 2) for part in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return y.transpose(1, 2).reshape(q.shape[0], *shape[1:2], self.all_head_size)

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.self = self.Self(width, heads)
        self.output = self.Output(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x), x)


class Encoder(nn.Module):
    """Blocks of an attention and a feed-forward module, in a model with a vocabulary of 13."""

    class Block(nn.Module):
        def __init__(self, attention: nn.Module, mlp: nn.Module, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.attention, self.mlp = attention, mlp

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm(x))
            return x + self.mlp(x)

    def __init__(self, attention: Any = Attention, mlp: Any = GatedMLP, width: int = 16, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(self.Block(attention(), mlp(), width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


ENCODER_PLAN = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.gate_up": "packed_colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}


POST_NORM_PLAN = {
    "blocks.*.attention.self.query": "colwise",
    "blocks.*.attention.self.key": "colwise",
    "blocks.*.attention.self.value": "colwise",
    "blocks.*.attention.output.dense": "rowwise",
}


class LoRA(nn.Module):
    """An adapter with the names of PEFT's."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


def with_adapters(module: Encoder) -> Encoder:
    for block in module.blocks:
        block.attention.q, block.attention.out = LoRA(block.attention.q), LoRA(block.attention.out)
        block.mlp.gate_up, block.mlp.down = LoRA(block.mlp.gate_up), LoRA(block.mlp.down)
    return module
