"""Rotary position embeddings in config.json: its keys to a `Rope`, and back."""

from __future__ import annotations

from typing import Any

from stretto.base.errors import DataError
from stretto.families.shape import Rope

_KINDS = ("default", "linear", "llama3", "yarn")


def parse_rope(
    hf: dict[str, Any],
    where: str,
    fraction: float | None = None,
    *,
    is_interleaved: bool = False,
    sections: tuple[int, ...] = (),
) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

    fraction: the share of a head's dims that is rotated if config.json has none; None: the family always rotates all.
    sections: those of a model with images if config.json has none; (): a model of text.

    Raises: DataError for a kind or a setting that is not supported.
    """
    raw = hf.get("rope_parameters") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf.get("rope_theta")}
    kind = raw.get("rope_type") or raw.get("type") or "default"
    theta = raw.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    if kind not in _KINDS:
        raise DataError(f'{where}: rope_type = {kind!r} is not supported (only {", ".join(_KINDS)}); use impl = "hf"')
    unknown = [key for key in ("mscale", "mscale_all_dim") if raw.get(key)]
    share = raw.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if share is None and hf.get("rotary_dim") and hf.get("head_dim"):
        share = hf["rotary_dim"] / hf["head_dim"]
    if fraction is None and share not in (None, 1.0):
        unknown.append(f"partial_rotary_factor = {share}")
    if unknown:
        raise DataError(f'{where}: rope_parameters {", ".join(unknown)} not supported; use impl = "hf"')
    if kind != "default" and not raw.get("factor"):
        raise DataError(f"{where}: rope_type = {kind!r} needs a factor in rope_parameters")
    low, high = float(raw.get("low_freq_factor") or 1.0), float(raw.get("high_freq_factor") or 4.0)
    if kind == "llama3" and not low < high:
        raise DataError(
            f"{where}: rope_parameters low_freq_factor = {low:g} must be less than high_freq_factor = {high:g}"
        )
    if sections:
        sections = tuple(raw.get("mrope_section") or sections)
        if len(sections) != 3:
            raise DataError(
                f"{where}: mrope_section = {list(sections)} must be three numbers, for time, height and width"
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
        is_truncated=raw.get("truncate") is not False,
        fraction=1.0 if fraction is None else float(share or fraction),
        is_interleaved=is_interleaved,
        sections=sections,
    )


def rope_to_hf(rope: Rope, *, has_fraction: bool = False) -> dict[str, Any]:
    """`rope_parameters` of config.json.

    has_fraction: the fraction is written even if it is 1, because the family rotates less by default.
    """
    keys: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if has_fraction or rope.fraction != 1.0:
        keys["partial_rotary_factor"] = rope.fraction
    if rope.sections:
        keys |= {"mrope_section": list(rope.sections), "mrope_interleaved": True}
    if rope.kind != "default":
        keys["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        keys["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        keys |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            keys["attention_factor"] = rope.attention_factor
        if not rope.is_truncated:
            keys["truncate"] = False
    return keys
