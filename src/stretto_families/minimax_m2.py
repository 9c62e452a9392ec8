"""minimax_m2: experts in every block; queries and keys are normed over all heads together."""

from __future__ import annotations

from typing import Any

from stretto.families.family import (
    BALANCED_SIGMOID,
    LOCAL_MOE_KEYS,
    Family,
    WeightRule,
    renamed_in_layers,
    scratch_moe,
    scratch_rope,
)
from stretto.families.shape import ModelConfig, MoEShape
from stretto.families.traits import Implied, Traits, VllmTraits

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    layers = tuple(range(hf["num_hidden_layers"]))
    return {"moe": MoEShape(**LOCAL_MOE_KEYS.read(hf), **BALANCED_SIGMOID, sparse_layers=layers)}


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    return LOCAL_MOE_KEYS.write(cfg.moe) | {
        "rotary_dim": int(cfg.head_dim * cfg.rope.fraction),
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    }


MINIMAX_M2 = Family(
    name="minimax_m2",
    traits=Traits(
        renderer="minimax-m2",
        undivided_heads="normalises the queries of all heads together",
        packs_in_transformers=True,
        vllm=VllmTraits(has_own_head=True, adapts=True),
        implied=Implied(expert_scores="sigmoid", has_shared_gate=False),
    ),
    architecture="MiniMaxM2ForCausalLM",
    constants={"is_qk_norm_joint": True},
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
        *renamed_in_layers(
            {
                "mlp.gate.weight": "block_sparse_moe.gate.weight",
                "mlp.gate.expert_bias": "block_sparse_moe.e_score_correction_bias",
                "mlp.experts.down_proj": "block_sparse_moe.experts.{expert}.w2.weight",
            }
        ),
        WeightRule(
            ("model.layers.{layer}.mlp.experts.gate_up_proj",), (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight")
        ),
    ),
    rotary_fraction=1.0,
    scratch=lambda scratch: {"rope": scratch_rope(0.5), "moe": scratch_moe(scratch, **BALANCED_SIGMOID)},
)
