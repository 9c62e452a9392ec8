"""The shape of a network, read from and written as a Hugging Face config.json.

Only what our own decoder can compute passes: anything else is refused here, by name, before a tensor is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import DataError

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM"}
"""Families our own decoder implements, and the class name transformers knows them by."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ONLY = {"hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0}


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `kind` is default, linear or yarn. Only the last two use `factor` and the rest."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs to know about itself; `hf` is the config.json it came from."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    attention_bias: bool = False
    initializer_range: float = 0.02
    hf: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rope_theta(self) -> float:
        return self.rope.theta


def parse_config(hf: dict[str, Any], where: str) -> ModelConfig:
    """The decoder's view of a config.json.

    Raises: DataError for an architecture, activation or attention form that the decoder does not compute.
    """
    family = hf.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise DataError(
            f'{where}: model_type = {family!r} has no module of ours (known: {known}); use impl = "hf"'
        )
    missing = [key for key in _REQUIRED if hf.get(key) is None]
    if missing:
        raise DataError(
            f"{where}: no value for {', '.join(missing)}; a {family} config.json must give every one"
        )
    for key, allowed in _ONLY.items():
        if hf.get(key, allowed) != allowed:
            raise DataError(
                f'{where}: {key} = {hf[key]!r} is not computed here (only {allowed!r}); use impl = "hf"'
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
    return ModelConfig(
        family=family,
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
        attention_bias=hf.get("attention_bias", False),
        initializer_range=hf.get("initializer_range", 0.02),
        hf=dict(hf),
    )


def to_hf(cfg: ModelConfig, **extra: Any) -> dict[str, Any]:
    """A config.json from which transformers builds the same network; `extra` adds token ids and the like."""
    rope: dict[str, Any] = {"rope_type": cfg.rope.kind, "rope_theta": cfg.rope.theta}
    if cfg.rope.kind != "default":
        rope["factor"] = cfg.rope.factor
    if cfg.rope.kind == "yarn":
        rope |= {"beta_fast": cfg.rope.beta_fast, "beta_slow": cfg.rope.beta_slow}
        rope["original_max_position_embeddings"] = cfg.rope.original_max_positions
        if cfg.rope.attention_factor is not None:
            rope["attention_factor"] = cfg.rope.attention_factor
    return {
        "architectures": [ARCHITECTURES[cfg.family]],
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
        "attention_bias": cfg.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": cfg.initializer_range,
        "use_sliding_window": False,
        "use_cache": True,
    } | extra


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    """One angular frequency a pair of dims, and the factor on cos and sin.

    Source: RoPE, arXiv:2104.09864; linear: position interpolation, arXiv:2306.15595; YaRN, arXiv:2309.00071,
    section 3.2 (the ramp between dims) and 3.4 (the factor).
    """
    plain = [rope.theta ** (-dim / head_dim) for dim in range(0, head_dim, 2)]
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return [freq / rope.factor for freq in plain], 1.0
    trained = rope.original_max_positions or max_positions

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


def _parse_rope(hf: dict[str, Any], where: str) -> Rope:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as 4 did."""
    raw = hf.get("rope_parameters") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf.get("rope_theta")}
    kind = raw.get("rope_type") or raw.get("type") or "default"
    theta = raw.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    if kind not in ("default", "linear", "yarn"):
        raise DataError(
            f'{where}: rope_type = {kind!r} is not computed here (default, linear, yarn); use impl = "hf"'
        )
    unknown = [key for key in ("mscale", "mscale_all_dim") if raw.get(key)] + ["truncate"] * (
        raw.get("truncate") is False
    )
    if unknown:
        raise DataError(f'{where}: rope_parameters {", ".join(unknown)} not computed here; use impl = "hf"')
    if kind != "default" and not raw.get("factor"):
        raise DataError(f"{where}: rope_type = {kind!r} needs a factor in rope_parameters")
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=float(raw.get("factor") or 1.0),
        original_max_positions=raw.get("original_max_position_embeddings"),
        attention_factor=raw.get("attention_factor"),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
    )
