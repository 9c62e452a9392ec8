"""qwen3_moe: qwen3 with experts in (most) blocks; softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from stretto.models.families.dense import QWEN3
from stretto.models.family import EXPERT_BIAS, STACKED_EXPERTS, Family, scratch_moe
from stretto.models.shape import ModelConfig, MoEShape


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    layers = range(hf["num_hidden_layers"])
    return QWEN3.fields(hf) | {
        "moe": MoEShape(
            num_experts=hf["num_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=hf.get("norm_topk_prob", False),
            sparse_layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
            has_expert_bias=hf.get("has_expert_bias", False),
        )
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    moe = cfg.moe
    assert moe is not None
    keys = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(cfg.num_layers) if i not in moe.sparse_layers],
        "output_router_logits": False,
    }
    return QWEN3.to_hf(cfg) | keys | ({"has_expert_bias": True} if moe.has_expert_bias else {})


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    fixed_values=QWEN3.fixed_values,
    key_aliases={"num_local_experts": "num_experts"},
    weights=(*STACKED_EXPERTS, EXPERT_BIAS),
    scratch=lambda scratch: {"moe": scratch_moe(scratch)},
)
