"""deepseek_v3 (DeepSeek V3, Kimi K2): multi-head latent attention, experts.

Experts are chosen from groups by sigmoid scores. In config.json `head_dim` is that of the rotated part; here it is the
width of a whole query. Layers for multi-token prediction are not read.
"""

from __future__ import annotations

from typing import Any

from stretto.families.family import (
    ATTENTION_BIAS,
    EXPERT_BIAS,
    GROUPED_MOE_KEYS,
    STACKED_EXPERTS,
    Family,
    Keys,
    Scratch,
    scratch_shared_moe,
)
from stretto.families.own.glm4_moe import GLM4_MOE, read_mixture, write_mixture
from stretto.families.rope_keys import rope_to_hf
from stretto.families.shape import ModelConfig, yarn_scale
from stretto.families.traits import Implied, Traits, VllmTraits
from stretto_families.shapes import LatentShape, latent

_LATENT_KEYS = Keys(
    query_rank=("q_lora_rank", None),
    rank="kv_lora_rank",
    plain_dim="qk_nope_head_dim",
    rotated_dim="qk_rope_head_dim",
    value_dim="v_head_dim",
)
"""Fields of LatentShape and their keys in config.json."""
UNCUT = {"tp": "its latent attention"}
REQUIRED = _LATENT_KEYS.required + GROUPED_MOE_KEYS.required
FIXED_VALUES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True}


def normalise(hf: dict[str, Any]) -> dict[str, Any]:
    """head_dim becomes that of whole queries and keys, `mscale` a factor on cos and sin."""
    if any(hf.get(key) is None for key in (*REQUIRED, "num_attention_heads")):
        return hf  # refused later, by name
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
        "n_group": hf.get("n_group") or 1,
        "topk_group": hf.get("topk_group") or 1,
        key: rope or None,
        "yarn": {"yarn_mscale": all_dims, "yarn_factor": rope.get("factor") or 1.0} if all_dims else {},
    }


def read_latent(hf: dict[str, Any]) -> LatentShape:
    """The shape of latent attention, without an indexer."""
    return LatentShape(**_LATENT_KEYS.read(hf), **hf["yarn"])


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    return {"mixers": (latent(read_latent(hf)),) * hf["num_hidden_layers"], "moe": read_mixture(hf, 3)}


def shape_of(cfg: ModelConfig) -> LatentShape:
    """The shape of a model's latent attention."""
    shape = cfg.shape_of("latent")
    assert isinstance(shape, LatentShape)
    return shape


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The reverse of `_fields` and `normalise`."""
    shape = shape_of(cfg)
    rope = rope_to_hf(cfg.rope)
    rope.pop("partial_rotary_factor", None)
    if shape.yarn_mscale:
        rope["mscale_all_dim"] = shape.yarn_mscale
    return {
        **write_mixture(cfg),
        **_LATENT_KEYS.write(shape),
        "rope_parameters": rope,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "head_dim": shape.rotated_dim,
        "num_key_value_heads": cfg.num_heads,
    }


def scratch_latent(scratch: Scratch) -> LatentShape:
    """Small vectors are half as wide as the residual stream."""
    return LatentShape(
        query_rank=max(scratch.hidden_size // 2, 1),
        rank=max(scratch.hidden_size // 2, 1),
        plain_dim=scratch.head_dim,
        rotated_dim=scratch.head_dim // 2 + scratch.head_dim // 2 % 2,
        value_dim=scratch.head_dim,
    )


def _scratch(scratch: Scratch) -> dict[str, Any]:
    mixers = (latent(scratch_latent(scratch)),) * scratch.num_layers
    return {"mixers": mixers, "moe": scratch_shared_moe(scratch, 1)}


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    traits=Traits(
        renderer="deepseek-v3",
        aliases={"kimi_k2": "kimi-k2"},
        uncut=UNCUT,
        vllm=VllmTraits(has_own_head=True, prediction_key="num_nextn_predict_layers"),
        is_in_megatron=True,
        implied=Implied(expert_scores="sigmoid", has_shared_gate=False),
    ),
    architecture="DeepseekV3ForCausalLM",
    constants={"has_qk_norm": False},
    keys=ATTENTION_BIAS,
    fields=_fields,
    to_hf=to_hf,
    required=REQUIRED,
    defaults={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    fixed_values=FIXED_VALUES,
    key_aliases=GLM4_MOE.key_aliases,
    normalise=normalise,
    weights=STACKED_EXPERTS + EXPERT_BIAS,
    rotary_fraction=1.0,
    is_rotary_interleaved=True,
    scratch=_scratch,
)
