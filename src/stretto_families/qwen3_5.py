"""qwen3_5_text, qwen3_5_moe_text, qwen3_5, qwen3_5_moe: three blocks of the gated delta rule per one of attention.

Attention is gated. Norms are stored as their difference from 1, and only the first quarter of each head is rotated.
The mixture has one expert that computes every token, with a gate. Those without `_text` read images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.families.family import (
    ATTENTION_BIAS,
    MOE_KEYS,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    Family,
    Keys,
    Scratch,
    scratch_moe,
)
from stretto.families.own.qwen3_vl import with_vision
from stretto.families.shape import ModelConfig, MoEShape
from stretto.families.traits import Implied, Traits, VllmTraits
from stretto_families.shapes import PAIRED, GatedDeltaShape, gated_delta

_DELTA_KEYS = Keys(
    num_key_heads="linear_num_key_heads",
    num_value_heads="linear_num_value_heads",
    key_head_dim="linear_key_head_dim",
    value_head_dim="linear_value_head_dim",
    conv_width="linear_conv_kernel_dim",
)
"""Fields of GatedDeltaShape and their keys in config.json."""
_MOE_KEYS = MOE_KEYS | {"shared_size": "shared_expert_intermediate_size"}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    layers = range(hf["num_hidden_layers"])
    every = hf.get("full_attention_interval", 4)
    kinds = hf.get("layer_types") or ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in layers]
    recurrent = gated_delta(GatedDeltaShape(**_DELTA_KEYS.read(hf)))
    return {"mixers": tuple(recurrent if kind == "linear_attention" else PAIRED for kind in kinds)}


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    kinds = ["full_attention" if mixer == PAIRED else "linear_attention" for mixer in cfg.mixers]
    shape = cfg.shape_of("gated_delta") or GatedDeltaShape(**_DELTA_KEYS.read(cfg.hf))
    return _DELTA_KEYS.write(shape) | {"layer_types": kinds}


def _moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    layers = tuple(range(hf["num_hidden_layers"]))
    return _fields(hf) | {"moe": MoEShape(**_MOE_KEYS.read(hf), sparse_layers=layers, has_shared_gate=True)}


def _moe_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    return _to_hf(cfg) | _MOE_KEYS.write(cfg.moe) | {"output_router_logits": False}


def _scratch(scratch: Scratch) -> dict[str, Any]:
    every = min(4, scratch.num_layers)
    shape = GatedDeltaShape(
        num_key_heads=scratch.num_kv_heads,
        num_value_heads=scratch.num_heads,
        key_head_dim=scratch.head_dim,
        value_head_dim=scratch.head_dim,
        conv_width=4,
    )
    recurrent = gated_delta(shape)
    return {"mixers": tuple(recurrent if (i + 1) % every else PAIRED for i in range(scratch.num_layers))}


def _scratch_moe(scratch: Scratch) -> dict[str, Any]:
    moe = scratch_moe(scratch, shared_size=scratch.moe_intermediate_size, has_shared_gate=True, has_expert_bias=False)
    return _scratch(scratch) | {"moe": moe}


_TRAITS = Traits(
    renderer="qwen3.5",
    uncut={"tp": "its recurrent layers"},
    is_recurrent=True,
    vllm=VllmTraits(is_bfloat16_on_cpu=True, prediction_key="mtp_num_hidden_layers"),
    implied=Implied(has_qk_norm=True, has_centred_norms=True, has_output_gate=True),
)

QWEN3_5 = Family(
    name="qwen3_5_text",
    traits=_TRAITS,
    architecture="Qwen3_5ForCausalLM",
    constants={"has_centred_norms": True},
    keys=ATTENTION_BIAS,
    fields=_fields,
    to_hf=_to_hf,
    required=_DELTA_KEYS.required,
    defaults={"head_dim": 256},
    layer_types=("full_attention", "linear_attention"),
    rotary_fraction=0.25,
    scratch=_scratch,
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    traits=replace(
        _TRAITS,
        is_all_sparse=True,
        vllm=replace(_TRAITS.vllm, always_normalises_gates=True),
        implied=replace(_TRAITS.implied, expert_scores="softmax", has_shared_gate=True),
    ),
    architecture="Qwen3_5MoeForCausalLM",
    fields=_moe_fields,
    to_hf=_moe_to_hf,
    required=_DELTA_KEYS.required + _MOE_KEYS.required,
    defaults={"head_dim": 256, "num_key_value_heads": 2},
    key_aliases={"moe_intermediate_size": "intermediate_size"},
    scratch=_scratch_moe,
    weights=STACKED_EXPERTS + SHARED_EXPERT,
)

QWEN3_5_VL = with_vision(
    QWEN3_5,
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    has_deepstack=False,
    traits=replace(QWEN3_5.traits, has_vision=True),
    rotary_sections=(11, 11, 10),
)

QWEN3_5_MOE_VL = with_vision(
    QWEN3_5_MOE,
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    has_deepstack=False,
    traits=replace(QWEN3_5_MOE.traits, has_vision=True),
    rotary_sections=(11, 11, 10),
)
