"""The model's shape on the command line against config.json: every mismatch in one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.vime.flags.flag import Values

Config = Mapping[str, Any]
WITH_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "olmo2", "gemma3")
"""Families, by the beginning of their model_type, that normalise queries and keys."""


def _first(*fields: str) -> Callable[[Config], Any]:
    """The first of these fields that a config has."""
    return lambda config: next((config[field] for field in fields if config.get(field) is not None), None)


def _head_dim(config: Config) -> Any:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (hidden // heads if hidden and heads else None)


def _rope_theta(config: Config) -> Any:
    return config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")


def _has_bias(config: Config) -> bool | None:
    return True if config.get("model_type") == "qwen2" else config.get("attention_bias")


def _norm(config: Config) -> str | None:
    return "RMSNorm" if "rms_norm_eps" in config else "LayerNorm" if "layer_norm_eps" in config else None


FIELDS: dict[str, Callable[[Config], Any]] = {
    "--num-layers": _first("num_hidden_layers"),
    "--hidden-size": _first("hidden_size"),
    "--ffn-hidden-size": _first("intermediate_size"),
    "--num-attention-heads": _first("num_attention_heads"),
    "--num-query-groups": _first("num_key_value_heads"),
    "--kv-channels": _head_dim,
    "--vocab-size": _first("vocab_size"),
    "--norm-epsilon": _first("rms_norm_eps", "layer_norm_eps"),
    "--rotary-base": _rope_theta,
    "--rotary-percent": _first("partial_rotary_factor"),
    "--num-experts": lambda c: _first("num_experts", "num_local_experts", "n_routed_experts")(c) or 0,
    "--moe-router-topk": _first("num_experts_per_tok"),
    "--moe-ffn-hidden-size": _first("moe_intermediate_size"),
    "--moe-shared-expert-intermediate-size": _first("shared_expert_intermediate_size"),
    "--normalization": _norm,
    "--untie-embeddings-and-output-weights": lambda c: (
        None if (t := c.get("tie_word_embeddings")) is None else not t
    ),
    "--swiglu": lambda c: None if (act := c.get("hidden_act")) is None else act == "silu",
    "--disable-bias-linear": lambda c: None if (bias := c.get("mlp_bias")) is None else not bias,
    "--add-qkv-bias": _has_bias,
    "--qk-layernorm": lambda c: None if (t := c.get("model_type")) is None else t.startswith(WITH_QK_NORM),
    "--group-query-attention": lambda c: (
        None if (kv := c.get("num_key_value_heads")) is None else kv < c.get("num_attention_heads", kv + 1)
    ),
    "--use-rotary-position-embeddings": lambda c: True if _rope_theta(c) else None,
    "--position-embedding-type": lambda c: "rope" if _rope_theta(c) else None,
}
"""By flag: what config.json says of it; None if it does not."""


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


def mismatches(flags: Values) -> Iterator[str]:
    """One line with every flag of the shape that config.json contradicts; none without a config.json here."""
    if flags.hf_checkpoint is None:
        return
    if not (config := read_shape(flags.hf_checkpoint)):
        return
    wrong = []
    for name, field in FIELDS.items():
        value, known = flags.value(name), field(config)
        if flags.has(name) and known is not None and value != known:
            wrong.append(
                f"{flags.given[name]} (there {str(known).lower() if isinstance(known, bool) else known})"
            )
    if wrong:
        rule = "says otherwise; the model is what it says, leave these flags out or correct them"
        path = Path(flags.hf_checkpoint).expanduser() / "config.json"
        yield f"{', '.join(wrong)}: {path} {rule}"
