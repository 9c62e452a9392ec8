"""Compares what was rendered, a first prompt or a first row, with every limit of a config on the length of a sequence.

The limits are `seq_len` and the positions of the model; the smallest is named by its key. A rule of the config holds
that the engine's own limit (`inference.max_model_len`) is no smaller than seq_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stretto.base.errors import ConfigError
from stretto.config.root import EvalConfig, OrchestratorConfig, RLConfig, SFTConfig
from stretto.data.hub_model import find_config
from stretto.data.model_file import read_model_file


class Limit(NamedTuple):
    """The most tokens of a sequence, and the key or file that says so."""

    key: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.key} = {self.tokens}"


def limits_of(cfg: RLConfig | OrchestratorConfig | EvalConfig | SFTConfig) -> list[Limit]:
    """Every limit of a config on a sequence; the model's are known if its config.json is here."""
    limits = [Limit("seq_len", cfg.seq_len)]
    model = cfg.model
    if isinstance(model, str) or model is None:
        limits += _of_file(model)
    elif model.scratch is not None:
        positions = model.scratch.max_position_embeddings
        limits.append(Limit("model.scratch.max_position_embeddings", positions))
    else:
        limits += _of_file(model.name)
    return limits


def _of_file(model: str | None) -> list[Limit]:
    if model is None or (directory := find_config(model)) is None:
        return []
    found = read_model_file(directory)
    for table in (found, found.get("text_config") or {}):
        positions: Any = table.get("max_position_embeddings") if isinstance(table, dict) else None
        if isinstance(positions, int) and positions > 0:
            return [Limit(f"max_position_embeddings of {directory / 'config.json'}", positions)]
    return []


def smallest(limits: Sequence[Limit]) -> Limit:
    """The limit that is reached first; of equal ones the first."""
    return min(limits, key=lambda limit: limit.tokens)


def room_after(prompt_tokens: int, limits: Sequence[Limit], where: str) -> Limit:
    """The smallest limit, if a prompt leaves room for a reply in it.

    Raises: ConfigError that names the key if it leaves none.
    """
    limit = smallest(limits)
    if prompt_tokens >= limit.tokens:
        raise ConfigError(
            f"{where}: its prompt of {prompt_tokens} tokens leaves no room for a reply in {limit}; raise it above "
            f"{prompt_tokens} by the length of a reply, or shorten the prompt"
        )
    return limit


def cut_reply(prompt_tokens: int, reply_tokens: int | None, limits: Sequence[Limit]) -> str:
    """What to know of replies that are cut before max_completion_tokens; "" if none are."""
    limit = smallest(limits)
    room = limit.tokens - prompt_tokens
    if reply_tokens is None or reply_tokens <= room:
        return ""
    return (
        f"replies are cut after {room} tokens: {prompt_tokens} of the prompt and max_completion_tokens = "
        f"{reply_tokens} are more than {limit}"
    )
