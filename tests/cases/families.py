"""Tiny networks of every family, as transformers builds them: (model_type, keys of config.json)."""

from __future__ import annotations

import pytest
import torch

from stretto.families.table import FAMILIES
from stretto.models.attention import PackedLayout

VOCAB = 40
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
GLM = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "rope_parameters":
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_LINEAR = {
    "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
_INDEXED = _LATENT | {
    "q_lora_rank": 16, "index_n_heads": 8, "index_head_dim": 8, "index_topk": 7, "first_k_dense_replace": 1,
}  # fmt: skip
_KIMI_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 1.0, "beta_slow": 1.0,
}  # fmt: skip
_NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 6,
    "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip

MIXER_CASES = {
    "qwen3_5_text": ("qwen3_5_text", _LINEAR | {"head_dim": 16}),
    "qwen3_5_text-linear-last": (
        "qwen3_5_text",
        _LINEAR
        | {
            "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"],
            "attention_bias": True, "tie_word_embeddings": True, "linear_num_value_heads": 2,
        },
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _LINEAR | _MOE),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h-latent-experts-biases-mamba-last": (
        "nemotron_h",
        _NEMOTRON
        | {
            "layers_block_type": ["moe", "attention", "mamba"], "moe_latent_size": 8, "mlp_bias": True,
            "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "use_bias": True,
        },
    ),
    "deepseek_v3": ("deepseek_v3", _LATENT | {"n_group": 3, "topk_group": 2}),
    "deepseek_v3-plain-queries-yarn-wide-values": (
        "deepseek_v3",
        _LATENT
        | {"q_lora_rank": None, "rope_parameters": _KIMI_ROPE, "v_head_dim": 12, "attention_bias": True},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", _INDEXED),
    "glm_moe_dsa-shared-choices-biases": (
        "glm_moe_dsa",
        _INDEXED
        | {
            "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"], "attention_bias": True,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "n_group": 3, "topk_group": 2,
            "v_head_dim": 12,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        _INDEXED
        | {
            "rope_parameters": _KIMI_ROPE, "n_group": 3, "topk_group": 2,
            "qk_rope_head_dim": 16, "head_dim": 16, "index_head_dim": 32,  # widths of the kernels in C
        },
    ),
}  # fmt: skip

CASES = {
    "llama": ("llama", {}),
    "llama-llama3-rope-biases": (
        "llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias-linear-rope": (
        "qwen3",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-normed-mixed": (
        "qwen3_moe",
        MOE | {"norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3_moe-every-second-yarn": (
        "qwen3_moe",
        MOE
        | {
            "decoder_sparse_step": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe-groups-biases": (
        "glm4_moe",
        GLM
        | {
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
            "n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False,
        },
    ),
    "glm4": ("glm4", PARTIAL | {"pad_token_id": 0}),
    "glm4-no-biases-tied": (
        "glm4", PARTIAL | {"attention_bias": False, "tie_word_embeddings": True, "pad_token_id": 0}
    ),
    "gpt_oss": (
        "gpt_oss",
        LOCAL | {"sliding_window": 5, "rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 0.5},
    ),
    "gpt_oss-other-layers": (
        "gpt_oss",
        LOCAL
        | {
            "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "minimax_m2": ("minimax_m2", LOCAL | PARTIAL),
    "afmoe": ("afmoe", MOE | {"sliding_window": 6, "global_attn_every_n_layers": 2, "route_scale": 2.0}),
    "afmoe-scaled-biases": (
        "afmoe",
        MOE | {"sliding_window": 3, "mup_enabled": True, "attention_bias": True, "num_shared_experts": 1},
    ),
    "laguna": ("laguna", MOE | {"shared_expert_intermediate_size": 24}),
    "laguna-varied": (
        "laguna",
        MOE
        | {
            "shared_expert_intermediate_size": 24, "gating": "per-element", "moe_routed_scaling_factor": 2.5,
            "num_attention_heads_per_layer": [4, 6, 2], "sliding_window": 5, "moe_router_logit_softcapping": 1.5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True,
        },
    ),
} | MIXER_CASES  # fmt: skip
CASES = {name: case for name, case in CASES.items() if case[0] in FAMILIES}
"""Those of families that are here: some are an add-on's."""


def build_theirs(case: str, seed: int = 0):
    if case not in CASES:
        pytest.skip("the family is an add-on's, which is not here")

    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = CASES[case]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SHAPE | {"tie_word_embeddings": False} | settings)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # so that distributions are not flat and errors show; biases are not 0
        for parameter in theirs.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, bias in (*theirs.named_buffers(), *theirs.named_parameters()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias.copy_(torch.randn_like(bias))
    return theirs


def our_logits(model, ids, bounds):
    return model.hidden(ids, PackedLayout(tuple(bounds), ids.device)) @ model.output_weight.T
