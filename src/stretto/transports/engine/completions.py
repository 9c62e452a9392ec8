"""Encodes and decodes the answer to a request for tokens: completions with their log-probabilities and versions.

The JSON is that of vLLM's `/inference/v1/generate`. Servers call `encode_completions`, clients `decode_completions`;
arrays travel as base64 of .npy files.
"""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.base.errors import EngineError, WireError
from stretto.records.generate import Completion, GenerateRequest, VersionSpan
from stretto.records.support import Support
from stretto.transports.engine.api import GENERATE, Refusal

if TYPE_CHECKING:
    from jaxtyping import UInt


def encode_completions(
    request: GenerateRequest, completions: list[Completion], stop_reasons: list[int | str | None]
) -> bytes:
    """The answer of GENERATE."""
    first = completions[0]
    prompt_tokens = len(request.prompt_ids)
    completion_tokens = sum(len(c.token_ids) for c in completions)
    choices = []
    for index, (completion, stop_reason) in enumerate(zip(completions, stop_reasons)):
        ids = completion.token_ids.tolist()
        choices.append(
            {
                "index": index,
                "finish_reason": completion.finish_reason,
                "stop_reason": stop_reason,
                "token_ids": ids,
                "routed_experts": encode_array(completion.routed_experts),
                "sampling_mask": None if completion.support is None else completion.support.lists(),
                "weight_versions": [
                    {"version": str(s.version), "start": s.start, "end": s.end} for s in completion.versions
                ],
                "logprobs": {
                    "content": [{"token_id": i, "logprob": x} for i, x in zip(ids, completion.logprobs.tolist())]
                },
            }
        )
    return msgspec.json.encode(
        {
            "request_id": request.request_id,
            "usage": usage(prompt_tokens, completion_tokens, first.cached_tokens),
            "prompt_logprobs": encode_prompt_logprobs(request, first),
            "prompt_target_logprobs": None
            if first.target_prompt_logprobs is None
            else first.target_prompt_logprobs.tolist(),
            "kv_transfer_params": None,
            "choices": choices,
        }
    )


def encode_array(array: UInt[np.ndarray, "tokens layers top_k"] | None) -> str | None:
    """An array in vLLM's form of routed experts: an .npy file in base64."""
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return b64encode(file.getbuffer()).decode()


def decode_routed_experts(text: str | None, num_tokens: int) -> UInt[np.ndarray, "tokens layers top_k"] | None:
    """The expert choices for the last `num_tokens` tokens of prompt and completion.

    vLLM omits the last token, from which nothing was predicted; it is then marked as unknown.

    Raises: WireError if the text is not such an array.
    """
    if text is None:
        return None
    try:
        array: np.ndarray = np.load(io.BytesIO(b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise WireError(f"{GENERATE}: routed_experts is not an .npy file in base64: {error}") from error
    if array.ndim != 3 or array.dtype not in (np.uint8, np.uint16) or num_tokens - len(array) not in (0, 1):
        raise WireError(
            f"{GENERATE}: routed_experts is {array.dtype}{list(array.shape)}; uint8 or uint16 "
            f"[{num_tokens} or {num_tokens - 1}, layers, top_k] was expected"
        )
    if len(array) == num_tokens:
        return array
    unknown = np.full((1, *array.shape[1:]), np.iinfo(array.dtype).max, array.dtype)
    whole: np.ndarray = np.concatenate((array, unknown))
    return whole


def decode_sampling_mask(request: GenerateRequest, mask: list[list[int]] | None, num_tokens: int) -> Support | None:
    """The tokens from which each completion token was drawn; None if the request does not truncate sampling.

    Raises: WireError if the mask has another number of tokens.
    """
    if mask is None or not request.sampling.is_truncated:
        return None
    if len(mask) != num_tokens:
        text = f"sampling_mask has {len(mask)} entries for {num_tokens} tokens"
        raise WireError(f"{GENERATE}: the answer to {request.request_id} does not fit: {text}")
    try:
        return Support.of(mask)
    except OverflowError as error:
        raise WireError(f"{GENERATE}: sampling_mask has a token id beyond 32 bits: {error}") from error


def encode_prompt_logprobs(request: GenerateRequest, completion: Completion) -> list[Any] | None:
    """Prompt logprobs in vLLM's form: null for the first token, then {token id: {logprob}} of it and the likeliest."""
    if completion.prompt_logprobs is None:
        return None
    pairs = zip(request.prompt_ids.tolist(), completion.prompt_logprobs.tolist())
    entries: list[Any] = [{str(i): {"logprob": x}} for i, x in pairs]
    if completion.top_prompt_ids is not None and completion.top_prompt_logprobs is not None:
        rows = zip(entries, completion.top_prompt_ids.tolist(), completion.top_prompt_logprobs.tolist())
        for entry, ids, logprobs in rows:
            entry |= {str(i): {"logprob": x} for i, x in zip(ids, logprobs)}
    return [None, *entries[1:]]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float | None  # None if it was not finite, which JSON cannot express


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob]


class _Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs
    stop_reason: int | str | None = None
    weight_versions: list[_Span] = []
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _CachedTokens | None = None


class _Carried(msgspec.Struct, frozen=True):
    """Fields that the worker of Dynamo's router adds, because Dynamo's router drops those that it does not know."""

    weight_versions: dict[str, list[_Span]] = {}
    usage: _Usage | None = None


class _Transfer(msgspec.Struct, frozen=True):
    stretto: _Carried = _Carried()


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage = _Usage()
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None
    prompt_target_logprobs: list[list[float | None]] | None = None
    kv_transfer_params: _Transfer | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


def decode_completions(request: GenerateRequest, data: bytes) -> list[Completion]:
    """The completions in an answer of GENERATE, in sample order.

    Raises: WireError if the answer does not fit the schema, EngineError if log-probabilities are not finite.
    """
    try:
        answer = _ANSWER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{GENERATE}: the answer to {request.request_id} does not fit: {error}") from error
    if len(answer.choices) != request.n:
        raise WireError(f"{GENERATE}: requested n = {request.n} samples, received {len(answer.choices)}")
    carried = (answer.kv_transfer_params or _Transfer()).stretto
    details = (carried.usage or answer.usage).prompt_tokens_details
    prompt_logprobs = None
    if request.prompt_logprobs and answer.prompt_logprobs is not None:
        ids = request.prompt_ids.tolist()
        pairs = zip(ids, answer.prompt_logprobs)
        prompt_logprobs = np.array([0.0 if e is None else e[str(i)].logprob for i, e in pairs], np.float32)
    top_ids, top_logprobs = _decode_top(request, answer)
    targets = _decode_targets(request, answer)
    return [
        Completion(
            token_ids=np.array(choice.token_ids, np.int32),
            logprobs=_finite_logprobs(request, choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            versions=tuple(
                VersionSpan(_version(s.version), s.start, s.end)
                for s in choice.weight_versions or carried.weight_versions.get(str(choice.index), [])
            ),
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            prompt_logprobs=prompt_logprobs,
            top_prompt_ids=top_ids,
            top_prompt_logprobs=top_logprobs,
            target_prompt_logprobs=targets,
            routed_experts=decode_routed_experts(
                choice.routed_experts, len(request.prompt_ids) - request.routed_experts_start + len(choice.token_ids)
            ),
            support=decode_sampling_mask(request, choice.sampling_mask, len(choice.token_ids)),
        )
        for choice in sorted(answer.choices, key=lambda c: c.index)
    ]


def _decode_top(request: GenerateRequest, answer: _Answer) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The likeliest tokens of each prompt position, best first, and their logprobs: int32, float32 [prompt, top]."""
    top = request.top_prompt_logprobs
    if not top or answer.prompt_logprobs is None:
        return None, None
    ids = np.zeros((len(answer.prompt_logprobs), top), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    for at, entry in enumerate(answer.prompt_logprobs):
        pairs = [(int(i), x.logprob) for i, x in (entry or {}).items() if x.logprob is not None]
        best = sorted(pairs, key=lambda pair: -pair[1])[:top]
        if len(best) < top and entry is not None:
            raise WireError(
                f"{GENERATE}: {len(best)} likeliest tokens at prompt position {at}, not {top} ({request.request_id})"
            )
        for column, (token, logprob) in enumerate(best):
            ids[at, column], logprobs[at, column] = token, logprob
    return ids, logprobs


def _decode_targets(request: GenerateRequest, answer: _Answer) -> np.ndarray | None:
    """Logprobs of the request's targets, float32 [prompt - 1, targets].

    Raises: Refusal if this engine has none.
    """
    if request.prompt_targets is None:
        return None
    if answer.prompt_target_logprobs is None:
        raise Refusal("prompt_targets: this engine has log-probabilities of the likeliest tokens only")
    return np.array(answer.prompt_target_logprobs, np.float32).reshape(request.prompt_targets.shape)


def _finite_logprobs(request: GenerateRequest, choice: _Choice) -> np.ndarray:
    content = choice.logprobs.content
    values = [entry.logprob for entry in content if entry.logprob is not None]
    logprobs = np.array(values, np.float32)
    # No logprob is above 0, so a sum within these bounds shows that all are finite; it is found sooner.
    if len(values) < len(content) or (not -1e30 < sum(values) < 1e30 and not np.isfinite(logprobs).all()):
        version = choice.weight_versions[-1].version if choice.weight_versions else "0"
        raise EngineError(
            f"weights of version {version} give log-probabilities that are not finite ({request.request_id}): training "
            "has diverged, or the model is damaged"
        )
    return logprobs


def _version(text: str) -> int:
    """A version in an answer; vLLM's "default" means never updated, which is version 0."""
    return int(text) if text.isdigit() else 0
