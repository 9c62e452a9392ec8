"""glm4_moe (GLM-4.5, INTELLECT-3): sigmoid router with a bias and groups, a shared expert, the first blocks dense.

Half of each head is rotated. Layers for multi-token prediction, which follow the last block in checkpoints, are not
read.
"""

from __future__ import annotations

from typing import Any

from stretto.models.family import EXPERT_BIAS, STACKED_EXPERTS, Family, scratch_moe
from stretto.models.shape import ModelConfig, MoEShape, Rope


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    shared = hf.get("n_shared_experts", 1)
    return {
        "has_qk_norm": hf.get("use_qk_norm", False),
        "qkv_bias": hf.get("attention_bias", False),
        "moe": MoEShape(
            num_experts=hf["n_routed_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=hf.get("norm_topk_prob", True),
            sparse_layers=tuple(range(hf.get("first_k_dense_replace", 1), hf["num_hidden_layers"])),
            has_expert_bias=True,
            is_sigmoid=True,
            num_groups=hf.get("n_group", 1),
            top_groups=hf.get("topk_group", 1),
            gate_scale=hf.get("routed_scaling_factor", 1.0),
            shared_size=hf["moe_intermediate_size"] * shared if shared else None,
        ),
    }


def mixture_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of a mixture with groups, shared experts and first blocks without experts; deepseek_v3 has the same."""
    moe = cfg.moe
    assert moe is not None
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "first_k_dense_replace": moe.sparse_layers[0] if moe.sparse_layers else cfg.num_layers,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.gate_scale,
        "n_shared_experts": (moe.shared_size or 0) // moe.intermediate_size,
        "num_nextn_predict_layers": 0,
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    return mixture_to_hf(cfg) | {"use_qk_norm": cfg.has_qk_norm, "attention_bias": cfg.qkv_bias}


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    key_aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    weights=(*STACKED_EXPERTS, EXPERT_BIAS),
    rotary_fraction=0.5,
    scratch=lambda scratch: {
        "rope": Rope(theta=10_000.0, fraction=0.5),
        "moe": scratch_moe(
            scratch, 1, has_expert_bias=True, is_sigmoid=True, shared_size=scratch.moe_intermediate_size
        ),
    },
)
