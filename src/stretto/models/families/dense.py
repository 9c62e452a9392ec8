"""Dense families: llama, qwen2, qwen3, glm4. They differ in biases, norms and rotations."""

from __future__ import annotations

from stretto.models.family import ATTENTION_BIAS, Family, Keys, WeightRule

_NO_WINDOW = {"use_sliding_window": False}
_MLP = "model.layers.{layer}.mlp"

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    constants={"has_qk_norm": False},
    keys=ATTENTION_BIAS | {"mlp_bias": ("mlp_bias", False)},
)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    constants={"has_qk_norm": False, "qkv_bias": True},
    to_hf=lambda cfg: dict(_NO_WINDOW),
    fixed_values=_NO_WINDOW,
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=ATTENTION_BIAS,
    to_hf=lambda cfg: dict(_NO_WINDOW),
    defaults={"head_dim": 128},
    fixed_values=_NO_WINDOW,
)

GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    constants={"has_qk_norm": False, "has_post_norms": True},
    keys=Keys(qkv_bias=("attention_bias", True)),
    to_hf=lambda cfg: {"pad_token_id": None},
    defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    weights=(
        WeightRule((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), (f"{_MLP}.gate_up_proj.weight",)),
    ),
    rotary_fraction=0.5,
    is_rotary_interleaved=True,
)
"""GLM-4-9B-0414: norms before and after attention and MLP, and half of each head rotated."""
