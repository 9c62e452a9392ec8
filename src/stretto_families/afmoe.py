"""afmoe (Trinity): sliding windows, gated attention, experts.

Norms before and after attention and MLP, a sigmoid router and a shared expert. Layers without a window do not rotate
queries and keys. The first blocks are dense.
"""

from __future__ import annotations

import math
from typing import Any

from stretto.families.family import (
    ATTENTION_BIAS,
    BALANCED_SIGMOID,
    DENSE_TP_PLAN,
    MOE_KEYS,
    STACKED_EXPERTS,
    Family,
    first_sparse_layer,
    renamed_in_layers,
    scratch_layers,
    scratch_shared_moe,
)
from stretto.families.rope_keys import parse_rope
from stretto.families.shape import AttentionGate, LayerAttention, ModelConfig, MoEShape
from stretto.families.traits import Traits, VllmTraits

_MOE_KEYS = MOE_KEYS | {"gate_scale": ("route_scale", 1.0)}
_FIXED_VALUES = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    rope, heads, count = parse_rope(hf, "config.json"), hf["num_attention_heads"], hf["num_hidden_layers"]
    every = hf.get("global_attn_every_n_layers") or 4
    types = hf.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    windowed, whole = LayerAttention(heads, rope, hf["sliding_window"]), LayerAttention(heads, None)
    num_shared = hf.get("num_shared_experts", 2)
    return {
        "embedding_scale": math.sqrt(hf["hidden_size"]) if hf.get("mup_enabled") else 1.0,
        "layers": tuple(windowed if kind == "sliding_attention" else whole for kind in types),
        "moe": MoEShape(
            **_MOE_KEYS.read(hf),
            **BALANCED_SIGMOID,
            sparse_layers=tuple(range(hf.get("num_dense_layers", 1), count)),
            shared_size=hf["moe_intermediate_size"] * num_shared if num_shared else None,
        ),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.moe is not None
    return {
        **_MOE_KEYS.write(cfg.moe),
        **_FIXED_VALUES,
        "mup_enabled": cfg.embedding_scale != 1.0,
        "layer_types": cfg.layer_types,
        "sliding_window": cfg.window,
        "num_dense_layers": first_sparse_layer(cfg),
        "num_shared_experts": (cfg.moe.shared_size or 0) // cfg.moe.intermediate_size,
    }


AFMOE = Family(
    name="afmoe",
    traits=Traits(vllm=VllmTraits(has_own_head=True, adapts=True)),
    architecture="AfmoeForCausalLM",
    constants={"attention_gate": AttentionGate("gate_proj", "sigmoid"), "has_post_norms": True},
    keys=ATTENTION_BIAS,
    fields=_fields,
    to_hf=_to_hf,
    required=(*MOE_KEYS.required, "sliding_window"),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    fixed_values=_FIXED_VALUES | {"num_expert_groups": 1, "num_limited_groups": 1},
    weights=STACKED_EXPERTS
    + renamed_in_layers(
        {
            "mlp.gate.weight": "mlp.router.gate.weight",
            "mlp.gate.expert_bias": "mlp.expert_bias",
            "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
            "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        }
    ),
    tp_plan={**DENSE_TP_PLAN, "model.layers.{layer}.self_attn.gate_proj": "column"},
    has_windows=True,
    scratch=lambda scratch: {
        "embedding_scale": math.sqrt(scratch.hidden_size),
        "layers": scratch_layers(scratch, lambda layer: (layer + 1) % 4 != 0, rotates_all=False),
        "moe": scratch_shared_moe(scratch, 1),
    },
)
