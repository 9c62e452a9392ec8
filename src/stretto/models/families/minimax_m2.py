"""minimax_m2: experts in every block, chosen by biased sigmoids; queries and keys are normed over all their heads."""

from __future__ import annotations

from typing import Any

from stretto.models.family import Family, WeightRule, scratch_moe
from stretto.models.shape import ModelConfig, MoEShape, Rope

_OURS, _THEIRS = "model.layers.{layer}.mlp", "model.layers.{layer}.block_sparse_moe"


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "is_qk_norm_joint": True,
        "moe": MoEShape(
            num_experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=tuple(range(hf["num_hidden_layers"])),
            has_expert_bias=True,
            is_sigmoid=True,
        ),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    moe = cfg.moe
    assert moe is not None
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.intermediate_size,
        "rotary_dim": int(cfg.head_dim * cfg.rope.fraction),
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    }


MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=("num_local_experts", "num_experts_per_tok"),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5_000_000.0},
    fixed_values={
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    },
    key_aliases={"num_experts": "num_local_experts"},
    weights=(
        WeightRule((f"{_OURS}.gate.weight",), (f"{_THEIRS}.gate.weight",)),
        WeightRule((f"{_OURS}.gate.expert_bias",), (f"{_THEIRS}.e_score_correction_bias",)),
        WeightRule(
            (f"{_OURS}.experts.gate_up_proj",),
            (f"{_THEIRS}.experts.{{expert}}.w1.weight", f"{_THEIRS}.experts.{{expert}}.w3.weight"),
        ),
        WeightRule((f"{_OURS}.experts.down_proj",), (f"{_THEIRS}.experts.{{expert}}.w2.weight",)),
    ),
    rotary_fraction=1.0,
    scratch=lambda scratch: {
        "rope": Rope(theta=10_000.0, fraction=0.5),
        "is_qk_norm_joint": True,
        "moe": scratch_moe(scratch, has_expert_bias=True, is_sigmoid=True),
    },
)
