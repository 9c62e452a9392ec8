"""glm4_moe (GLM-4.5, INTELLECT-3): experts in all but the first blocks.

The router has sigmoid scores, a bias and groups; one expert is shared. Half of each head is rotated. Layers for
multi-token prediction, which follow the last block in checkpoints, are not read.
"""

from __future__ import annotations

from typing import Any

from stretto.families.family import (
    BALANCED_SIGMOID,
    EXPERT_BIAS,
    GROUPED_MOE_KEYS,
    STACKED_EXPERTS,
    Family,
    Keys,
    first_sparse_layer,
    scratch_shared_moe,
)
from stretto.families.shape import ModelConfig, MoEShape
from stretto.families.traits import Implied, Traits, VllmTraits


def read_mixture(hf: dict[str, Any], first_sparse: int) -> MoEShape:
    """The mixture of glm4_moe and deepseek_v3; first_sparse: default of first_k_dense_replace."""
    num_shared = hf.get("n_shared_experts", 1)
    return MoEShape(
        **GROUPED_MOE_KEYS.read(hf),
        **BALANCED_SIGMOID,
        sparse_layers=tuple(range(hf.get("first_k_dense_replace", first_sparse), hf["num_hidden_layers"])),
        shared_size=hf["moe_intermediate_size"] * num_shared if num_shared else None,
    )


def write_mixture(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `read_mixture`."""
    assert cfg.moe is not None
    return GROUPED_MOE_KEYS.write(cfg.moe) | {
        "first_k_dense_replace": first_sparse_layer(cfg),
        "n_shared_experts": (cfg.moe.shared_size or 0) // cfg.moe.intermediate_size,
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Family(
    name="glm4_moe",
    traits=Traits(
        renderer="glm-4.5",
        packs_in_transformers=True,
        vllm=VllmTraits(has_own_head=True, adapts=True, prediction_key="num_nextn_predict_layers"),
        is_in_megatron=True,
        implied=Implied(expert_scores="sigmoid", has_shared_gate=False),
    ),
    architecture="Glm4MoeForCausalLM",
    keys=Keys(has_qk_norm=("use_qk_norm", False), qkv_bias=("attention_bias", False)),
    fields=lambda hf: {"moe": read_mixture(hf, 1)},
    to_hf=write_mixture,
    required=GROUPED_MOE_KEYS.required,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    key_aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    weights=STACKED_EXPERTS + EXPERT_BIAS,
    rotary_fraction=0.5,
    scratch=lambda scratch: {"has_qk_norm": True, "moe": scratch_shared_moe(scratch, 1)},
)
