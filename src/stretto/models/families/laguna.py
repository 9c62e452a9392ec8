"""laguna: windows, rotations and numbers of heads by layer, gated attention, sigmoid router, a shared expert."""

from __future__ import annotations

import math
from typing import Any

from stretto.base.errors import DataError
from stretto.models.families.rope_keys import parse_rope, rope_to_hf
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
_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    count = hf["num_hidden_layers"]
    kinds = hf.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise DataError(
            f'config.json: mlp_layer_types must give "dense" or "sparse" for each of the {count} layers'
        )
    if others := sorted(set(hf.get("rope_parameters") or ()) - set(_ROPES)):
        raise DataError(
            f"config.json: rope_parameters {', '.join(others)} is not supported: laguna has one table for each of "
            f"{', '.join(_ROPES)}"
        )
    types = hf.get("layer_types") or ["full_attention"] * count
    given = _ROPES | (hf.get("rope_parameters") or {})
    ropes = {kind: parse_rope({"rope_parameters": given[kind]}, "config.json", 1.0) for kind in _ROPES}
    heads = hf.get("num_attention_heads_per_layer") or [hf["num_attention_heads"]] * count
    window = {"full_attention": None, "sliding_attention": hf.get("sliding_window", 512)}
    return {
        "rope": ropes["full_attention"],
        "num_heads": math.gcd(*heads),
        "qkv_bias": hf.get("attention_bias", False),
        "out_bias": hf.get("attention_bias", False),
        "attention_gate": AttentionGate("g_proj", "softplus", hf.get("gating", True) in (True, "per-head")),
        "layers": tuple(LayerAttention(n, ropes[kind], window[kind]) for n, kind in zip(heads, types)),
        "moe": MoEShape(
            num_experts=hf["num_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=tuple(i for i, kind in enumerate(kinds) if kind == "sparse"),
            has_expert_bias=True,
            is_sigmoid=True,
            gate_scale=hf.get("moe_routed_scaling_factor", 1.0),
            logit_cap=hf.get("moe_router_logit_softcapping") or None,
            shared_size=hf.get("shared_expert_intermediate_size", 512),
        ),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    moe, gate = cfg.moe, cfg.attention_gate
    assert moe is not None and gate is not None
    ropes = dict(zip(cfg.layer_types, (rope_to_hf(layer.rope) for layer in cfg.layers if layer.rope)))
    return {
        "attention_bias": cfg.qkv_bias,
        "gating": "per-head" if gate.is_per_head else "per-element",
        "layer_types": cfg.layer_types,
        "sliding_window": cfg.window or 512,
        "rope_parameters": _ROPES | ropes,
        "num_attention_heads_per_layer": [layer.num_heads for layer in cfg.layers],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "mlp_layer_types": ["sparse" if cfg.is_sparse(i) else "dense" for i in range(cfg.num_layers)],
        "moe_routed_scaling_factor": moe.gate_scale,
        "moe_router_logit_softcapping": moe.logit_cap or 0.0,
        "shared_expert_intermediate_size": moe.shared_size,
    }


LAGUNA = Family(
    name="laguna",
    architecture="LagunaForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=(
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    defaults={"head_dim": 128, "num_key_value_heads": 8},
    fixed_values={"moe_apply_router_weight_on_input": False},
    weights=(
        *STACKED_EXPERTS,
        WeightRule((f"{_LAYER}.mlp.gate.expert_bias",), (f"{_LAYER}.mlp.experts.e_score_correction_bias",)),
        *(
            WeightRule(
                (f"{_LAYER}.mlp.shared_experts.{part}_proj.weight",),
                (f"{_LAYER}.mlp.shared_expert.{part}_proj.weight",),
            )
            for part in ("gate", "up", "down")
        ),
    ),
    tp_plan={**DENSE_TP_PLAN, f"{_LAYER}.self_attn.g_proj": "column"},
    has_windows=True,
    scratch=lambda scratch: {
        "attention_gate": AttentionGate("g_proj", "softplus", is_per_head=True),
        "layers": scratch_layers(scratch, lambda layer: layer % 4 != 0),
        "moe": scratch_moe(
            scratch, 1, has_expert_bias=True, is_sigmoid=True, shared_size=scratch.moe_intermediate_size
        ),
    },
)
