"""The shape of a network, read from and written as a Hugging Face config.json.

Only what our own decoder can compute passes: anything else is refused here, by name, before a tensor is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import DataError
from stretto.models.families import FAMILIES
from stretto.models.family import Family
from stretto.models.moe import MoEShape

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ONLY = {"hidden_act": "silu", "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `kind` is default, linear, llama3 or yarn. `factor` and the rest are the scaling's."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


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
    has_qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    moe: MoEShape | None = None
    initializer_range: float = 0.02
    hf: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    @property
    def family_data(self) -> Family:
        return FAMILIES[self.family]

    def is_sparse(self, layer: int) -> bool:
        """True for a block with a mixture of experts in the place of its MLP."""
        return self.moe is not None and layer in self.moe.sparse_layers


def parse_config(hf: dict[str, Any], where: str) -> ModelConfig:
    """The decoder's view of a config.json.

    Raises: DataError for an architecture, activation or attention form that the decoder does not compute.
    """
    family = FAMILIES.get(hf.get("model_type"))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise DataError(
            f"{where}: model_type = {hf.get('model_type')!r} has no module of ours (known: {known}); "
            'use impl = "hf"'
        )
    raw, hf = hf, {name: hf[key] for key, name in family.spellings.items() if key in hf} | hf
    missing = [key for key in _REQUIRED + family.required if hf.get(key) is None]
    if missing:
        raise DataError(
            f"{where}: no value for {', '.join(missing)}; a {family.name} config.json must give every one"
        )
    for key, allowed in (_ONLY | dict(family.only)).items():
        if hf.get(key, allowed) != allowed:
            raise DataError(
                f'{where}: {key} = {hf[key]!r} is not computed here (only {allowed!r}); use impl = "hf"'
            )
    if windowed := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        raise DataError(
            f"{where}: layer_types {', '.join(windowed)} is not computed here (only full_attention); "
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
    """A config.json from which transformers builds the same network; `extra` adds token ids and the like."""
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
            "architectures": [cfg.family_data.architecture],
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
        | cfg.family_data.to_hf(cfg)
        | extra
    )


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int) -> tuple[list[float], float]:
    """One angular frequency a pair of dims, and the factor on cos and sin.

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
    """Long waves are stretched by the factor, short ones kept, those between mixed."""
    turns = trained * freq / (2 * math.pi)  # in the length the model was first trained on
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = min(max((turns - rope.low_freq_factor) / span, 0.0), 1.0)
    return freq * keep + freq / rope.factor * (1 - keep)


def _check_moe(moe: MoEShape | None, where: str) -> None:
    if moe is not None and not 1 <= moe.top_k <= moe.num_experts:
        raise DataError(
            f"{where}: num_experts_per_tok = {moe.top_k} must be 1 to num_experts = {moe.num_experts}"
        )


def _parse_rope(hf: dict[str, Any], where: str) -> Rope:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as 4 did."""
    raw = hf.get("rope_parameters") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf.get("rope_theta")}
    kind = raw.get("rope_type") or raw.get("type") or "default"
    theta = raw.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    if kind not in _ROPE_KINDS:
        raise DataError(
            f'{where}: rope_type = {kind!r} is not computed here ({", ".join(_ROPE_KINDS)}); use impl = "hf"'
        )
    unknown = [key for key in ("mscale", "mscale_all_dim") if raw.get(key)] + ["truncate"] * (
        raw.get("truncate") is False
    )
    unknown += ["partial_rotary_factor"] * (raw.get("partial_rotary_factor", 1.0) != 1.0)
    if unknown:
        raise DataError(f'{where}: rope_parameters {", ".join(unknown)} not computed here; use impl = "hf"')
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
