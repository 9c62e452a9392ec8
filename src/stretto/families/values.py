"""Kinds of the values in the config.json of our own families."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_LARGEST = 2**31 - 1
_TABLES = frozenset(
    ("text_config", "vision_config", "rope_scaling", "rope_parameters", "quantization_config", "auto_map")
)
_LISTS_OF_TEXT = frozenset(("architectures", "layer_types", "mlp_layer_types"))
_TEXTS = frozenset(("model_type", "hidden_act", "rope_type", "torch_dtype", "dtype"))
_COUNTS = re.compile(
    r"(linear_)?(num|n)_(?!embd_)\w+|\w*(hidden|vocab|intermediate|patch|window)_size|\w*head_dim|\w+_lora_rank|max_position_embeddings"
)
_IDS = re.compile(r"\w+_token_id")
_NUMBERS = re.compile(r"rope_theta|\w+_eps|initializer_range|factor|(low|high)_freq_factor|beta_(fast|slow)|rotary_dim")
_AT_LEAST_ONE = frozenset(("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"))


def wrong_values(found: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Every key whose value is of a wrong kind, with what belongs there; null is as good as absent.

    above: the keys of the tables that the table is in, as `text_config.`
    """
    for key, value in found.items():
        if value is None:
            continue
        if (kind := _kind_that_belongs(key, value, is_inside=bool(above))) is not None:
            yield f"{above}{key} = {value!r:.60} must be {kind}"
        elif key in _TABLES and key != "auto_map":
            yield from wrong_values(value, f"{above}{key}.")


def _kind_that_belongs(key: str, value: Any, *, is_inside: bool) -> str | None:
    """What must be there instead; None if the value can be."""
    if key in _TABLES:
        return None if isinstance(value, Mapping) else "a table of keys and values"
    if key in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if key in _LISTS_OF_TEXT:
        is_right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return None if is_right else "a list of texts"
    if _IDS.fullmatch(key):
        ids = value if isinstance(value, list) else [value]
        return None if all(_is_count(each, -1) for each in ids) else "the id of a token, or a list of ids"
    if _COUNTS.fullmatch(key):
        least = 1 if key in _AT_LEAST_ONE and not is_inside else 0
        counts = [value]
        if key.endswith("per_layer"):
            counts = value if isinstance(value, list) else [{}]
        return None if all(_is_count(each, least) for each in counts) else f"a whole number from {least} to {_LARGEST}"
    if _NUMBERS.fullmatch(key):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return None if is_number else "a number"
    return None


def _is_count(value: Any, least: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST)
