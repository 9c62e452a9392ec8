"""The model's shape on the command line against config.json: every mismatch in one message."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.families.table import VISION_FAMILIES, traits_of
from stretto_vime.flags import mixture
from stretto_vime.flags.flag import Flag, Kind, Values

Config = Mapping[str, Any]
_NORMALISES_QK = mixture.begins(lambda implied: implied.has_qk_norm)
_HAS_OUTPUT_GATE = mixture.begins(lambda implied: implied.has_output_gate)


def _first(config: Config, *fields: str) -> Any:
    """The first of these fields that a config has."""
    return next((config[field] for field in fields if config.get(field) is not None), None)


def _map(config: Config, field: str, change: Callable[[Any], Any]) -> Any:
    """What a function makes of a field; None if the config does not have it."""
    return None if (value := config.get(field)) is None else change(value)


def _head_dim(config: Config) -> Any:
    if _is_latent(config):
        return None  # queries, keys and values have widths of their own, and Megatron's flag is none of them
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (hidden // heads if hidden and heads else None)


def _rope_theta(config: Config) -> Any:
    return config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")


def _has_bias(config: Config) -> bool | None:
    if _is_latent(config):
        return None  # Megatron's flag is not read by its latent attention, which has none
    return traits_of(config.get("model_type", "")).implied.has_qkv_bias or config.get("attention_bias")


def _is_latent(config: Config) -> bool:
    """Is attention latent? Its low-rank projections are normalised, which Megatron calls norms of queries and keys."""
    return config.get("kv_lora_rank") is not None


def _has_qk_norm(config: Config) -> bool | None:
    """Are queries and keys normalised? None if config.json does not say."""
    if config.get("use_qk_norm") is not None:
        return bool(config["use_qk_norm"])
    if _is_latent(config) or _NORMALISES_QK(config):
        return True
    return traits_of(config.get("model_type", "")).implied.has_qk_norm


def _num_experts(config: Config) -> int | None:
    """Experts of a mixture, 0 for none; None if config.json has experts under a name that is not known here."""
    if (found := _first(config, "num_experts", "num_local_experts", "n_routed_experts")) is not None:
        return int(found)
    return None if any("expert" in field or "moe" in field for field in config) else 0


def _norm(config: Config) -> str | None:
    return "RMSNorm" if "rms_norm_eps" in config else "LayerNorm" if "layer_norm_eps" in config else None


@dataclass(frozen=True)
class Shape:
    """What a flag says about the shape of the model, and the field of config.json that it is compared with."""

    kind: Kind
    field: str
    help: str
    read: Callable[[Config], Any] | None = None
    """The value in config.json, None if it does not say; without this function it is that of `field`."""

    is_same: Callable[[Any, Any], bool] = operator.eq
    """Whether the flag's value says what config.json does."""

    def value(self, config: Config) -> Any:
        return config.get(self.field) if self.read is None else self.read(config)

    def flag(self, name: str) -> Flag:
        """The flag as a row of the table."""
        default = False if self.kind == "switch" else None
        return Flag(name, self.kind, default, self.help, "acts", note=f"Compared with config.json: `{self.field}`.")


# fmt: off
SHAPES: dict[str, Shape] = {
    "--num-layers": Shape("integer", "num_hidden_layers", "Blocks."),
    "--hidden-size": Shape("integer", "hidden_size", "Width of the residual stream."),
    "--ffn-hidden-size": Shape("integer", "intermediate_size", "Width of the MLP."),
    "--num-attention-heads": Shape("integer", "num_attention_heads", "Query heads."),
    "--num-query-groups": Shape("integer", "num_key_value_heads", "Key and value heads."),
    "--kv-channels": Shape("integer", "head_dim", "Width of a head.", _head_dim),
    "--vocab-size": Shape("integer", "vocab_size", "Tokens of the vocabulary."),
    "--norm-epsilon": Shape("number", "rms_norm_eps", "Epsilon of the norms.",
                            lambda c: _first(c, "rms_norm_eps", "layer_norm_eps")),
    "--rotary-base": Shape("number", "rope_theta", "Base of the rotary embedding.", _rope_theta),
    "--rotary-percent": Shape("number", "partial_rotary_factor", "Share of a head that is rotated.",
                              lambda c: _first(c, "partial_rotary_factor")
                              or mixture.rotary("partial_rotary_factor")(c)),
    "--num-experts": Shape("integer", "num_experts", "Experts of a mixture.",
                           _num_experts),
    "--moe-router-topk": Shape("integer", "num_experts_per_tok", "Experts that compute one token."),
    "--moe-ffn-hidden-size": Shape("integer", "moe_intermediate_size", "Width of an expert."),
    "--moe-shared-expert-intermediate-size": Shape("integer", "shared_expert_intermediate_size",
                                                   "Width of the shared expert."),
    "--normalization": Shape("text", "rms_norm_eps", "Kind of the norms.", _norm),
    "--untie-embeddings-and-output-weights": Shape("switch", "tie_word_embeddings",
        "Head and embedding are two matrices.", lambda c: _map(c, "tie_word_embeddings", lambda tied: not tied)),
    "--swiglu": Shape("switch", "hidden_act", "Gated MLP with SiLU.",
                      lambda c: _map(c, "hidden_act", lambda act: act in ("silu", "swish", "swiglu"))),
    "--disable-bias-linear": Shape("switch", "mlp_bias", "No biases in linear layers.",
                                   lambda c: _map(c, "mlp_bias", lambda bias: not bias)),
    "--add-qkv-bias": Shape("switch", "attention_bias", "Biases of queries, keys and values.", _has_bias),
    **{name: Shape("switch", "model_type", text, lambda c: mixture.implied(c).has_post_norms) for name, text in (
        ("--post-self-attn-layernorm", "Norms behind attention."), ("--post-mlp-layernorm", "Norms behind the MLP."),
    )},
    "--qk-layernorm": Shape("switch", "model_type", "Norms of queries and keys.", _has_qk_norm),
    "--group-query-attention": Shape("switch", "num_key_value_heads", "Fewer key heads than query heads.",
        lambda c: _map(c, "num_key_value_heads", lambda heads: True)),
    "--use-rotary-position-embeddings": Shape("switch", "model_type", "Rotary embeddings.",
                                              lambda c: True if _rope_theta(c) else None),
    "--position-embedding-type": Shape("text", "model_type", "Kind of position embedding.",
                                       lambda c: "rope" if _rope_theta(c) else None,
                                       lambda typed, known: typed in ("rope", "mrope", "yarn")),
    "--moe-layer-freq": Shape("text", "first_k_dense_replace, decoder_sparse_step", "Which blocks have experts.",
                              mixture.layers, mixture.is_pattern),
    "--moe-router-score-function": Shape("text", "scoring_func", "Scores of experts.", mixture.expert_scores),
    "--moe-router-pre-softmax": Shape("switch", "norm_topk_prob", "Softmax before the choice of experts.",
                                      mixture.is_softmax_first),
    "--moe-router-topk-scaling-factor": Shape("number", "routed_scaling_factor", "Factor of the gates."),
    "--moe-router-num-groups": Shape("integer", "n_group", "Groups of experts."),
    "--moe-router-group-topk": Shape("integer", "topk_group", "Groups that a token may choose of."),
    "--moe-router-enable-expert-bias": Shape("switch", "model_type", "A bias in the choice of experts.",
                                             mixture.has_expert_bias),
    "--moe-shared-expert-gate": Shape("switch", "model_type", "A gate of the shared expert.", mixture.has_shared_gate),
    "--multi-latent-attention": Shape("switch", "kv_lora_rank", "Latent attention.",
                                      lambda c: _is_latent(c) if c.get("model_type") else None),
    "--q-lora-rank": Shape("integer", "q_lora_rank", "Rank of queries in latent attention."),
    "--kv-lora-rank": Shape("integer", "kv_lora_rank", "Rank of keys and values in latent attention."),
    "--qk-head-dim": Shape("integer", "qk_nope_head_dim", "Width of a query without its rotated part."),
    "--qk-pos-emb-head-dim": Shape("integer", "qk_rope_head_dim", "Width of the rotated part."),
    "--v-head-dim": Shape("integer", "v_head_dim", "Width of a value in latent attention."),
    "--rotary-scaling-factor": Shape("number", "rope_scaling.factor", "How much longer texts may be than at first.",
                                     mixture.rotary("factor")),
    "--mscale": Shape("number", "rope_scaling.mscale", "Scale of scores in longer texts.", mixture.rotary("mscale")),
    "--mscale-all-dim": Shape("number", "rope_scaling.mscale_all_dim", "The same for all dimensions.",
                              mixture.rotary("mscale_all_dim")),
    "--rope-type": Shape("text", "rope_scaling.type", "Kind of rotary embedding.", mixture.rope_type,
                         lambda typed, known: (typed == "yarn") == (known == "yarn")),
    "--use-rope-scaling": Shape("switch", "rope_scaling.type", "Scaled rotary embeddings.",
                                lambda c: _map({"type": mixture.rope_type(c)}, "type", lambda kind: kind != "rope")),
    "--rope-scaling-factor": Shape("number", "rope_scaling.factor", "Their factor.", mixture.rotary("factor")),
    "--yarn-original-max-position-embeddings": Shape("integer", "rope_scaling.original_max_position_embeddings",
        "Positions before scaling.", mixture.rotary("original_max_position_embeddings")),
    "--yarn-beta-fast": Shape("number", "rope_scaling.beta_fast", "Where scaling begins.", mixture.rotary("beta_fast")),
    "--yarn-beta-slow": Shape("number", "rope_scaling.beta_slow", "Where it is whole.", mixture.rotary("beta_slow")),
    "--window-size": Shape("text", "sliding_window", "Tokens that a query of a local layer sees.",
        lambda c: _first(c, "sliding_window") if c.get("use_sliding_window", True) else None, mixture.is_window),
    "--activation-func-clamp-value": Shape("number", "swiglu_limit", "Bound of the gate and what it multiplies."),
    "--quick-geglu": Shape("switch", "hidden_act", "Gated MLP with quick GELU.", mixture.is_activation("quick_gelu")),
    "--openai-gelu": Shape("switch", "hidden_act", "MLP with an approximate GELU.",
                           mixture.is_activation("gelu_new", "gelu_pytorch_tanh", "gelu_fast")),
    "--squared-relu": Shape("switch", "hidden_act", "MLP with squared ReLU.", mixture.is_activation("relu2")),
    "--decoder-num-layers": Shape("integer", "num_hidden_layers", "Blocks."),
    "--linear-attention-freq": Shape("text", "full_attention_interval", "Which blocks have full attention.", None,
                                     lambda typed, known: not typed.isdigit() or int(typed) == known),
    **{f"--{field.replace('_', '-')}": Shape("integer", other, text) for field, other, text in (
        ("linear_conv_kernel_dim", "linear_conv_kernel_dim", "Width of the convolution of recurrent layers."),
        ("linear_key_head_dim", "linear_key_head_dim", "Width of their keys."),
        ("linear_value_head_dim", "linear_value_head_dim", "Width of their values."),
        ("linear_num_key_heads", "linear_num_key_heads", "Their key heads."),
        ("linear_num_value_heads", "linear_num_value_heads", "Their value heads."),
        ("mamba_state_dim", "ssm_state_size", "Width of the state of Mamba's layers."),
        ("mamba_head_dim", "mamba_head_dim", "Width of a head of theirs."),
        ("mamba_num_groups", "n_groups", "Their groups."),
        ("mamba_num_heads", "mamba_num_heads", "Their heads."),
        ("dsa_indexer_n_heads", "index_n_heads", "Heads of the indexer of keys."),
        ("dsa_indexer_head_dim", "index_head_dim", "Width of a head of it."),
        ("dsa_indexer_topk", "index_topk", "Keys that a query attends to."),
        ("moe_latent_size", "moe_latent_size", "Width in which experts compute."),
    )},
    "--apply-layernorm-1p": Shape("switch", "model_type", "Norms multiply by 1 + weight.",
                                  mixture.begins(lambda implied: implied.has_centred_norms)),
    "--attention-output-gate": Shape("switch", "model_type", "A gate at the output of attention.",
                                     _HAS_OUTPUT_GATE),
    "--use-gated-attention": Shape("switch", "model_type", "The same.", _HAS_OUTPUT_GATE),
}
# fmt: on


def read_shape(checkpoint: str) -> Config:
    """config.json of a Hugging Face directory, with the text model's fields; empty if there is none.

    Raises: ConfigError if it is no JSON object.
    """
    path = Path(checkpoint).expanduser() / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; copy it anew") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; copy it anew")
    return config | config.get("text_config", {})


def has_tower(checkpoint: str) -> bool:
    """Whether a model has a vision tower of our own modules, which is not trained."""
    config = read_shape(checkpoint)
    return config.get("vision_config") is not None and config.get("model_type", "").removesuffix("_text") in {
        name.removesuffix("_text") for name in VISION_FAMILIES
    }


def _shown(known: Any) -> str:
    return json.dumps(known) if isinstance(known, bool | tuple) else str(known)


def mismatches(flags: Values) -> Iterator[str]:
    """One line with every flag of the shape that config.json contradicts; none without a config.json here."""
    if flags.hf_checkpoint is None:
        return
    if not (config := read_shape(flags.hf_checkpoint)):
        return
    wrong = []
    for name, shape in SHAPES.items():
        value, known = flags.value(name), shape.value(config)
        if flags.has(name) and known is not None and not shape.is_same(value, known):
            wrong.append(f"{flags.given[name]} (there {_shown(known)})")
    if wrong:
        rule = "says otherwise; the model is what it says, leave these flags out or correct them"
        path = Path(flags.hf_checkpoint).expanduser() / "config.json"
        yield f"{', '.join(wrong)}: {path} {rule}"
