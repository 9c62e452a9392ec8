"""qwen3_5_text and qwen3_5_moe_text: three blocks by the gated delta rule, then one with gated attention.

Norms are stored as their difference from 1, and only the first quarter of each head is rotated. The mixture has one
expert that computes every token, with a gate. Positions are those of text; models with images are another `model_type`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.models.family import STACKED_EXPERTS, Family, WeightRule, scratch_moe
from stretto.models.shape import GatedDeltaShape, ModelConfig, MoEShape, Rope

if TYPE_CHECKING:
    from stretto.config.sections.model import ScratchSection

_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""Fields of GatedDeltaShape and their keys in config.json."""


_MOE_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_MLP = "model.layers.{layer}.mlp"
_ROTARY_FRACTION = 0.25


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    layers = range(hf["num_hidden_layers"])
    every = hf.get("full_attention_interval", 4)
    kinds = hf.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in layers
    ]
    return {
        "gated_delta": GatedDeltaShape(**{field: hf[key] for field, key in _KEYS.items()}),
        "mixers": tuple("gated_delta" if kind == "linear_attention" else "paired" for kind in kinds),
        "has_centred_norms": True,
        "qkv_bias": hf.get("attention_bias", False),
        "out_bias": hf.get("attention_bias", False),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    shape = cfg.gated_delta
    assert shape is not None
    kinds = ["linear_attention" if mixer == "gated_delta" else "full_attention" for mixer in cfg.mixers]
    return {key: getattr(shape, field) for field, key in _KEYS.items()} | {
        "layer_types": kinds,
        "attention_bias": cfg.qkv_bias,
    }


def _moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    return _fields(hf) | {
        "moe": MoEShape(
            num_experts=hf["num_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=True,
            sparse_layers=tuple(range(hf["num_hidden_layers"])),
            shared_size=hf["shared_expert_intermediate_size"],
            has_shared_gate=True,
        )
    }


def _moe_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    moe = cfg.moe
    assert moe is not None
    return _to_hf(cfg) | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_size,
        "output_router_logits": False,
    }


def _scratch(scratch: ScratchSection) -> dict[str, Any]:
    every = min(4, scratch.num_layers)
    kinds = ["paired" if (i + 1) % every == 0 else "gated_delta" for i in range(scratch.num_layers)]
    return {
        "gated_delta": GatedDeltaShape(
            num_key_heads=scratch.num_kv_heads,
            num_value_heads=scratch.num_heads,
            key_head_dim=scratch.head_dim,
            value_head_dim=scratch.head_dim,
            conv_width=4,
        ),
        "mixers": tuple(kinds),
        "has_centred_norms": True,
        "rope": Rope(theta=10_000.0, fraction=_ROTARY_FRACTION),
    }


def _scratch_moe(scratch: ScratchSection) -> dict[str, Any]:
    moe = scratch_moe(
        scratch, shared_size=scratch.moe_intermediate_size, has_shared_gate=True, has_expert_bias=False
    )
    return _scratch(scratch) | {"moe": moe}


QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=tuple(_KEYS.values()),
    defaults={"head_dim": 256},
    layer_types=("full_attention", "linear_attention"),
    rotary_fraction=_ROTARY_FRACTION,
    scratch=_scratch,
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=_moe_fields,
    to_hf=_moe_to_hf,
    required=(*_KEYS.values(), *_MOE_KEYS),
    defaults={"head_dim": 256, "num_key_value_heads": 2},
    key_aliases={"moe_intermediate_size": "intermediate_size"},
    layer_types=QWEN3_5.layer_types,
    rotary_fraction=_ROTARY_FRACTION,
    scratch=_scratch_moe,
    weights=(
        *STACKED_EXPERTS,
        *(
            WeightRule((f"{_MLP}.shared_experts.{part}.weight",), (f"{_MLP}.shared_expert.{part}.weight",))
            for part in ("gate_proj", "up_proj", "down_proj")
        ),
    ),
)
