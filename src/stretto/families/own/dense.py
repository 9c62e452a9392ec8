"""Dense families: llama, qwen2, qwen3, glm4. They differ in biases, norms and rotations."""

from __future__ import annotations

from stretto.families.family import ATTENTION_BIAS, Family, Keys, WeightRule
from stretto.families.traits import Implied, Traits, VllmTraits

_NO_WINDOW = {"use_sliding_window": False}
_QWEN3_0_6B = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
}  # fmt: skip
_MLP = "model.layers.{layer}.mlp"

LLAMA = Family(
    name="llama",
    traits=Traits(
        renderer="llama-3",
        vllm=VllmTraits(adapts=True),
        is_in_megatron=True,
        implied=Implied(has_qk_norm=False, has_post_norms=False),
    ),
    architecture="LlamaForCausalLM",
    constants={"has_qk_norm": False},
    keys=ATTENTION_BIAS | {"mlp_bias": ("mlp_bias", False)},
)

QWEN2 = Family(
    name="qwen2",
    traits=Traits(
        vllm=VllmTraits(adapts=True),
        is_in_megatron=True,
        implied=Implied(has_qk_norm=False, has_qkv_bias=True, has_post_norms=False),
    ),
    architecture="Qwen2ForCausalLM",
    constants={"has_qk_norm": False, "qkv_bias": True},
    to_hf=lambda cfg: dict(_NO_WINDOW),
    fixed_values=_NO_WINDOW,
)

QWEN3 = Family(
    name="qwen3",
    traits=Traits(
        renderer="qwen3",
        packs_in_transformers=True,
        vllm=VllmTraits(adapts=True),
        is_in_megatron=True,
        implied=Implied(has_qk_norm=True, has_post_norms=False),
        public={"Qwen/Qwen3-0.6B": _QWEN3_0_6B},
    ),
    architecture="Qwen3ForCausalLM",
    keys=ATTENTION_BIAS,
    to_hf=lambda cfg: dict(_NO_WINDOW),
    defaults={"head_dim": 128},
    fixed_values=_NO_WINDOW,
)

GLM4 = Family(
    name="glm4",
    traits=Traits(vllm=VllmTraits(adapts=True), implied=Implied(has_qk_norm=False, has_post_norms=True)),
    architecture="Glm4ForCausalLM",
    constants={"has_qk_norm": False, "has_post_norms": True},
    keys=Keys(qkv_bias=("attention_bias", True)),
    to_hf=lambda cfg: {"pad_token_id": None},
    defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    weights=(WeightRule((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), (f"{_MLP}.gate_up_proj.weight",)),),
    rotary_fraction=0.5,
    is_rotary_interleaved=True,
)
"""GLM-4-9B-0414: norms before and after attention and MLP, and half of each head rotated."""
