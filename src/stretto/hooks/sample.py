"""`Sample`: one reply to one prompt, as hooks read and write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from stretto.base.errors import EnvError

Message = dict[str, Any]


class Status(Enum):
    """Where a sample is."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One reply. A hook that generates sets tokens, response_length, status and response, perhaps loss_mask and reward.

    tokens are those of the prompt, then those of the response, as the engine was given and gave them.
    """

    Status = Status

    group_index: int | None = None
    """Number of the group: the draw of the task in this run."""
    index: int | None = None
    """Number of the rollout in its group."""
    rollout_id: str | None = None
    """Of the episode; samples that one call of `generate` returned have the same."""
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    """Tokens behind the first prompt."""
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """1 for tokens of the response that are trained, 0 for those of tools and the like; None: all are."""
    rollout_log_probs: list[float] | None = None
    """Of the response's tokens under the policy that sampled them; those that `post` asked for are known."""
    weight_versions: list[int] = field(default_factory=list)
    remove_sample: bool = False
    """True: counts in its group's rewards, and is not trained."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Its fields, and whatever else was set on it, as plain values."""
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Sample:
        """The way back; keys that are no field become attributes."""
        values = dict(values)
        values["status"] = Status(values.get("status", "pending"))
        known = {each.name for each in fields(Sample)}
        sample = Sample(**{key: value for key, value in values.items() if key in known})
        for key, value in values.items():
            if key not in known:
                setattr(sample, key, value)
        return sample

    def get_reward_value(self, args: Any) -> float:
        """The reward as a number: of a dictionary the entry `args.reward_key`.

        Raises: EnvError where that is no number.
        """
        value = self.reward
        if isinstance(value, dict):
            key = getattr(args, "reward_key", None)
            if key is None or key not in value:
                raise EnvError(f"the reward has the keys {sorted(value)}; name one of them as reward_key")
            value = value[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EnvError(f"the reward is {value!r}, not a number")
        return float(value)

    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        *,
        trainable: bool = True,
        text: str = "",
    ) -> None:
        """More of the response: sampled tokens with their log-probabilities, or given ones.

        Raises: EnvError for sampled tokens without as many log-probabilities.
        """
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            got = "none" if log_probs is None else len(log_probs)
            raise EnvError(f"{len(tokens)} trainable tokens with {got} log-probabilities; give one a token")
        mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        known = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response += text
        self.response_length += len(tokens)
        self.loss_mask = [*mask, *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [*known, *(log_probs if trainable and log_probs else [0.0] * len(tokens))]

    def strip_last_output_tokens(self, count: int) -> None:
        """Take back the last tokens of the response."""
        count = min(count, self.response_length)
        if not count:
            return
        self.tokens = self.tokens[:-count]
        self.response_length -= count
        for name in ("loss_mask", "rollout_log_probs"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, values[: self.response_length])

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def check(self) -> None:
        """Raises: EnvError when its parts do not fit together."""
        if not 0 <= self.response_length <= len(self.tokens):
            raise EnvError(
                f"response_length = {self.response_length}, but the sample has {len(self.tokens)} tokens"
            )
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                rule = f"has {len(values)} entries for a response of {self.response_length} tokens"
                raise EnvError(f"{name} {rule}; give one a token of the response")
        if not isinstance(self.status, Status):
            raise EnvError(f"status = {self.status!r}: use Sample.Status, such as Sample.Status.COMPLETED")
