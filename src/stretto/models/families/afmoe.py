"""afmoe (Trinity): sliding windows, gated attention, norms before and after, sigmoid router, a shared expert.

Layers that see everything do not rotate queries and keys. The first blocks are dense.
"""

from __future__ import annotations

import math
from typing import Any

from stretto.models.families.rope_keys import parse_rope
from stretto.models.family import (
    DENSE_TP_PLAN,
    STACKED_EXPERTS,
    Family,
    WeightRule,
    scratch_layers,
    scratch_moe,
)
from stretto.models.shape import AttentionGate, LayerAttention, ModelConfig, MoEShape

_LAYER = "model.layers.{layer}"
_GATE = AttentionGate("gate_proj", "sigmoid")


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    rope, heads, count = parse_rope(hf, "config.json"), hf["num_attention_heads"], hf["num_hidden_layers"]
    every = hf.get("global_attn_every_n_layers") or 4
    types = hf.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    is_windowed = [kind == "sliding_attention" for kind in types]
    shared = hf.get("num_shared_experts", 2)
    return {
        "qkv_bias": hf.get("attention_bias", False),
        "out_bias": hf.get("attention_bias", False),
        "attention_gate": _GATE,
        "has_post_norms": True,
        "embedding_scale": math.sqrt(hf["hidden_size"]) if hf.get("mup_enabled") else 1.0,
        "layers": tuple(
            LayerAttention(heads, rope, hf["sliding_window"]) if windowed else LayerAttention(heads, None)
            for windowed in is_windowed
        ),
        "moe": MoEShape(
            num_experts=hf["num_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=tuple(range(hf.get("num_dense_layers", 1), count)),
            has_expert_bias=True,
            is_sigmoid=True,
            gate_scale=hf.get("route_scale", 1.0),
            shared_size=hf["moe_intermediate_size"] * shared if shared else None,
        ),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    moe = cfg.moe
    assert moe is not None
    return {
        "attention_bias": cfg.qkv_bias,
        "mup_enabled": cfg.embedding_scale != 1.0,
        "layer_types": cfg.layer_types,
        "sliding_window": cfg.window,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "num_dense_layers": moe.sparse_layers[0] if moe.sparse_layers else cfg.num_layers,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": moe.gate_scale,
        "n_group": 1,
        "topk_group": 1,
        "num_shared_experts": (moe.shared_size or 0) // moe.intermediate_size,
    }


AFMOE = Family(
    name="afmoe",
    architecture="AfmoeForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window"),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    fixed_values={
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
    },
    weights=(
        *STACKED_EXPERTS,
        WeightRule((f"{_LAYER}.mlp.gate.weight",), (f"{_LAYER}.mlp.router.gate.weight",)),
        WeightRule((f"{_LAYER}.mlp.gate.expert_bias",), (f"{_LAYER}.mlp.expert_bias",)),
        WeightRule(
            (f"{_LAYER}.post_self_attn_layernorm.weight",), (f"{_LAYER}.post_attention_layernorm.weight",)
        ),
        WeightRule((f"{_LAYER}.post_attention_layernorm.weight",), (f"{_LAYER}.pre_mlp_layernorm.weight",)),
    ),
    tp_plan={**DENSE_TP_PLAN, f"{_LAYER}.self_attn.gate_proj": "column"},
    has_windows=True,
    scratch=lambda scratch: {
        "attention_gate": _GATE,
        "has_post_norms": True,
        "embedding_scale": math.sqrt(scratch.hidden_size),
        "layers": scratch_layers(scratch, lambda layer: (layer + 1) % 4 != 0, rotates_all=False),
        "moe": scratch_moe(
            scratch, 1, has_expert_bias=True, is_sigmoid=True, shared_size=scratch.moe_intermediate_size
        ),
    },
)
