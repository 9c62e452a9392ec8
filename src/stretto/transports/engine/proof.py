"""Compares an engine that joins a run with one that is up: under equal weights both score a prompt alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from stretto.base.errors import EngineError
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.weight_manifest import BFLOAT16_TOLERANCE
from stretto.transports.engine import api
from stretto.transports.engine.completions import decode_completions

if TYPE_CHECKING:
    from jaxtyping import Float32

NUM_TOKENS = 32
"""Tokens of the prompt: those with the first numbers."""


async def scores_of(
    call: Callable[[str, str, bytes], Awaitable[bytes]], url: str, model: str | None
) -> Float32[np.ndarray, " tokens"]:
    """What an engine computes for the prompt: log-probabilities in nats.

    call: makes a request to a route of an engine. Raises: EngineError if it returns none.
    """
    request = GenerateRequest(
        request_id=f"proof-{uuid4().hex}",
        prompt_ids=np.arange(1, NUM_TOKENS + 1, dtype=np.int32),
        sampling=SamplingParams(max_tokens=1),
        cache_salt=f"proof-{uuid4().hex}",
        prompt_logprobs=True,
    )
    found = decode_completions(request, await call(url, api.GENERATE, api.encode_generate(request, model)))[0]
    if found.prompt_logprobs is None or len(found.prompt_logprobs) != NUM_TOKENS:
        raise EngineError(f"{url} returned no log-probabilities for the {NUM_TOKENS} tokens of a prompt")
    return found.prompt_logprobs


def compare(
    new: Float32[np.ndarray, " tokens"], known: Float32[np.ndarray, " tokens"], *, other: str, version: int
) -> None:
    """Raises: EngineError if they differ by more than bfloat16 rounds."""
    if (far := float(np.abs(new - known).mean())) > BFLOAT16_TOLERANCE:
        raise EngineError(
            f"it computes otherwise than {other} under version {version}: log-probabilities of {NUM_TOKENS} tokens "
            f"differ by {far:.3g} nats on average; does it serve the same model?"
        )
