"""What one engine computes for given tokens: those of a canary, of a finished rollout, and of an engine that joins.

Each request has a cache salt of its own: no prefix is used that was cached under other weights, or that another engine
has put into a store that they share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from stretto.base.errors import EngineError
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.weight_manifest import BFLOAT16_TOLERANCE, CanaryImage
from stretto.transports.engine import api
from stretto.transports.engine.completions import decode_completions

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32

Call = Callable[[str, str, bytes], Awaitable[bytes]]
"""Makes a request to a route of an engine: (address, route, body) -> the answer's body."""

NUM_TOKENS = 32
"""Tokens of the prompt for an engine that joins: those with the first numbers."""
NUM_DECODED = 16
"""Tokens that an engine samples after a canary, to compare decoding with reading."""
_MAX_ABORTS = 10  # of one request before it is an error


@dataclass(frozen=True)
class CanaryScores:
    """What one engine computes for a canary: log-probabilities in nats."""

    prompt: Float32[np.ndarray, " tokens"]  # of the fixed tokens; the first is 0
    decoded: Float32[np.ndarray, " decoded"]  # of tokens that it sampled after them
    read: Float32[np.ndarray, " decoded"]  # of the same tokens, read as part of a prompt


async def read(
    call: Call,
    url: str,
    model: str | None,
    token_ids: Int32[np.ndarray, " tokens"],
    name: str,
    image: CanaryImage | None = None,
) -> Completion:
    """What an engine computes for tokens that it reads: `prompt_logprobs` in nats, and one token that it samples.

    name: request id and cache salt. Raises: EngineError if it returns no scores.
    """
    completion = await _ask(call, url, model, token_ids, name, image, is_scored=True)
    scores = completion.prompt_logprobs
    if scores is None or len(scores) != len(token_ids):
        raise EngineError(f"{url} returned no log-probabilities for the prompt's {len(token_ids)} tokens")
    return completion


async def scores_of_canary(
    call: Call,
    url: str,
    model: str | None,
    token_ids: Int32[np.ndarray, " tokens"],
    name: str,
    image: CanaryImage | None,
) -> CanaryScores:
    """What an engine computes for a canary, and for tokens that it samples after it.

    image: for the placeholders in the tokens. Raises: EngineError if it returns no scores.
    """
    decoded = await _ask(call, url, model, token_ids, f"{name}-decoded", image, is_scored=False)
    tokens = decoded.token_ids
    if image is not None and image.token_id in tokens:  # it stands for no image, so it cannot be read
        tokens = tokens[: int(np.argmax(tokens == image.token_id))]
    whole = np.concatenate([token_ids, tokens])
    scores = (await read(call, url, model, whole, f"{name}-read", image)).prompt_logprobs
    assert scores is not None, "read raises without"
    n = len(token_ids)
    return CanaryScores(prompt=scores[:n], decoded=decoded.logprobs[: len(tokens)], read=scores[n:])


async def _ask(
    call: Call,
    url: str,
    model: str | None,
    prompt_ids: np.ndarray,
    name: str,
    image: CanaryImage | None,
    *,
    is_scored: bool,
) -> Completion:
    request = GenerateRequest(
        request_id=name,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=1 if is_scored else NUM_DECODED),
        cache_salt=name,
        prompt_logprobs=is_scored,
        images=() if image is None else (image.draw(),),
        image_token_id=None if image is None else image.token_id,
    )
    body = api.encode_generate(request, model)
    for _ in range(_MAX_ABORTS):  # a rollout function may abort all requests
        completion = decode_completions(request, await call(url, api.GENERATE, body))[0]
        if completion.finish_reason != "abort":
            break
    return completion


async def scores_of(call: Call, url: str, model: str | None) -> Float32[np.ndarray, " tokens"]:
    """What an engine that joins, or one that is up, computes for a prompt: log-probabilities in nats.

    Raises: EngineError if it returns none.
    """
    prompt_ids = np.arange(1, NUM_TOKENS + 1, dtype=np.int32)
    scores = (await read(call, url, model, prompt_ids, f"proof-{uuid4().hex}")).prompt_logprobs
    assert scores is not None, "read raises without"
    return scores


def compare(
    new: Float32[np.ndarray, " tokens"], known: Float32[np.ndarray, " tokens"], *, other: str, version: int
) -> None:
    """Raises: EngineError if they differ by more than bfloat16 rounds."""
    if (far := float(np.abs(new - known).mean())) > BFLOAT16_TOLERANCE:
        raise EngineError(
            f"it computes otherwise than {other} under version {version}: log-probabilities of {NUM_TOKENS} tokens "
            f"differ by {far:.3g} nats on average; does it serve the same model?"
        )
