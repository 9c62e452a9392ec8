"""What is asked of an engine and what comes back, independent of the engine and of HTTP."""

from __future__ import annotations

import msgspec
import numpy as np

NO_EXPERT = (255, 65535)
"""A token of `routed_experts` for which no choice is known has the largest value of its dtype in every entry."""


_MEMBER_STRIDE = 0x1E3779B97F4A7C15


def member_seed(seed: int, member: int) -> int:
    """The seed with which a request of its own draws what sample `member` of a request with `seed` draws.

    Of the embedded engine, whose random numbers depend on seed and position alone.
    """
    return seed if member == 0 else (seed + member * _MEMBER_STRIDE) & (2**63 - 1)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Logprobs always belong to the processed distribution (after temperature, top-k, ...)."""

    temperature: float = 1.0  # 0 = greedy (the logprob is then that of the unscaled distribution)
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int | None = None  # None = up to the model's context
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # with n > 1 sample i draws from (seed, i)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """n samples of one prompt. session_id keeps the turns of one rollout on one engine."""

    request_id: str
    prompt_ids: np.ndarray  # int32 [prompt]
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    cache_salt: str | None = None
    session_id: str | None = None
    adapter: str | None = None  # name of the LoRA adapter to use; None: the engine's own model
    prompt_logprobs: bool = False
    routed_experts_start: int = 0  # prompt token from which expert choices are wanted; those before are known


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens start <= i < end of a completion were sampled from policy `version`."""

    version: int
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sample. token_ids include the end token when the model produced it."""

    token_ids: np.ndarray  # int32 [completion]
    logprobs: np.ndarray  # float32 [completion], nats
    finish_reason: str  # "stop" | "length" | "abort"
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None  # float32 [prompt], index 0 is 0.0
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k], of prompt and reply
