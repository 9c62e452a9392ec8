"""What Megatron-Core does not compute, which is known before a run starts; and what builds its networks.

Neither torch nor Megatron-Core is imported before a network is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import MegatronSection
from stretto.families.shape import ModelConfig, MoEShape
from stretto.families.table import TRAITS, family_of, traits_of

if TYPE_CHECKING:
    from stretto.trainer.network import Network

BACKEND = 'trainer.backend = "megatron"'
OTHERWISE = "leave trainer.backend out"
RECOMPUTED = ("norm", "mlp", "routed_experts")
"""Parts that [model.ac] may name."""

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent attention in our own modules; Megatron has that of the other norms there."""
QUICK_GELU = 1.702
"""Factor in the sigmoid of the one clamped gate that Megatron has."""

OF_MESH = {
    "tensor_model_parallel_size": "model.tp",
    "sequence_parallel": "model.tp",
    "context_parallel_size": "model.cp",
    "expert_model_parallel_size": "model.ep",
    "expert_tensor_parallel_size": "trainer.megatron.etp",
    "pipeline_model_parallel_size": "trainer.megatron.pp",
    "virtual_pipeline_model_parallel_size": "trainer.megatron.virtual_stages",
    "num_layers_in_first_pipeline_stage": "trainer.megatron.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "trainer.megatron.last_stage_layers",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
}
"""Arguments of Megatron that keys of ours have, and these keys."""
OF_MODEL = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "normalization", "layernorm_epsilon",
    "qk_layernorm", "rotary_interleaved", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_router_num_groups",
    "moe_router_group_topk", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_scaling_factor", "mscale_all_dim",
    "window_size", "window_attn_skip_freq", "softmax_type", "softmax_scale", "glu_linear_offset",
    "activation_func_clamp_value",
}  # fmt: skip
"""Arguments of Megatron that the model's config.json decides."""


def check(family: str, found: Mapping[str, Any], model: ModelSection, megatron: MegatronSection) -> None:
    """Check a model and what is computed again; found: its config.json, empty for a scratch model.

    Raises: ConfigError naming what Megatron does not compute.
    """
    _check_family(family_of({"model_type": family}))
    if found:
        from stretto.models.config import parse_config

        check_shape(cfg := parse_config(dict(found), "config.json"))
        check_mesh(cfg, model, megatron)
    check_overrides(megatron.overrides)
    ac = model.ac
    if ac is not None and ac.freq != 1:
        raise ConfigError(
            f"[model.ac] freq = {ac.freq}: Megatron computes neighbouring blocks again; use group_size or num_blocks"
        )
    if ac is not None and ac.mode == "selective" and (unknown := [t for t in ac.targets if t not in RECOMPUTED]):
        raise ConfigError(
            f"[model.ac] targets has {unknown[0]}, and Megatron computes {', '.join(RECOMPUTED)} again; leave it out"
        )


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raises: ConfigError for an argument that is said elsewhere."""
    for name in overrides:
        key = "trainer.megatron.overrides"
        if name in OF_MESH:
            raise ConfigError(f"{key}: {name} is said by {OF_MESH[name]}; set that, and leave it out here")
        if name in OF_MODEL:
            raise ConfigError(f"{key}: {name} is said by the model's config.json; leave it out")


def check_mesh(cfg: ModelConfig, model: ModelSection, megatron: MegatronSection) -> None:
    """Raises: ConfigError for a degree that Megatron does not have for the parts of this model."""
    if model.cp > 1 and (cfg.has_sinks or cfg.window is not None):
        raise ConfigError(
            f"[model] cp = {model.cp}: Megatron does not split tokens of attention with windows or sinks, which this "
            f"{cfg.family} has; use cp = 1, and tp, trainer.megatron.pp or ep instead"
        )
    if megatron.etp > 1 and cfg.moe is not None and cfg.moe.has_product_biases:
        raise ConfigError(
            f"trainer.megatron.etp = {megatron.etp}: Megatron does not divide experts with biases, which this "
            f"{cfg.family} has; use ep instead"
        )


def build_network(module: Any, **how: Any) -> Network:
    """The NetworkBuilder of the backend, with `section`, how Megatron spreads a model; imports Megatron-Core.

    Raises: ConfigError as `MegatronNetwork`, and for a model of transformers'.
    """
    from stretto.models.decoder import Decoder
    from stretto_megatron.network import MegatronNetwork

    for each in (module, how.get("reference")):
        if each is not None and not isinstance(each, Decoder):
            raise ConfigError(f"{BACKEND} trains models of our own families; leave model.impl out")
        if each is not None:
            check_shape(each.config)
            check_mesh(each.config, how["model"], how["section"])
    return MegatronNetwork(module, **how)


def check_shape(cfg: ModelConfig) -> None:
    """Raises: ConfigError for a model that Megatron's layers do not compute as ours do."""
    _check_family(cfg.family)
    parts = _attention_parts(cfg) | ({} if cfg.moe is None else _expert_parts(cfg.moe))
    if there := [what for what, is_there in parts.items() if is_there]:
        raise ConfigError(f"{BACKEND} does not compute {there[0]}, which this {cfg.family} has; {OTHERWISE}")


def _attention_parts(cfg: ModelConfig) -> dict[str, bool]:
    """What Megatron does not compute of attention and dense MLPs, and whether a model has it."""
    kinds = {(layer.num_heads, layer.rope) for layer in cfg.layers} or {(cfg.num_heads, cfg.rope)}
    windows = {layer.window for layer in cfg.layers if layer.window is not None}
    latent = cfg.shape_of("latent")
    has_biases = cfg.moe is not None and cfg.moe.has_product_biases
    parts = {
        "layers with different heads or rotations": len(kinds) > 1,
        "layers without a rotation": None in {rope for _, rope in kinds},
        "windows of different sizes": len(windows) > 1,
        "a gate on attention": cfg.attention_gate is not None,
        "norms over all heads together": cfg.is_qk_norm_joint,
        "biases in dense MLPs": cfg.mlp_bias,
        "biases in latent attention (attention_bias = true)": latent is not None and cfg.qkv_bias,
        "biases behind attention without biases in all experts": cfg.out_bias and not has_biases,
        "biases in experts without biases in attention": has_biases and not (cfg.out_bias and cfg.qkv_bias),
    }
    if latent is None:
        return parts | {"a YaRN rotation of a part of a head": cfg.rope.kind == "yarn" and cfg.rope.fraction != 1.0}
    return parts | {
        "latent attention whose queries have no rank (q_lora_rank = null)": latent.query_rank is None,
        f"norms of latent attention with another epsilon than the others ({LATENT_EPS:g})": cfg.rms_norm_eps
        != LATENT_EPS,
    }


def _expert_parts(moe: MoEShape) -> dict[str, bool]:
    """The same of a mixture."""
    gates = "experts whose sigmoids are not divided by their sum (norm_topk_prob = false)"
    groups = "groups of experts of which it adds up others than the two best (num_experts_per_tok / topk_group)"
    return {
        groups: moe.num_groups > moe.top_groups and moe.top_k // moe.top_groups != 2,
        "a gate on the shared expert": moe.has_shared_gate,
        "a bias in the router without biases in experts": moe.has_router_bias and not moe.has_product_biases,
        "biases in experts without one in the router": moe.has_product_biases and not moe.has_router_bias,
        f"another factor than {QUICK_GELU} in the gate of experts (swiglu_alpha)": moe.clamped is not None
        and moe.clamped.alpha != QUICK_GELU,
        gates: moe.is_sigmoid and moe.top_k > 1 and not moe.norm_topk_prob,
        "a single expert per token with a gate of 1 (norm_topk_prob = true)": moe.top_k == 1 and moe.norm_topk_prob,
    }


def _check_family(family: str) -> None:
    if not traits_of(family).is_in_megatron:
        there = ", ".join(name for name, traits in TRAITS.items() if traits.is_in_megatron)
        raise ConfigError(f"{BACKEND} computes {there}, and this is a {family}; {OTHERWISE}")
