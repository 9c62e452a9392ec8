"""glm4 (GLM-4-9B-0414): a dense family with norms before and after attention and MLP, and half of each head rotated."""

from __future__ import annotations

from stretto.models.family import Family, WeightRule
from stretto.models.shape import Rope

_MLP = "model.layers.{layer}.mlp"

GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    fields=lambda hf: {
        "has_qk_norm": False,
        "qkv_bias": hf.get("attention_bias", True),
        "has_post_norms": True,
    },
    to_hf=lambda cfg: {"attention_bias": cfg.qkv_bias, "pad_token_id": None},
    defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    weights=(
        WeightRule((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), (f"{_MLP}.gate_up_proj.weight",)),
    ),
    rotary_fraction=0.5,
    is_rotary_interleaved=True,
    scratch=lambda scratch: {
        "rope": Rope(theta=10_000.0, fraction=0.5, is_interleaved=True),
        "has_qk_norm": False,
        "qkv_bias": True,
        "has_post_norms": True,
    },
)
