"""Tiny configs of the families whose mixers are not plain attention: (model_type, keys of config.json)."""

from __future__ import annotations

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
