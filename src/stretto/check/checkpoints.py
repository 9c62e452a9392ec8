"""Checks that the checkpoints of trainer and engines belong together, by their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.base.errors import ConfigError

_SAME = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts", "num_experts", "num_local_experts",
    "tie_word_embeddings",
)  # fmt: skip
"""Keys that must be the same in both, or in neither."""
_SAME_IF_BOTH = (
    "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk",
    "rms_norm_eps", "rope_theta", "hidden_act", "sliding_window", "layer_types", "depth", "out_hidden_size",
    "patch_size", "spatial_merge_size", "num_heads",
)  # fmt: skip
"""Keys with a default, which one of the files may leave out; they must be the same if both have them."""
_NESTED = ("text_config", "vision_config")
"""Tables with the numbers of the parts of a model with images."""


def check_quantize(quantizes: bool | None, engine_model: str | None, *, is_quantized: bool) -> None:
    """Check weight_broadcast.quantize_in_weight_transfer against the engines' checkpoint.

    Raises: ConfigError if the key says otherwise than its config.json.
    """
    if quantizes is None or quantizes == is_quantized:
        return
    key = f"weight_broadcast.quantize_in_weight_transfer = {str(quantizes).lower()}"
    if quantizes:
        what = (
            f"{engine_model!r} has no quantization_config" if engine_model else "engines load the model that is trained"
        )
        raise ConfigError(
            f"{key}: {what}, so its engines take weights as they are; give inference.model.name of a checkpoint in 8 "
            "bits, or leave the key out"
        )
    raise ConfigError(
        f"{key}: the engines' {engine_model!r} has weights in 8 bits and takes no others; leave the key out, or let "
        "inference.model.name be the model that is trained"
    )


def check_same_network(trained: Mapping[str, Any], served: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Check that two config.json describe one network; names: of the trained and served model.

    Raises: ConfigError naming the first key that differs.
    """
    for table in (None, *_NESTED):
        ours, theirs = (hf if table is None else hf.get(table) or {} for hf in (trained, served))
        both = [key for key in _SAME_IF_BOTH if key in ours and key in theirs]
        for key in (*_SAME, *both):
            if ours.get(key) != theirs.get(key):
                name = key if table is None else f"{table}.{key}"
                raise ConfigError(
                    f"inference.model = {names[1]!r} is not the network that is trained, {names[0]!r}: its config.json "
                    f"has {name} = {theirs.get(key)!r}, that of the latter {ours.get(key)!r}; engines may load another "
                    "precision of the same model only"
                )


def check_same_tokens(trained: Mapping[str, Any], served: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Check that two tokenizer.json give texts the same ids; names as above.

    Raises: ConfigError naming a token that differs.
    """
    ours, theirs = map(tokens_of, (trained, served))
    if ours == theirs:
        return
    token = min(text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text))
    ids = [table.get(token, "none") for table in (theirs, ours)]
    raise ConfigError(
        f"inference.model = {names[1]!r} has another tokenizer than {names[0]!r}, which is trained: the id of "
        f"{token!r} is {ids[0]} there and {ids[1]} here; engines may load another precision of the same model only"
    )


def tokens_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Text and id of every token."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    # Byte pairs have a table of ids, unigrams a list of texts and scores.
    ids = dict(vocab) if isinstance(vocab, Mapping) else {text: i for i, (text, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
