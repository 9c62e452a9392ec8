"""qwen3_moe: qwen3 with experts in (most) blocks; softmax router, no shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.families.family import EXPERT_BIAS, MOE_KEYS, STACKED_EXPERTS, scratch_moe
from stretto.families.own.dense import QWEN3
from stretto.families.shape import ModelConfig, MoEShape

_QWEN3_30B_A3B = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_MOE_KEYS = MOE_KEYS | {"norm_topk_prob": ("norm_topk_prob", False)}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    layers = range(hf["num_hidden_layers"])
    moe = MoEShape(
        **_MOE_KEYS.read(hf),
        sparse_layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
        has_expert_bias=hf.get("has_expert_bias", False),
    )
    return {"moe": moe}


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.moe is not None
    keys = QWEN3.to_hf(cfg) | {
        **_MOE_KEYS.write(cfg.moe),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(cfg.num_layers) if not cfg.is_sparse(i)],
        "output_router_logits": False,
    }
    return keys | ({"has_expert_bias": True} if cfg.moe.has_expert_bias else {})


QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    traits=replace(
        QWEN3.traits,
        implied=replace(QWEN3.traits.implied, expert_scores="softmax"),
        public={"Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B},
    ),
    architecture="Qwen3MoeForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=MOE_KEYS.required,
    defaults={},
    key_aliases={"num_local_experts": "num_experts"},
    weights=STACKED_EXPERTS + EXPERT_BIAS,
    scratch=lambda scratch: {"moe": scratch_moe(scratch)},
)
