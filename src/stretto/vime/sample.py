"""`Sample`: one reply to one prompt, as hooks read and write it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import chain
from typing import Any

from stretto.base.errors import EnvError
from stretto.data.values import checked_number

Message = dict[str, Any]


class Status(Enum):
    """How far a sample is, or how it ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_Status = Status  # inside Sample the name is its attribute


@dataclass
class Sample:
    """One reply to one prompt.

    A `generate` hook sets tokens, response_length, status and response, and optionally loss_mask and reward. tokens
    holds the prompt's tokens, then the response's, exactly as the engine got and returned them.
    """

    Status = _Status

    group_index: int | None = None
    """Number of the group: the draw of the task in this run."""
    index: int | None = None
    """Number of the rollout in the run: group_index * n_samples_per_prompt + its number in the group."""
    rollout_id: int | None = None
    """Number of the episode, `index` again; all samples that one call of `generate` returned have the same."""
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    """Number of tokens after the first prompt."""
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """Per token of the response: 1 if it is trained, 0 if not (tool results, for example); None if all are."""
    rollout_log_probs: list[float] | None = None
    """Per token of the response: its log-probability when sampled. Not needed for tokens from `post`."""
    rollout_top_p_token_ids: list[int] | None = None
    """With top_p, top_k or min_p: the tokens that each token of the response was drawn from (the engine's
    `sampling_mask`), concatenated. None for the whole vocabulary."""
    rollout_top_p_token_lengths: list[int] | None = None
    """Per token of the response: how many of these ids are its own; 0 for the whole vocabulary, or not sampled."""
    temperature: float | None = None
    """Temperature at which its tokens were sampled; None for the run's."""
    weight_versions: list[int] = field(default_factory=list)
    remove_sample: bool = False
    """True: its reward counts in its group, but it is not trained."""
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    custom_rm_path: str | None = None
    """Function that rewards this sample instead of its environment's."""

    def __getattr__(self, name: str) -> Any:
        """Called for what is no attribute: say what is.

        Raises: AttributeError always.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(self.__dict__)
        raise AttributeError(f"a sample has no {name!r}; it has {known}. Columns of a record are in its metadata")

    def to_dict(self) -> dict[str, Any]:
        """All fields, and further attributes that were set, as plain values."""
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; keys that are no field become attributes."""
        values = dict(values)
        values["status"] = Status(values.get("status", "pending"))
        known = {each.name for each in fields(Sample)}
        sample = Sample(**{key: value for key, value in values.items() if key in known})
        for key, value in values.items():
            if key not in known:
                setattr(sample, key, value)
        return sample

    def get_reward_value(self, args: Any, where: str = "") -> float:
        """The reward as a number; if it is a dictionary, its entry `args.reward_key`.

        Raises: EnvError if that is no number; it names `where`, the function that made it, if there is one.
        """
        value = self.reward
        if isinstance(value, dict):
            key = getattr(args, "reward_key", None)
            if key is None or key not in value:
                keys = ", ".join(map(repr, value)) or "no keys"
                asked = "" if key is None else f", and not reward_key = {key!r}"
                prefix = f"{where}: " if where else ""
                raise EnvError(f"{prefix}the reward is a dictionary with {keys}{asked}; name one of them as reward_key")
            value = value[key]
        return checked_number(value, where, "the reward")

    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        *,
        trainable: bool = True,
        text: str = "",
        sampling_mask: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Append tokens to the response: sampled ones with their log-probabilities, or given ones.

        sampling_mask: the tokens that each was drawn from, as the engine returned them; None for the whole vocabulary.

        Raises: EnvError if sampled tokens come without one log-probability each.
        """
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            got = "none" if log_probs is None else len(log_probs)
            raise EnvError(f"{len(tokens)} trainable tokens with {got} log-probabilities; give one per token")
        if sampling_mask is not None and len(sampling_mask) != len(tokens):
            raise EnvError(f"{len(tokens)} tokens with a sampling_mask of {len(sampling_mask)}; give one per token")
        if sampling_mask is not None or self.rollout_top_p_token_lengths is not None:
            parts = sampling_mask if sampling_mask is not None else [()] * len(tokens)
            before = self.rollout_top_p_token_lengths or [0] * self.response_length
            self.rollout_top_p_token_ids = [*(self.rollout_top_p_token_ids or []), *chain.from_iterable(parts)]
            self.rollout_top_p_token_lengths = [*before, *map(len, parts)]
        mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        known = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response += text
        self.response_length += len(tokens)
        self.loss_mask = [*mask, *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [*known, *(log_probs if trainable and log_probs else [0.0] * len(tokens))]

    def strip_last_output_tokens(self, count: int) -> None:
        """Remove the last `count` tokens of the response."""
        count = min(count, self.response_length)
        if not count:
            return
        self.tokens = self.tokens[:-count]
        self.response_length -= count
        for name in ("loss_mask", "rollout_log_probs"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, values[: self.response_length])
        if self.rollout_top_p_token_lengths is not None:
            self.rollout_top_p_token_lengths = self.rollout_top_p_token_lengths[: self.response_length]
            left = sum(self.rollout_top_p_token_lengths)
            self.rollout_top_p_token_ids = (self.rollout_top_p_token_ids or [])[:left]

    @property
    def effective_response_length(self) -> int:
        """Number of tokens of the response that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def check(self) -> None:
        """Check that the fields fit together.

        Raises: EnvError otherwise.
        """
        if not 0 <= self.response_length <= len(self.tokens):
            raise EnvError(f"response_length = {self.response_length}, but the sample has {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs", "rollout_top_p_token_lengths"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                rule = f"has {len(values)} entries for a response of {self.response_length} tokens"
                raise EnvError(f"{name} {rule}; give one per token of the response")
        named, total = self.rollout_top_p_token_ids, sum(self.rollout_top_p_token_lengths or ())
        num_named = 0 if named is None else len(named)
        if num_named != total:
            rule = f"has {num_named} entries, and rollout_top_p_token_lengths add up to {total}"
            raise EnvError(f"rollout_top_p_token_ids {rule}")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise EnvError(
                f"temperature = {self.temperature}: give the temperature of its tokens, a number of 0 or more"
            )
        if not isinstance(self.status, Status):
            raise EnvError(f"status = {self.status!r}: use Sample.Status, such as Sample.Status.COMPLETED")
