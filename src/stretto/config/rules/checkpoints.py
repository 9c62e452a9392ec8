"""What checkpoints of trainer and engine must have in common, by their config.json; a dry run asks here too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.base.errors import ConfigError

_SAME = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts", "num_experts", "num_local_experts",
    "tie_word_embeddings",
)  # fmt: skip


def check_quantize(quantizes: bool | None, engine_model: str | None, *, is_quantized: bool) -> None:
    """Check weight_broadcast.quantize_in_weight_transfer against the engines' checkpoint.

    Raises: ConfigError if the key says otherwise than its config.json.
    """
    if quantizes is None or quantizes == is_quantized:
        return
    key = f"weight_broadcast.quantize_in_weight_transfer = {str(quantizes).lower()}"
    if quantizes:
        what = (
            f"{engine_model!r} has no quantization_config"
            if engine_model
            else "engines load the model that is trained"
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
    """Check that two config.json describe one network; names: those of the trained and of the served model.

    Raises: ConfigError naming the first key that differs.
    """
    for key in _SAME:
        if trained.get(key) != served.get(key):
            raise ConfigError(
                f"inference.model = {names[1]!r} is not the network that is trained, {names[0]!r}: its config.json has "
                f"{key} = {served.get(key)!r}, that of the latter {trained.get(key)!r}; engines may load another "
                "precision of the same model only"
            )
