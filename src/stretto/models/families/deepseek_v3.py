"""deepseek_v3 (DeepSeek V3, Kimi K2): multi-head latent attention, and a mixture chosen from groups by sigmoid scores.

In config.json `head_dim` is that of the rotated part; here it is the width of a whole query. Layers for multi-token
prediction are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.models.families.glm4_moe import mixture_to_hf
from stretto.models.families.rope_keys import rope_to_hf
from stretto.models.family import EXPERT_BIAS, STACKED_EXPERTS, Family, scratch_moe
from stretto.models.shape import LatentShape, ModelConfig, MoEShape, yarn_scale

if TYPE_CHECKING:
    from stretto.config.sections.model import ScratchSection

REQUIRED = (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip


def normalise(hf: dict[str, Any]) -> dict[str, Any]:
    """head_dim is that of queries and keys, of which a part is rotated; `mscale` becomes a factor on cos and sin."""
    if any(hf.get(key) is None for key in (*REQUIRED, "num_attention_heads")):
        return hf  # said by name later
    width = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = dict(hf.get(key) or {})
    mscale, all_dims = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    if mscale and all_dims and rope.get("attention_factor") is None:
        factor = rope.get("factor") or 1.0
        rope["attention_factor"] = yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)
    rope.pop("partial_rotary_factor", None)
    return hf | {
        "head_dim": width,
        "num_key_value_heads": hf["num_attention_heads"],
        "partial_rotary_factor": hf["qk_rope_head_dim"] / width,
        key: rope or None,
        "yarn": {"yarn_mscale": all_dims, "yarn_factor": rope.get("factor") or 1.0} if all_dims else {},
    }


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The shapes of latent attention and of the mixture."""
    first, shared = hf.get("first_k_dense_replace", 3), hf.get("n_shared_experts", 1)
    bias = hf.get("attention_bias", False)
    return {
        "has_qk_norm": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "mixers": ("latent",) * hf["num_hidden_layers"],
        "latent": LatentShape(
            query_rank=hf.get("q_lora_rank"),
            rank=hf["kv_lora_rank"],
            plain_dim=hf["qk_nope_head_dim"],
            rotated_dim=hf["qk_rope_head_dim"],
            value_dim=hf["v_head_dim"],
            **hf["yarn"],
        ),
        "moe": MoEShape(
            num_experts=hf["n_routed_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=hf.get("norm_topk_prob", True),
            sparse_layers=tuple(range(first, hf["num_hidden_layers"])),
            has_expert_bias=True,
            is_sigmoid=True,
            num_groups=hf.get("n_group") or 1,
            top_groups=hf.get("topk_group") or 1,
            gate_scale=hf.get("routed_scaling_factor", 1.0),
            shared_size=hf["moe_intermediate_size"] * shared if shared else None,
        ),
    }


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `fields` and `normalise`."""
    latent = cfg.latent
    assert latent is not None
    rope = {key: value for key, value in rope_to_hf(cfg.rope).items() if key != "partial_rotary_factor"}
    if latent.yarn_mscale:
        rope["mscale_all_dim"] = latent.yarn_mscale
    return mixture_to_hf(cfg) | {
        "rope_parameters": rope,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "head_dim": latent.rotated_dim,
        "num_key_value_heads": cfg.num_heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotated_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": cfg.qkv_bias,
    }


def scratch(scratch: ScratchSection) -> dict[str, Any]:
    """Latent attention with vectors of half the width of the residual stream, and one shared expert."""
    return {
        "has_qk_norm": False,
        "mixers": ("latent",) * scratch.num_layers,
        "latent": LatentShape(
            query_rank=max(scratch.hidden_size // 2, 1),
            rank=max(scratch.hidden_size // 2, 1),
            plain_dim=scratch.head_dim,
            rotated_dim=scratch.head_dim // 2 + scratch.head_dim // 2 % 2,
            value_dim=scratch.head_dim,
        ),
        "moe": scratch_moe(
            scratch, 1, is_sigmoid=True, shared_size=scratch.moe_intermediate_size, has_expert_bias=True
        ),
    }


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=fields,
    to_hf=to_hf,
    required=REQUIRED,
    defaults={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    fixed_values={
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    key_aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    normalise=normalise,
    weights=(*STACKED_EXPERTS, EXPERT_BIAS),
    rotary_fraction=1.0,
    is_rotary_interleaved=True,
    scratch=scratch,
)
