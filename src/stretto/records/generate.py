"""Requests to an engine and its answers, independent of the kind of engine and of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from stretto.records.images import Image
from stretto.records.support import Support

NO_EXPERT = (255, 65535)
"""Marks a token of `routed_experts` whose experts are unknown: the largest value of the dtype, in every entry."""

REPLAYED: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
}
"""Sampling parameters that leave a part of the vocabulary to draw from, which the trainer can replay, and the values
without effect."""
NOT_REPLAYED: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "structured_outputs": (None,),
}
"""Sampling parameters that change probabilities in a way that the trainer does not replay, and the values without
effect."""

_MEMBER_STRIDE = 0x1E3779B97F4A7C15


def member_seed(seed: int, member: int) -> int:
    """Seed of a separate request for the tokens of completion `member` of a request.

    This holds for the embedded engine, whose random numbers depend only on seed and position.
    """
    return seed if member == 0 else (seed + member * _MEMBER_STRIDE) & (2**63 - 1)


def changed_by(given: Mapping[str, Any], parameters: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Those of the parameters that have an effect, as `name = value`."""
    return [f"{name} = {given[name]}" for name, same in parameters.items() if given.get(name) not in same]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled.

    Logprobs are those of the processed distribution (after temperature, top-k, ...).
    """

    temperature: float = 1.0  # 0 = greedy (logprobs are then those of the unscaled distribution)
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int | None = None  # None = up to the model's context
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # if n > 1, completion i uses (seed, i)
    min_tokens: int = 0  # before so many, no end token is sampled and no stop text ends the reply
    logit_bias: dict[int, float] = {}  # by token; added to its logit
    bad_words: tuple[str, ...] = ()  # the token that would complete one is not sampled

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary only."""
        has_cut = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        has_ban = self.min_tokens > 0 or bool(self.bad_words)
        return (has_cut or has_ban) and self.temperature > 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for n completions of one prompt.

    session_id: keeps the turns of one rollout on one engine. images: of the prompt, in the order of their placeholders,
    which are image_token_id.
    """

    request_id: str
    prompt_ids: np.ndarray  # int32 [prompt]
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    cache_salt: str | None = None
    session_id: str | None = None
    adapter: str | None = None  # name of the LoRA adapter to use; None = the engine's own model
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0  # with prompt_logprobs: number of likeliest tokens per prompt position
    # With prompt_logprobs: further tokens to score at each prompt position but the first; -1 is none.
    prompt_targets: np.ndarray | None = None  # int32 [prompt - 1, targets]
    images: tuple[Image, ...] = ()
    image_token_id: int | None = None
    routed_experts_start: int = 0  # first prompt token whose expert choices are returned

    def sample(self, i: int) -> GenerateRequest:
        """The request for completion i alone."""
        seed = self.sampling.seed
        sampling = msgspec.structs.replace(self.sampling, seed=None if seed is None else member_seed(seed, i))
        return msgspec.structs.replace(self, request_id=f"{self.request_id}-{i}", n=1, sampling=sampling)


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens start <= i < end of a completion were sampled from this version of the policy."""

    version: int
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled continuation of a prompt; token_ids include the end token if the model produced it."""

    token_ids: np.ndarray  # int32 [completion]
    logprobs: np.ndarray  # float32 [completion], nats
    finish_reason: str  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop text or token that ended it; None: an end token of the model
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None  # float32 [prompt], index 0 is 0.0
    # The likeliest tokens of each prompt position and their logprobs; row 0 is zeros.
    top_prompt_ids: np.ndarray | None = None  # int32 [prompt, top]
    top_prompt_logprobs: np.ndarray | None = None  # float32 [prompt, top]
    target_prompt_logprobs: np.ndarray | None = None  # float32 [prompt - 1, targets], NaN without a target
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [prompt + completion, layers, top_k]
    # Tokens that each completion token was drawn from, if only a part of the vocabulary was and the engine reports it.
    support: Support | None = None
