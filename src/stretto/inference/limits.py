"""Limits of requests to both engines, and the messages of those that exceed them.

`refusal_reason` checks a request before it changes the embedded engine's state; vllm/bodies.py uses the same limits.
Numbers must fit into the arrays of embedded/slots.py. Sizes are limited so that no request slows the steps of all
others, or takes memory that is never freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.api import Refusal

MIN_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature overflow float32."""
MAX_TOP_K = 2**31 - 1
MAX_STOP_TOKEN_IDS = 256
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
"""vLLM's default."""
MAX_TARGETS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
"""OpenAI's."""


def refusal_reason(spec: GenerateRequest, *, vocab_size: int, max_model_len: int, max_num_seqs: int) -> str | None:
    """Why this request cannot be served, as a message for its sender; None if it can."""
    ids = spec.prompt_ids
    if not len(ids):
        return "token_ids: the prompt is empty; at least one token is needed"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        return unknown_token("token_ids", low if low < 0 else high, vocab_size)
    if len(ids) >= max_model_len:
        return long_prompt(len(ids), max_model_len)
    if not 1 <= spec.n <= max_num_seqs:
        return bad_n(spec.n, max_num_seqs)
    if spec.cache_salt == "":
        return "cache_salt: '' is not allowed; it must be null or a non-empty text"
    if spec.sampling.max_tokens == 0 and not spec.prompt_logprobs:
        return "max_tokens: 0 is not allowed without prompt_logprobs; it must be 1 or more"
    checks = (
        _check_scores(spec, vocab_size),
        _check_sampling(spec.sampling),
        _check_stops(spec.sampling, vocab_size),
        _check_biases(spec.sampling, vocab_size),
    )
    return next(itertools.chain(*checks), None)


def unknown_token(where: str, token_id: int, vocab_size: int) -> str:
    return f"{where}: token id {token_id} is out of vocabulary; ids are 0 to {vocab_size - 1}"


def long_prompt(num_tokens: int, max_model_len: int) -> str:
    return (
        f"token_ids: the prompt has {num_tokens} tokens; with at least one sampled token the engine's limit is "
        f"{max_model_len} (max_model_len)"
    )


def bad_n(n: int, max_num_seqs: int) -> str:
    return f"n: {n} is not in 1 to {max_num_seqs} (max_num_seqs)"


def too_many_adapters(max_loras: int) -> str:
    return f"lora_name: {max_loras} adapters are loaded, and inference.lora.max_loras allows no more; unload one"


def check_text_size(where: str, num_bytes: int, *, max_model_len: int, token_bytes: int) -> None:
    """Refuse a text that has too many tokens for sure; tokenizing it would take a second per megabyte.

    token_bytes: bytes of the longest token.
    """
    if num_bytes > max_model_len * token_bytes:
        raise Refusal(
            f"{where}: the text has {num_bytes} bytes, and a token has at most {token_bytes}; the engine's limit is "
            f"{max_model_len} tokens (max_model_len)"
        )


def check_queue(num_waiting: int, max_waiting: int) -> None:
    """Raises: Refusal 429 if as many requests wait as may."""
    if num_waiting >= max_waiting:
        raise Refusal(f"{num_waiting} requests wait already (max_waiting_requests); try again later", 429)


def _check_scores(spec: GenerateRequest, vocab_size: int) -> Iterator[str]:
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    if not 0 <= spec.top_prompt_logprobs <= most:
        yield f"prompt_logprobs: {spec.top_prompt_logprobs} is not allowed; it must be 0 to {most}"
    targets = spec.prompt_targets
    if targets is None:
        return
    if not spec.prompt_logprobs:
        yield "prompt_targets: prompt_logprobs must be given too"
    if targets.shape[0] != len(spec.prompt_ids) - 1 or targets.shape[1] > MAX_TARGETS:
        yield (
            f"prompt_targets: {targets.shape[0]} rows of {targets.shape[1]} for a prompt of {len(spec.prompt_ids)} "
            f"tokens; there must be a row of at most {MAX_TARGETS} for each token but the first"
        )
    if targets.size and (targets.min() < -1 or targets.max() >= vocab_size):
        yield f"prompt_targets: ids are 0 to {vocab_size - 1}, or -1 for none"


def _check_sampling(params: SamplingParams) -> Iterator[str]:
    temperature = params.temperature
    is_scale = temperature == 0 or MIN_TEMPERATURE <= temperature < float("inf")
    top_k, max_tokens = params.top_k, params.max_tokens
    checks = (
        (is_scale, "temperature", temperature, f"0 (greedy), or {MIN_TEMPERATURE:g} or more and finite"),
        (0 < params.top_p <= 1, "top_p", params.top_p, "more than 0 and at most 1"),
        (top_k is None or 1 <= top_k <= MAX_TOP_K, "top_k", top_k, f"1 to {MAX_TOP_K}, or null for all"),
        (0 <= params.min_p <= 1, "min_p", params.min_p, "0 to 1"),
        (max_tokens is None or max_tokens >= 0, "max_tokens", max_tokens, "0 or more"),
        (0 <= params.min_tokens < 2**31, "min_tokens", params.min_tokens, f"0 to {2**31 - 1}"),
    )
    for is_allowed, name, value, rule in checks:
        if not is_allowed:
            yield f"{name}: {value} is not allowed; it must be {rule}"


def _check_stops(params: SamplingParams, vocab_size: int) -> Iterator[str]:
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield (
            f"stop_token_ids: {len(params.stop_token_ids)} ids are too many; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    for i in params.stop_token_ids:
        if not 0 <= i < vocab_size:
            yield unknown_token("stop_token_ids", i, vocab_size)
    if len(params.stop) > MAX_STOPS:
        yield f"stop: {len(params.stop)} texts are too many; at most {MAX_STOPS} are allowed"
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            yield f"stop: a text has {len(text)} characters; it must have 1 to {MAX_STOP_CHARACTERS}"


def _check_biases(params: SamplingParams, vocab_size: int) -> Iterator[str]:
    """Check logit_bias and bad_words."""
    if len(params.logit_bias) > MAX_BIASES:
        yield f"logit_bias: {len(params.logit_bias)} tokens are too many; at most {MAX_BIASES} are allowed"
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            yield unknown_token("logit_bias", token, vocab_size)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield f"logit_bias: {bias} of token {token} is not allowed; it must be -{MAX_BIAS:g} to {MAX_BIAS:g}"
    if len(params.bad_words) > MAX_BAD_WORDS:
        yield f"bad_words: {len(params.bad_words)} texts are too many; at most {MAX_BAD_WORDS} are allowed"
    for text in params.bad_words:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            yield f"bad_words: a text has {len(text)} characters; it must have 1 to {MAX_STOP_CHARACTERS}"
