"""What flags of Megatron's say about mixtures, attention, activations and rotary embeddings, read from config.json.

Each function gives what config.json says, and None where it does not say it or the family is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from stretto.families.table import TRAITS, traits_of
from stretto.families.traits import Implied

Config = Mapping[str, Any]


def kind(config: Config) -> str:
    """The family: model_type without the end that the text part of a larger model has."""
    return str(config.get("model_type", "")).removesuffix("_text")


def implied(config: Config) -> Implied:
    """What the family implies."""
    return traits_of(kind(config)).implied


def expert_scores(config: Config) -> str | None:
    """softmax or sigmoid."""
    if (given := config.get("scoring_func")) in ("softmax", "sigmoid"):
        return str(given)
    return implied(config).expert_scores


def has_expert_bias(config: Config) -> bool | None:
    """Are experts chosen by their scores and a bias?"""
    return {"sigmoid": implied(config).expert_scores == "sigmoid" or None, "softmax": False}.get(
        expert_scores(config) or ""
    )


def is_softmax_first(config: Config) -> bool | None:
    """Are the gates those of a softmax over all experts, and not over the chosen ones? For sigmoid scores they are."""
    if expert_scores(config) == "sigmoid":
        return True
    normalised = config.get("norm_topk_prob")
    return None if normalised is None or expert_scores(config) is None else not normalised


def has_shared_gate(config: Config) -> bool | None:
    """Does the output of the shared expert have a gate?"""
    return implied(config).has_shared_gate


def layers(config: Config) -> tuple[int, ...] | None:
    """For each block 1 if it has experts, else 0."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return None
    if (dense := config.get("first_k_dense_replace")) is not None:
        return (0,) * dense + (1,) * (count - dense)
    step = config.get("decoder_sparse_step")
    if step is None:
        return None
    without = config.get("mlp_only_layers") or ()
    return tuple(int(n not in without and (n + 1) % step == 0) for n in range(count))


def is_pattern(typed: str, known: tuple[int, ...]) -> bool:
    """Is --moe-layer-freq this pattern? Every N-th block from the first has experts, or a list such as [0]*3+[1]*89."""
    text = typed.replace(" ", "")
    if text.isdigit():
        return int(text) > 0 and known == tuple(int(n % int(text) == 0) for n in range(len(known)))
    found: list[int] = []
    for part in text.removeprefix("(").removesuffix(")").split("+"):
        match = re.fullmatch(r"\(?\[([\d,]*)\](?:\*(\d+))?\)?", part)
        if match is None:
            return False
        found += [int(each) for each in match[1].split(",") if each] * int(match[2] or 1)
    return tuple(found) == known


def rotary(name: str) -> Callable[[Config], Any]:
    """The reader of an entry of the scaling of rotary embeddings."""

    def read(config: Config) -> Any:
        for table in ("rope_scaling", "rope_parameters"):
            if isinstance(entries := config.get(table), Mapping) and entries.get(name) is not None:
                return entries[name]
        return None

    return read


def rope_type(config: Config) -> str | None:
    """How rotary embeddings are scaled, `rope` for not at all; None if config.json has no rotary embeddings."""
    kind = rotary("rope_type")(config) or rotary("type")(config)
    if kind is None and config.get("rope_theta") is None and rotary("rope_theta")(config) is None:
        return None
    return "rope" if kind in (None, "default") else str(kind)


def is_window(typed: str, known: int) -> bool:
    """Is --window-size, `128,0` or `(127, 0)`, this sliding window? Megatron-LM does not count the token itself."""
    first = typed.strip("([ ").split(",")[0]
    return first.isdigit() and int(first) in (known, known - 1)


def is_activation(*names: str) -> Callable[[Config], bool | None]:
    """The reader of whether hidden_act is one of these; None where the family bounds it in its own way."""

    def read(config: Config) -> bool | None:
        if config.get("hidden_act") is None or config.get("swiglu_limit") is not None:
            return None
        return config["hidden_act"] in names

    return read


def begins(is_meant: Callable[[Implied], bool | None]) -> Callable[[Config], bool | None]:
    """The reader of a trait that families have whose model_type begins with the name of one that has it.

    None for any other family, which may have it, too.
    """
    families = tuple(name for name, traits in TRAITS.items() if is_meant(traits.implied))
    return lambda config: kind(config).startswith(families) or None
