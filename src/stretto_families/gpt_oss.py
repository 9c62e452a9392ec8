"""gpt_oss: sinks, sliding windows, experts with biases and a clamped gate.

Every layer has sinks, every second one a window. Router: the softmax of the chosen experts' logits, which is the
softmax of all, normed over the chosen. Experts are stored transposed, as in checkpoints; those in four bits (MXFP4)
are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.families.family import (
    LOCAL_MOE_KEYS,
    Family,
    Keys,
    renamed_in_layers,
    scratch_layers,
    scratch_moe,
    scratch_rope,
)
from stretto.families.rope_keys import parse_rope
from stretto.families.shape import ClampedGate, LayerAttention, ModelConfig, MoEShape
from stretto.families.traits import Implied, Traits, VllmTraits

_EXPERTS = {"has_router_bias": True, "has_product_biases": True, "is_transposed": True, "is_interleaved": True}
_CLAMPS = Keys(alpha=("swiglu_alpha", 1.702), limit=("swiglu_limit", 7.0))
"""Fields of ClampedGate and their keys in config.json."""
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The rotation of a config.json without any."""


def _normalise(hf: dict[str, Any]) -> dict[str, Any]:
    return hf if hf.get("rope_parameters") or hf.get("rope_scaling") else hf | {"rope_parameters": _YARN}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    rope, heads, count = parse_rope(hf, "config.json"), hf["num_attention_heads"], hf["num_hidden_layers"]
    types = hf.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(count)]
    windows = [hf.get("sliding_window") if kind == "sliding_attention" else None for kind in types]
    clamped = ClampedGate(**_CLAMPS.read(hf))
    return {
        "layers": tuple(LayerAttention(heads, rope, window) for window in windows),
        "moe": MoEShape(**LOCAL_MOE_KEYS.read(hf), **_EXPERTS, sparse_layers=tuple(range(count)), clamped=clamped),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.moe is not None
    layers = {"layer_types": cfg.layer_types, "sliding_window": cfg.window}
    return LOCAL_MOE_KEYS.write(cfg.moe) | _CLAMPS.write(cfg.moe.clamped) | layers


GPT_OSS = Family(
    name="gpt_oss",
    traits=Traits(
        renderer="gpt-oss",
        undivided_heads="has a sink in every head",
        vllm=VllmTraits(
            has_own_head=True,
            adapts_experts=False,
            cpu_fault="computes other log-probabilities than the model, by 0.003 nats, with the experts of gpt_oss",
        ),
        is_in_megatron=True,
        implied=Implied(expert_scores="softmax", has_qk_norm=False),
    ),
    architecture="GptOssForCausalLM",
    constants={"has_qk_norm": False, "has_sinks": True},
    keys=Keys(out_bias=("attention_bias", True), qkv_bias=("attention_bias", True)),
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
    weights=renamed_in_layers({"mlp.gate.weight": "mlp.router.weight", "mlp.gate.bias": "mlp.router.bias"}),
    has_windows=True,
    scratch=lambda scratch: {
        # vLLM expects YaRN of this family; without a factor it changes nothing.
        "rope": replace(scratch_rope(), kind="yarn", original_max_positions=scratch.max_position_embeddings),
        "layers": scratch_layers(scratch, lambda layer: layer % 2 == 0),
        "moe": scratch_moe(scratch, clamped=ClampedGate(**_CLAMPS.read({})), has_expert_bias=False, **_EXPERTS),
    },
)
