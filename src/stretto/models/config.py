"""Reads the shape of a network from a Hugging Face config.json, and writes it.

Settings that our decoder does not support are refused here, by name, before any tensor is allocated.
"""

from __future__ import annotations

import math
from typing import Any

from stretto.base.errors import DataError
from stretto.models.families import FAMILIES
from stretto.models.shape import ModelConfig, MoEShape, Rope

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_FIXED_VALUES = {"hidden_act": "silu", "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def parse_config(hf: dict[str, Any], where: str) -> ModelConfig:
    """The ModelConfig of a config.json.

    Raises: DataError for an architecture, activation or kind of attention that the decoder does not support.
    """
    family = FAMILIES.get(hf.get("model_type"))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise DataError(
            f'{where}: model_type = {hf.get("model_type")!r} is not supported by impl = "custom" (known: {known}); '
            'use impl = "hf"'
        )
    raw, hf = hf, {name: hf[key] for key, name in family.key_aliases.items() if key in hf} | hf
    missing = [key for key in _REQUIRED + family.required if hf.get(key) is None]
    if missing:
        raise DataError(
            f"{where}: no value for {', '.join(missing)}; a {family.name} config.json must give every one"
        )
    for key, allowed in (_FIXED_VALUES | dict(family.fixed_values)).items():
        if hf.get(key, allowed) != allowed:
            raise DataError(
                f'{where}: {key} = {hf[key]!r} is not supported (only {allowed!r}); use impl = "hf"'
            )
    if windowed := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        raise DataError(
            f"{where}: layer_types {', '.join(windowed)} is not supported (only full_attention); "
            'use impl = "hf"'
        )
    num_heads, num_kv_heads = (
        hf["num_attention_heads"],
        hf.get("num_key_value_heads") or hf["num_attention_heads"],
    )
    if num_heads % num_kv_heads:
        raise DataError(
            f"{where}: num_attention_heads {num_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    fields = family.fields(hf)
    _check_moe(fields.get("moe"), where)
    return ModelConfig(
        family=family.name,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        rope=_parse_rope(hf, where),
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        max_position_embeddings=hf["max_position_embeddings"],
        initializer_range=hf.get("initializer_range", 0.02),
        hf=dict(raw),
        **fields,
    )


def to_hf(cfg: ModelConfig, **extra: Any) -> dict[str, Any]:
    """A config.json from which transformers builds the same network.

    extra: more keys, such as token ids.
    """
    rope: dict[str, Any] = {"rope_type": cfg.rope.kind, "rope_theta": cfg.rope.theta}
    if cfg.rope.kind != "default":
        rope["factor"] = cfg.rope.factor
    if cfg.rope.kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = cfg.rope.original_max_positions
    if cfg.rope.kind == "llama3":
        rope |= {"low_freq_factor": cfg.rope.low_freq_factor, "high_freq_factor": cfg.rope.high_freq_factor}
    if cfg.rope.kind == "yarn":
        rope |= {"beta_fast": cfg.rope.beta_fast, "beta_slow": cfg.rope.beta_slow}
        if cfg.rope.attention_factor is not None:
            rope["attention_factor"] = cfg.rope.attention_factor
    return (
        {
            "architectures": [FAMILIES[cfg.family].architecture],
            "model_type": cfg.family,
            "vocab_size": cfg.vocab_size,
            "hidden_size": cfg.hidden_size,
            "intermediate_size": cfg.intermediate_size,
            "num_hidden_layers": cfg.num_layers,
            "num_attention_heads": cfg.num_heads,
            "num_key_value_heads": cfg.num_kv_heads,
            "head_dim": cfg.head_dim,
            "hidden_act": "silu",
            "rope_parameters": rope,
            "rms_norm_eps": cfg.rms_norm_eps,
            "tie_word_embeddings": cfg.tie_word_embeddings,
            "max_position_embeddings": cfg.max_position_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": cfg.initializer_range,
            "use_cache": True,
        }
        | FAMILIES[cfg.family].to_hf(cfg)
        | extra
    )


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    """The angular frequency of each pair of dims, and the factor on cos and sin.

    Source: RoPE, arXiv:2104.09864; linear: position interpolation, arXiv:2306.15595; YaRN, arXiv:2309.00071,
    section 3.2 (the ramp between dims) and 3.4 (the factor); llama3: the Llama 3.1 models' config.json.
    """
    plain = [rope.theta ** (-dim / head_dim) for dim in range(0, head_dim, 2)]
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return [freq / rope.factor for freq in plain], 1.0
    trained = rope.original_max_positions or max_positions
    if rope.kind == "llama3":
        return [_llama3_frequency(freq, rope, trained) for freq in plain], 1.0

    def dim_of(num_rotations: float) -> float:
        return head_dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), head_dim - 1)
    ramp = [min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0) for i in range(len(plain))]
    mixed = [freq * (1 - r) + freq / rope.factor * r for freq, r in zip(plain, ramp)]
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return mixed, scale


def _llama3_frequency(freq: float, rope: Rope, trained: int) -> float:
    """Low frequencies are divided by the factor, high ones unchanged, others mixed."""
    turns = trained * freq / (2 * math.pi)  # rotations over the original context length
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = min(max((turns - rope.low_freq_factor) / span, 0.0), 1.0)
    return freq * keep + freq / rope.factor * (1 - keep)


def _check_moe(moe: MoEShape | None, where: str) -> None:
    if moe is not None and not 1 <= moe.top_k <= moe.num_experts:
        raise DataError(
            f"{where}: num_experts_per_tok = {moe.top_k} must be 1 to num_experts = {moe.num_experts}"
        )


def _parse_rope(hf: dict[str, Any], where: str) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    raw = hf.get("rope_parameters") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf.get("rope_theta")}
    kind = raw.get("rope_type") or raw.get("type") or "default"
    theta = raw.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    if kind not in _ROPE_KINDS:
        raise DataError(
            f'{where}: rope_type = {kind!r} is not supported (only {", ".join(_ROPE_KINDS)}); use impl = "hf"'
        )
    unknown = [key for key in ("mscale", "mscale_all_dim") if raw.get(key)] + ["truncate"] * (
        raw.get("truncate") is False
    )
    unknown += ["partial_rotary_factor"] * (raw.get("partial_rotary_factor", 1.0) != 1.0)
    if unknown:
        raise DataError(f'{where}: rope_parameters {", ".join(unknown)} not supported; use impl = "hf"')
    if kind != "default" and not raw.get("factor"):
        raise DataError(f"{where}: rope_type = {kind!r} needs a factor in rope_parameters")
    low, high = float(raw.get("low_freq_factor") or 1.0), float(raw.get("high_freq_factor") or 4.0)
    if kind == "llama3" and not low < high:
        raise DataError(
            f"{where}: rope_parameters low_freq_factor = {low:g} must be less than "
            f"high_freq_factor = {high:g}"
        )
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=float(raw.get("factor") or 1.0),
        original_max_positions=raw.get("original_max_position_embeddings"),
        attention_factor=raw.get("attention_factor"),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
    )
