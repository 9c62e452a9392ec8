"""gpt_oss: sinks in every layer, every second one with a sliding window, experts with biases and a clamped gate.

Router: the softmax of the chosen experts' logits, which is the softmax of all, normed over the chosen. Experts are
stored transposed, as in checkpoints; those in four bits (MXFP4) are not read.
"""

from __future__ import annotations

from typing import Any

from stretto.models.families.rope_keys import parse_rope
from stretto.models.family import Family, WeightRule, scratch_layers, scratch_moe
from stretto.models.shape import ClampedGate, LayerAttention, ModelConfig, MoEShape, Rope

_MLP = "model.layers.{layer}.mlp"

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The rotation of a config.json that says nothing of it."""


def _normalise(hf: dict[str, Any]) -> dict[str, Any]:
    return hf if hf.get("rope_parameters") or hf.get("rope_scaling") else hf | {"rope_parameters": _YARN}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    rope, heads, count = parse_rope(hf, "config.json"), hf["num_attention_heads"], hf["num_hidden_layers"]
    types = hf.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(count)]
    windows = [hf.get("sliding_window") if kind == "sliding_attention" else None for kind in types]
    return {
        "has_qk_norm": False,
        "qkv_bias": hf.get("attention_bias", True),
        "out_bias": hf.get("attention_bias", True),
        "has_sinks": True,
        "layers": tuple(LayerAttention(heads, rope, window) for window in windows),
        "moe": MoEShape(
            num_experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=tuple(range(count)),
            clamped=ClampedGate(hf.get("swiglu_alpha", 1.702), hf.get("swiglu_limit", 7.0)),
            has_router_bias=True,
            has_product_biases=True,
            is_transposed=True,
            is_interleaved=True,
        ),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    moe = cfg.moe
    assert moe is not None and moe.clamped is not None
    return {
        "attention_bias": cfg.qkv_bias,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.intermediate_size,
        "swiglu_alpha": moe.clamped.alpha,
        "swiglu_limit": moe.clamped.limit,
        "layer_types": cfg.layer_types,
        "sliding_window": cfg.window,
    }


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=("num_local_experts", "num_experts_per_tok"),
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
    key_aliases={"num_experts": "num_local_experts"},
    normalise=_normalise,
    weights=(
        WeightRule((f"{_MLP}.gate.weight",), (f"{_MLP}.router.weight",)),
        WeightRule((f"{_MLP}.gate.bias",), (f"{_MLP}.router.bias",)),
    ),
    has_windows=True,
    scratch=lambda scratch: {
        "has_qk_norm": False,
        "qkv_bias": True,
        "out_bias": True,
        "has_sinks": True,
        # vLLM expects YaRN of this family; without a factor it changes nothing.
        "rope": Rope(theta=10_000.0, kind="yarn", original_max_positions=scratch.max_position_embeddings),
        "layers": scratch_layers(scratch, lambda layer: layer % 2 == 0),
        "moe": scratch_moe(
            scratch,
            clamped=ClampedGate(1.702, 7.0),
            has_router_bias=True,
            has_product_biases=True,
            is_transposed=True,
            is_interleaved=True,
            has_expert_bias=False,
        ),
    },
)
