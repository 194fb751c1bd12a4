"""Tiny models of Hugging Face with experts, all with random weights."""

from typing import Any

import torch
from torch import nn

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_LATENT = _SIZES | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SMALL = {"moe_intermediate_size": 16}
_HEADS = {"head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": _GROUPED | _LOCAL,
    "Qwen2Moe": _GROUPED | _EXPERTS | _SMALL | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": _GROUPED | _EXPERTS | _SMALL | _HEADS,
    "Qwen3Next": _GROUPED | _EXPERTS | _SMALL | _HEADS | {
        "shared_expert_intermediate_size": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "Olmoe": _GROUPED | _EXPERTS,
    "FlexOlmo": _GROUPED | _EXPERTS,
    "DeepseekV2": _LATENT | _ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "DeepseekV3": _LATENT | _ROUTED | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "GptOss": _GROUPED | _LOCAL | _HEADS | {"swiglu_limit": 0.05},
    "GraniteMoe": _GROUPED | _LOCAL,
    "Phimoe": _GROUPED | _LOCAL | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "Glm4Moe": _GROUPED | _ROUTED | _HEADS | {"first_k_dense_replace": 1},
    "Ernie4_5_Moe": _GROUPED | _SMALL | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "MiniMax": _GROUPED | _LOCAL | _HEADS | {"block_size": 8},
    "MiniMaxM2": _GROUPED | _LOCAL | _HEADS | {"rotary_dim": 4},
    "Jamba": _GROUPED | _EXPERTS | {
        "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
        "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "NemotronH": _GROUPED | _ROUTED | _HEADS | {
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "layers_block_type": ["attention", "moe"],
    },
    "AriaText": _GROUPED | {"moe_num_experts": 4, "moe_topk": 2},
    "Dots1": _GROUPED | _ROUTED | _HEADS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "HunYuanMoEV1": _GROUPED | _HEADS | {"num_experts": 4, "moe_topk": 2},
    "Lfm2Moe": _GROUPED | _EXPERTS | _SMALL | {"num_dense_layers": 0, "layer_types": ["full_attention", "conv"]},
    "Cohere2Moe": _GROUPED | _EXPERTS,
    "ExaoneMoe": _GROUPED | _EXPERTS | _SMALL | _HEADS,
    "Afmoe": _GROUPED | _EXPERTS | _SMALL | _HEADS | {"num_dense_layers": 0},
    "Zaya": _GROUPED | _SMALL | _HEADS | {"num_experts": 4, "num_experts_per_tok": 1},
    "SolarOpen": _GROUPED | _ROUTED | _HEADS,
}  # fmt: skip
"""Causal language models whose experts are stacked, each with its config."""

BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""Settings that add a balance loss, where a model has one."""
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "decoder_attention_heads": 2,
}
"""Settings of models of other kinds."""


def model(kind: str, **changes: Any) -> nn.Module:
    """One of them; a call with labels gives its own loss."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**MODELS[kind], **changes})
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made
