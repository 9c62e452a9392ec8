"""laguna: windows, rotations and heads by layer, gated attention, a shared expert."""

from __future__ import annotations

import math
from typing import Any

from stretto.base.errors import DataError
from stretto.families.family import (
    ATTENTION_BIAS,
    BALANCED_SIGMOID,
    DENSE_TP_PLAN,
    MOE_KEYS,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    Family,
    mlp_layer_types,
    renamed_in_layers,
    scratch_layers,
    scratch_shared_moe,
    sparse_layers,
)
from stretto.families.rope_keys import parse_rope, rope_to_hf
from stretto.families.shape import AttentionGate, LayerAttention, ModelConfig, MoEShape
from stretto.families.traits import Traits, VllmTraits

_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_MOE_KEYS = MOE_KEYS | {
    "shared_size": "shared_expert_intermediate_size",
    "gate_scale": ("moe_routed_scaling_factor", 1.0),
}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    count = hf["num_hidden_layers"]
    if others := sorted(set(hf.get("rope_parameters") or ()) - set(_ROPES)):
        raise DataError(
            f"config.json: rope_parameters {', '.join(others)} is not supported: laguna has one table for each of "
            f"{', '.join(_ROPES)}"
        )
    types = hf.get("layer_types") or ["full_attention"] * count
    tables = _ROPES | (hf.get("rope_parameters") or {})
    ropes = {kind: parse_rope({"rope_parameters": tables[kind]}, "config.json", 1.0) for kind in _ROPES}
    heads = hf.get("num_attention_heads_per_layer") or [hf["num_attention_heads"]] * count
    window = {"full_attention": None, "sliding_attention": hf.get("sliding_window", 512)}
    return {
        "rope": ropes["full_attention"],
        "num_heads": math.gcd(*heads),
        "attention_gate": AttentionGate("g_proj", "softplus", hf.get("gating", True) in (True, "per-head")),
        "layers": tuple(LayerAttention(n, ropes[kind], window[kind]) for n, kind in zip(heads, types)),
        "moe": MoEShape(
            **_MOE_KEYS.read(hf),
            **BALANCED_SIGMOID,
            sparse_layers=sparse_layers(hf, 1),
            logit_cap=hf.get("moe_router_logit_softcapping") or None,
        ),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.moe is not None and cfg.attention_gate is not None
    ropes = dict(zip(cfg.layer_types, (rope_to_hf(layer.rope) for layer in cfg.layers if layer.rope)))
    return _MOE_KEYS.write(cfg.moe) | {
        "gating": "per-head" if cfg.attention_gate.is_per_head else "per-element",
        "layer_types": cfg.layer_types,
        "sliding_window": cfg.window or 512,
        "rope_parameters": _ROPES | ropes,
        "num_attention_heads_per_layer": [layer.num_heads for layer in cfg.layers],
        "mlp_layer_types": mlp_layer_types(cfg),
        "moe_router_logit_softcapping": cfg.moe.logit_cap or 0.0,
    }


LAGUNA = Family(
    name="laguna",
    traits=Traits(renderer="laguna-xs.2", packs_in_transformers=True, vllm=VllmTraits(adapts=True)),
    architecture="LagunaForCausalLM",
    keys=ATTENTION_BIAS,
    fields=_fields,
    to_hf=_to_hf,
    required=_MOE_KEYS.required,
    defaults={"head_dim": 128, "num_key_value_heads": 8},
    fixed_values={"moe_apply_router_weight_on_input": False},
    weights=STACKED_EXPERTS
    + SHARED_EXPERT
    + renamed_in_layers({"mlp.gate.expert_bias": "mlp.experts.e_score_correction_bias"}),
    tp_plan={**DENSE_TP_PLAN, "model.layers.{layer}.self_attn.g_proj": "column"},
    has_windows=True,
    scratch=lambda scratch: {
        "attention_gate": AttentionGate("g_proj", "softplus", is_per_head=True),
        "layers": scratch_layers(scratch, lambda layer: layer % 4 != 0),
        "moe": scratch_shared_moe(scratch, 1),
    },
)
