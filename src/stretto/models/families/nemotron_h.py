"""nemotron_h (Nemotron 3): each block is one of Mamba 2, attention, an MLP or a mixture, which may be of small vectors.

Attention does not rotate by position; MLPs and experts have no gate. In checkpoints every block has one norm and one
`mixer`, whatever it is; here they have the names that other families have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.base.errors import DataError
from stretto.models.family import Family, WeightRule, scratch_moe
from stretto.models.shape import LayerAttention, MambaShape, ModelConfig, MoEShape

if TYPE_CHECKING:
    from stretto.config.sections.model import ScratchSection

_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_MIXERS = {"linear_attention": "mamba", "full_attention": "attention"}
_MAMBA = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "num_groups": "n_groups",
    "state_dim": "ssm_state_size",
    "conv_width": "conv_kernel",
    "min_step": "time_step_min",
}
"""Fields of MambaShape and their keys in config.json."""
_MOE_KEYS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip


def _normalise(hf: dict[str, Any]) -> dict[str, Any]:
    """The kinds of blocks as `layer_types`, from any of the three ways to give them."""
    given = hf.get("layers_block_type") or hf.get("layer_types")
    kinds = [_LETTERS.get(letter, letter) for letter in hf.get("hybrid_override_pattern") or ()]
    kinds = [_OLD_NAMES.get(kind, kind) for kind in given or kinds]
    found = {"layer_types": kinds, "num_hidden_layers": len(kinds) or None}
    return {"time_step_min": 0.001, "layer_norm_epsilon": 1e-5} | hf | found


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    kinds = hf["layer_types"]
    moe = None
    if "moe" in kinds:
        if missing := [key for key in _MOE_KEYS if hf.get(key) is None]:
            raise DataError(
                f"config.json: no value for {', '.join(missing)}; a nemotron_h with experts must give every one"
            )
        moe = MoEShape(
            num_experts=hf["n_routed_experts"],
            top_k=hf["num_experts_per_tok"],
            intermediate_size=hf["moe_intermediate_size"],
            norm_topk_prob=hf.get("norm_topk_prob", True),
            sparse_layers=tuple(i for i, kind in enumerate(kinds) if kind == "moe"),
            has_expert_bias=True,
            is_sigmoid=True,
            num_groups=hf.get("n_group", 1),
            top_groups=hf.get("topk_group", 1),
            gate_scale=hf.get("routed_scaling_factor", 1.0),
            shared_size=hf["moe_shared_expert_intermediate_size"],
            is_plain=True,
            latent_size=hf.get("moe_latent_size"),
        )
    return {
        "has_qk_norm": False,
        "mlp_bias": hf.get("mlp_bias", False),
        "has_plain_mlp": True,
        "layers": (LayerAttention(hf["num_attention_heads"], None),) * len(kinds),
        "mixers": tuple(_MIXERS.get(kind, "none") for kind in kinds),
        "layers_without_mlp": tuple(i for i, kind in enumerate(kinds) if kind in _MIXERS),
        "mamba": MambaShape(
            **{field: hf[key] for field, key in _MAMBA.items()},
            has_bias=hf.get("use_bias", False),
            has_conv_bias=hf.get("use_conv_bias", True),
        ),
        "moe": moe,
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    mamba, moe = cfg.mamba, cfg.moe
    assert mamba is not None
    names = {mixer: kind for kind, mixer in _MIXERS.items()}
    kinds = [
        names.get(mixer, "moe" if cfg.is_sparse(layer) else "mlp") for layer, mixer in enumerate(cfg.mixers)
    ]
    found = {
        "layers_block_type": kinds,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope.theta},
        "layer_norm_epsilon": cfg.rms_norm_eps,
        "mlp_bias": cfg.mlp_bias,
        "use_bias": mamba.has_bias,
        "use_conv_bias": mamba.has_conv_bias,
        "num_nextn_predict_layers": 0,
    }
    found |= {key: getattr(mamba, field) for field, key in _MAMBA.items()}
    if moe is not None:
        found |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "moe_shared_expert_intermediate_size": moe.shared_size,
            "moe_latent_size": moe.latent_size,
            "norm_topk_prob": moe.norm_topk_prob,
            "n_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "routed_scaling_factor": moe.gate_scale,
        }
    return found


def _rules() -> tuple[WeightRule, ...]:
    ours, theirs = "model.layers.{layer}", "backbone.layers.{layer}"
    found = {
        "model.embed_tokens.weight": "backbone.embeddings.weight",
        "model.norm.weight": "backbone.norm_f.weight",
        f"{ours}.input_layernorm.weight": f"{theirs}.norm.weight",
        f"{ours}.post_attention_layernorm.weight": f"{theirs}.norm.weight",
        f"{ours}.mlp.gate.weight": f"{theirs}.mixer.gate.weight",
        f"{ours}.mlp.gate.expert_bias": f"{theirs}.mixer.gate.e_score_correction_bias",
        f"{ours}.mlp.experts.gate_up_proj": f"{theirs}.mixer.experts.{{expert}}.up_proj.weight",
        f"{ours}.mlp.experts.down_proj": f"{theirs}.mixer.experts.{{expert}}.down_proj.weight",
    }
    linears = {
        "linear_attn": ("conv1d", "in_proj", "out_proj"),
        "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp": (
            "up_proj", "down_proj", "shared_experts.up_proj", "shared_experts.down_proj", "fc1_latent_proj",
            "fc2_latent_proj",
        ),
    }  # fmt: skip
    names = [
        (part, f"{name}.{kind}") for part in linears for name in linears[part] for kind in ("weight", "bias")
    ]
    names += [("linear_attn", name) for name in ("A_log", "D", "dt_bias", "norm.weight")]
    found |= {f"{ours}.{part}.{name}": f"{theirs}.mixer.{name}" for part, name in names}
    return tuple(WeightRule((mine,), (other,)) for mine, other in found.items())


def _scratch(scratch: ScratchSection) -> dict[str, Any]:
    kinds = [("mamba", "none", "attention", "none")[i % 4] for i in range(scratch.num_layers)]
    experts = [i for i, kind in enumerate(kinds) if kind == "none"]
    moe = scratch_moe(
        scratch,
        is_sigmoid=True,
        is_plain=True,
        shared_size=scratch.moe_intermediate_size,
        has_expert_bias=True,
    )
    return {
        "has_qk_norm": False,
        "has_plain_mlp": True,
        "layers": (LayerAttention(scratch.num_heads, None),) * len(kinds),
        "mixers": tuple(kinds),
        "layers_without_mlp": tuple(i for i, kind in enumerate(kinds) if kind != "none"),
        "mamba": MambaShape(
            num_heads=scratch.num_heads,
            head_dim=scratch.head_dim,
            num_groups=scratch.num_kv_heads,
            state_dim=scratch.head_dim,
            conv_width=4,
            min_step=0.001,
        ),
        "moe": replace(moe, sparse_layers=tuple(experts)) if experts else None,
    }


NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    fields=_fields,
    to_hf=_to_hf,
    required=tuple(_MAMBA.values()),
    fixed_values={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "sliding_window": None},
    key_aliases={"layer_norm_epsilon": "rms_norm_eps", "num_local_experts": "n_routed_experts"},
    normalise=_normalise,
    layer_types=tuple(_LETTERS.values()),
    weights=_rules(),
    scratch=_scratch,
)
