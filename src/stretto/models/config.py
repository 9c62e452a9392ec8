"""Reads the shape of a network from a Hugging Face config.json, and writes it.

Settings that our decoder does not support are refused here by name, before any tensor is allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.base.errors import DataError
from stretto.families.family import Family, Keys, scratch_rope
from stretto.families.rope_keys import parse_rope, rope_to_hf
from stretto.families.shape import ModelConfig, MoEShape
from stretto.families.table import FAMILIES, check_installed, family_of
from stretto.families.values import wrong_values

if TYPE_CHECKING:
    from stretto.config.sections.model import ScratchSection

_KEYS = Keys(
    vocab_size="vocab_size",
    hidden_size="hidden_size",
    intermediate_size="intermediate_size",
    num_layers="num_hidden_layers",
    num_heads="num_attention_heads",
    max_position_embeddings="max_position_embeddings",
    rms_norm_eps=("rms_norm_eps", 1e-6),
    tie_word_embeddings=("tie_word_embeddings", False),
    initializer_range=("initializer_range", 0.02),
)
"""Fields of ModelConfig and their keys in the config.json of every family."""
_FIXED_VALUES = {"hidden_act": "silu", "attention_dropout": 0.0, "quantization_config": None}


def parse_config(hf: dict[str, Any], where: str) -> ModelConfig:
    """The ModelConfig of a config.json.

    Raises: DataError for an architecture, activation or kind of attention that the decoder does not support.
    """
    family = FAMILIES.get(family_of(hf))
    if family is None:
        check_installed(family_of(hf), f"{where}: model_type = {hf.get('model_type')!r}")
        known = ", ".join(sorted(FAMILIES))
        raise DataError(
            f'{where}: model_type = {hf.get("model_type")!r} is not supported by impl = "custom" (known: {known}); '
            'use impl = "hf"'
        )
    if wrong := next(wrong_values(hf), None):
        raise DataError(f"{where}: {wrong}")
    raw, hf = hf, _supported(hf, family, where)
    num_heads = hf["num_attention_heads"]
    num_kv_heads = hf.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise DataError(
            f"{where}: num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    fields = {**family.constants, **family.keys.read(hf), **family.fields(hf)}
    _check_moe(fields.get("moe"), where)
    if "rope" not in fields:
        fields["rope"] = parse_rope(
            hf,
            where,
            family.rotary_fraction,
            is_interleaved=family.is_rotary_interleaved,
            sections=family.rotary_sections,
        )
    shape = {
        "family": family.name,
        "num_kv_heads": num_kv_heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // num_heads,
        "hf": dict(raw),
    }
    cfg = ModelConfig(**_KEYS.read(hf) | shape | fields)
    _check_layers(cfg, where)
    if any(rule.may_be_swapped for rule in family.weights):
        _check_square(cfg, where)
    if cfg.vision is not None:
        _check_vision(cfg, hf["vision_config"], where)
    return cfg


def _supported(hf: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """A config.json with the keys that `parse_config` reads, and the family's defaults.

    Raises: DataError for a value that is missing or that the decoder does not support.
    """
    hf = family.normalise(dict(family.defaults) | hf)
    hf = {name: hf[key] for key, name in family.key_aliases.items() if key in hf} | hf
    missing = [key for key in _KEYS.required + family.required if hf.get(key) is None]
    if missing:
        raise DataError(f"{where}: no value for {', '.join(missing)}; a {family.name} config.json must give every one")
    for key, allowed in (_FIXED_VALUES | dict(family.fixed_values)).items():
        if hf.get(key, allowed) != allowed:
            raise DataError(f'{where}: {key} = {hf[key]!r} is not supported (only {allowed!r}); use impl = "hf"')
    allowed = ("full_attention", "sliding_attention") if family.has_windows else family.layer_types
    if others := sorted(set(hf.get("layer_types") or ()) - set(allowed)):
        raise DataError(
            f'{where}: layer_types {", ".join(others)} is not supported (only {", ".join(allowed)}); use impl = "hf"'
        )
    return hf


def scratch_config(scratch: ScratchSection, vocab_size: int, **token_ids: int | list[int] | None) -> ModelConfig:
    """The shape of a model from scratch; token_ids (eos_token_id, ...) go into its config.json.

    image_token_id: the placeholder of a model with images; None if only sizes are needed.
    """
    placeholder = token_ids.pop("image_token_id", None)
    family = FAMILIES[scratch.family]
    fields = {"rope": scratch_rope(family.rotary_fraction), **family.constants, **family.keys.read({})}
    fields |= family.scratch(scratch)
    if scratch.vision is not None and isinstance(placeholder, int):
        fields["vision"] = replace(fields["vision"], image_token_id=placeholder)
    cfg = ModelConfig(
        family=scratch.family,
        vocab_size=vocab_size,
        hidden_size=scratch.hidden_size,
        intermediate_size=scratch.intermediate_size,
        num_layers=scratch.num_layers,
        num_heads=scratch.num_heads,
        num_kv_heads=scratch.num_kv_heads,
        head_dim=scratch.head_dim,
        rms_norm_eps=1e-6,
        tie_word_embeddings=scratch.tie_word_embeddings,
        max_position_embeddings=scratch.max_position_embeddings,
        **fields,
    )
    return parse_config(to_hf(cfg, dtype="float32", **token_ids), "[model.scratch]")


def _check_layers(cfg: ModelConfig, where: str) -> None:
    if cfg.layers and len(cfg.layers) != cfg.num_layers:
        raise DataError(
            f"{where}: layer_types, or another setting by layer, has {len(cfg.layers)} entries for "
            f"{cfg.num_layers} layers"
        )
    if wrong := [layer.num_heads for layer in cfg.layers if layer.num_heads % cfg.num_kv_heads]:
        raise DataError(
            f"{where}: num_attention_heads_per_layer {wrong[0]} must be a multiple of num_key_value_heads "
            f"{cfg.num_kv_heads}"
        )
    if wrong := [layer.window for layer in cfg.layers if layer.window is not None and layer.window < 1]:
        raise DataError(f"{where}: sliding_window = {wrong[0]} must be at least 1 token")


def _check_square(cfg: ModelConfig, where: str) -> None:
    """Refuse square experts: transformers and vLLM disagree which way round they are stored."""
    assert cfg.moe is not None
    if cfg.hidden_size in (cfg.moe.intermediate_size, 2 * cfg.moe.intermediate_size):
        raise DataError(
            f"{where}: moe_intermediate_size = {cfg.moe.intermediate_size} with hidden_size = {cfg.hidden_size}: "
            f"experts of a {cfg.family} may be stored either way round, and a square matrix does not say which; "
            "hidden_size must be neither moe_intermediate_size nor twice that"
        )


def _check_vision(cfg: ModelConfig, raw: dict[str, Any], where: str) -> None:
    shape = cfg.vision
    assert shape is not None
    activation = raw.get("hidden_act", "gelu_pytorch_tanh")
    cells = raw.get("num_position_embeddings", shape.grid_side**2)
    faults = (
        (activation != "gelu_pytorch_tanh", f"hidden_act = {activation!r} is not supported (only 'gelu_pytorch_tanh')"),
        (
            shape.out_size != cfg.hidden_size,
            f"out_hidden_size = {shape.out_size} must be the decoder's hidden_size = {cfg.hidden_size}",
        ),
        (cells != shape.grid_side**2, f"num_position_embeddings = {cells} must be the square of a number"),
        (
            bool(shape.hidden_size % (4 * shape.num_heads)),
            f"num_heads = {shape.num_heads}: hidden_size = {shape.hidden_size} must be a multiple of 4 x num_heads",
        ),
        (
            not set(shape.deepstack_blocks) <= set(range(shape.depth)) or len(shape.deepstack_blocks) > cfg.num_layers,
            f"deepstack_visual_indexes {list(shape.deepstack_blocks)} must be blocks of the tower's {shape.depth}, "
            f"and no more than the decoder's {cfg.num_layers} layers",
        ),
        (
            not 0 <= shape.image_token_id < cfg.vocab_size,
            f"image_token_id = {shape.image_token_id} must be less than vocab_size = {cfg.vocab_size}",
        ),
    )
    for is_wrong, message in faults:
        if is_wrong:
            raise DataError(f"{where}: {message}")


def to_hf(cfg: ModelConfig, **extra: Any) -> dict[str, Any]:
    """A config.json from which transformers builds the same network.

    extra: more keys, such as token ids.
    """
    family = FAMILIES[cfg.family]
    flat = {
        "architectures": [family.architecture],
        "model_type": cfg.family,
        **_KEYS.write(cfg),
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rope_parameters": rope_to_hf(cfg.rope, has_fraction=family.rotary_fraction is not None),
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    flat |= family.keys.write(cfg) | family.to_hf(cfg)
    return family.nest(flat, cfg) | extra


def _check_moe(moe: MoEShape | None, where: str) -> None:
    if moe is not None and not 1 <= moe.top_k <= moe.num_experts:
        raise DataError(f"{where}: num_experts_per_tok = {moe.top_k} must be 1 to num_experts = {moe.num_experts}")
    if moe is None or moe.num_groups == 1:
        return
    size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or size < 2 or not 1 <= moe.top_groups <= moe.num_groups or moe.top_k > size * moe.top_groups:
        raise DataError(
            f"{where}: n_group = {moe.num_groups} and topk_group = {moe.top_groups} do not fit "
            f"{moe.num_experts} experts, of which {moe.top_k} are chosen: groups must be equal, of two experts or "
            "more, and the chosen groups must have enough"
        )
