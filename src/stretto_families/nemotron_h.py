"""nemotron_h (Nemotron 3): each block is Mamba 2, attention, an MLP, or experts.

Experts may compute small vectors. Attention does not rotate by position; MLPs and experts have no gate. In checkpoints
every block has one norm and one `mixer`, whatever it is; here they have the names that other families have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.base.errors import DataError
from stretto.families.family import (
    BALANCED_SIGMOID,
    GROUPED_MOE_KEYS,
    Family,
    Keys,
    Scratch,
    WeightRule,
    scratch_shared_moe,
)
from stretto.families.shape import ATTENTION, NO_MIXER, LayerAttention, ModelConfig, MoEShape
from stretto.families.traits import Traits, VllmTraits
from stretto_families.shapes import MambaShape, mamba

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.families.shape import Mixer

_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_MIXERS = ("linear_attention", "full_attention")
_MAMBA_KEYS = Keys(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    num_groups="n_groups",
    state_dim="ssm_state_size",
    conv_width="conv_kernel",
    min_step="time_step_min",
    has_bias=("use_bias", False),
    has_conv_bias=("use_conv_bias", True),
)
"""Fields of MambaShape and their keys in config.json."""
_MOE_KEYS = GROUPED_MOE_KEYS | {
    "shared_size": "moe_shared_expert_intermediate_size",
    "latent_size": ("moe_latent_size", None),
}


def _normalise(hf: dict[str, Any]) -> dict[str, Any]:
    """The kinds of blocks as `layer_types`, from any of the three ways to give them."""
    kinds = hf.get("layers_block_type") or hf.get("layer_types")
    if not kinds:
        kinds = [_LETTERS.get(letter, letter) for letter in hf.get("hybrid_override_pattern") or ()]
    kinds = [_OLD_NAMES.get(kind, kind) for kind in kinds]
    return hf | {"layer_types": kinds, "num_hidden_layers": len(kinds) or None}


def _read_mixture(hf: dict[str, Any]) -> MoEShape | None:
    layers = tuple(layer for layer, kind in enumerate(hf["layer_types"]) if kind == "moe")
    if not layers:
        return None
    if missing := [key for key in _MOE_KEYS.required if hf.get(key) is None]:
        raise DataError(
            f"config.json: no value for {', '.join(missing)}; a nemotron_h with experts must give every one"
        )
    return MoEShape(**_MOE_KEYS.read(hf), **BALANCED_SIGMOID, sparse_layers=layers, is_plain=True)


def _mixers(kinds: Sequence[str], shape: MambaShape) -> tuple[Mixer, ...]:
    by_kind = dict(zip(_MIXERS, (mamba(shape), ATTENTION)))
    return tuple(by_kind.get(kind, NO_MIXER) for kind in kinds)


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    kinds = hf["layer_types"]
    return {
        "layers": (LayerAttention(hf["num_attention_heads"], None),) * len(kinds),
        "mixers": _mixers(kinds, MambaShape(**_MAMBA_KEYS.read(hf))),
        "layers_without_mlp": tuple(i for i, kind in enumerate(kinds) if kind in _MIXERS),
        "moe": _read_mixture(hf),
    }


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
    kind_of = dict(zip(("mamba", "attention"), _MIXERS))
    shape = cfg.shape_of("mamba") or MambaShape(**_MAMBA_KEYS.read({"time_step_min": 0.001} | cfg.hf))
    keys = _MAMBA_KEYS.write(shape) | {
        "layers_block_type": [
            kind_of.get(mixer.name, "moe" if cfg.is_sparse(layer) else "mlp") for layer, mixer in enumerate(cfg.mixers)
        ],
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope.theta},
        "layer_norm_epsilon": cfg.rms_norm_eps,
        "num_nextn_predict_layers": 0,
    }
    return keys if cfg.moe is None else keys | _MOE_KEYS.write(cfg.moe)


def _rules() -> tuple[WeightRule, ...]:
    ours, theirs = "model.layers.{layer}", "backbone.layers.{layer}"
    names = {
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
    parameters = [(part, f"{name}.{kind}") for part in linears for name in linears[part] for kind in ("weight", "bias")]
    parameters += [("linear_attn", name) for name in ("A_log", "D", "dt_bias", "norm.weight")]
    names |= {f"{ours}.{part}.{name}": f"{theirs}.mixer.{name}" for part, name in parameters}
    return tuple(WeightRule((our_name,), (their_name,)) for our_name, their_name in names.items())


def _scratch(scratch: Scratch) -> dict[str, Any]:
    kinds = [("linear_attention", "moe", "full_attention", "moe")[i % 4] for i in range(scratch.num_layers)]
    experts = tuple(i for i, kind in enumerate(kinds) if kind == "moe")
    shape = MambaShape(
        num_heads=scratch.num_heads,
        head_dim=scratch.head_dim,
        num_groups=scratch.num_kv_heads,
        state_dim=scratch.head_dim,
        conv_width=4,
        min_step=0.001,
    )
    return {
        "layers": (LayerAttention(scratch.num_heads, None),) * len(kinds),
        "mixers": _mixers(kinds, shape),
        "layers_without_mlp": tuple(i for i, kind in enumerate(kinds) if kind in _MIXERS),
        "moe": replace(scratch_shared_moe(scratch, is_plain=True), sparse_layers=experts) if experts else None,
    }


NEMOTRON_H = Family(
    name="nemotron_h",
    traits=Traits(
        renderer="nemotron-3",
        uncut={"tp": "its recurrent layers", "cp": "the state of its recurrent layers"},
        is_recurrent=True,
        vllm=VllmTraits(
            has_own_head=True,
            adapts_experts=False,
            prediction_key="num_nextn_predict_layers",
            cpu_fault="has no experts without gates, as those of nemotron_h are",
            cpu_fault_key="n_routed_experts",
        ),
    ),
    architecture="NemotronHForCausalLM",
    constants={"has_qk_norm": False, "has_plain_mlp": True},
    keys=Keys(mlp_bias=("mlp_bias", False)),
    fields=_fields,
    to_hf=_to_hf,
    required=_MAMBA_KEYS.required,
    defaults={"time_step_min": 0.001, "layer_norm_epsilon": 1e-5},
    fixed_values={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "sliding_window": None},
    key_aliases={"layer_norm_epsilon": "rms_norm_eps", "num_local_experts": "n_routed_experts"},
    normalise=_normalise,
    layer_types=tuple(_LETTERS.values()),
    weights=_rules(),
    scratch=_scratch,
)
