"""Tiny models with images, and rows for them."""

from __future__ import annotations

import numpy as np
import torch

VOCAB, IMAGE, START, END = 60, 50, 52, 53
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
TOWER = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
RECURRENT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "rope_parameters":
    {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
}  # fmt: skip
DEEPSTACK = {"deepstack_visual_indexes": [0, 2]}
VISION_CASES: dict[str, tuple[str, dict, dict, dict]] = {
    "qwen3_vl": ("qwen3_vl", SECTIONS, DEEPSTACK, {}),
    "qwen3_vl-tied-every-layer": (
        "qwen3_vl",
        {"attention_bias": True},
        {"deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 25},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", SECTIONS | MOE | {"mlp_only_layers": [1]}, DEEPSTACK, {}),
    "qwen3_5": ("qwen3_5", RECURRENT, {}, {}),
    "qwen3_5_moe": ("qwen3_5_moe", RECURRENT | MOE | {"shared_expert_intermediate_size": 16}, {}, {}),
}
"""Name: model_type, and what of text_config, vision_config and the rest is not as above."""

PATCH_VALUES = 3 * 2 * 4 * 4


def config_keys(case: str) -> tuple[str, dict]:
    """model_type, and keys for transformers' AutoConfig."""
    family, text, tower, more = VISION_CASES[case]
    ids = {
        "image_token_id": IMAGE, "video_token_id": 51, "vision_start_token_id": START, "vision_end_token_id": END
    }  # fmt: skip
    return family, {"text_config": TEXT | text, "vision_config": TOWER | tower} | ids | more


def image_document(grids: list[tuple[int, int, int]], seed: int, num_text: int = 4) -> np.ndarray:
    """Token ids of a document with these images, and text before, between and behind them."""
    random = np.random.default_rng(seed)
    text = lambda: random.integers(0, IMAGE, num_text).tolist()
    ids = text()
    for t, h, w in grids:
        ids += [START, *[IMAGE] * (t * h * w // 4), END, *text()]
    return np.array(ids, np.int32)


def patches_of(grids: list[tuple[int, int, int]], seed: int) -> torch.Tensor:
    """Random patches of these images."""
    num = int(np.array(grids, int).reshape(-1, 3).prod(1).sum())
    return torch.randn(num, PATCH_VALUES, generator=torch.Generator().manual_seed(seed))
