"""`post`: HTTP for hooks. Requests for tokens go through the run's own client, so that what comes back is known.

While a hook generates a sample, a request to `/inference/v1/generate` of the policy becomes a turn of the rollout: it
has the rollout's session, seed, weights and limits, and its tokens, log-probabilities and versions are written
down. In a rollout or eval function such a request is salted with the version that is loaded when it is sent, so that
no engine answers it with prompts it read under other weights. Anything else, another model's engine too, is plain HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from stretto.base.errors import EngineError, EnvError
from stretto.hooks.arguments import address_of

GENERATE = "/inference/v1/generate"
NAMES = {"max_new_tokens": "max_tokens"}
SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}
"""What a request may say about sampling; the rest is the run's."""
IGNORED = {
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
}
"""What it may say besides, and changes nothing: log-probabilities are always written down."""


class Turns(Protocol):
    """The part of a rollout's context that a request needs."""

    async def generate(self, prompt_ids: np.ndarray, **sampling: Any) -> Any: ...


class _Episode:
    def __init__(self, ctx: Turns, urls: Sequence[str]) -> None:
        self.ctx, self.lock = ctx, asyncio.Lock()
        self._addresses = {address_of(url) for url in urls}

    def is_asked(self, url: str) -> bool:
        """Is this a request to the policy for tokens?"""
        return urlsplit(url).path.endswith(GENERATE) and address_of(url) in self._addresses


class _Salt:
    def __init__(self, urls: Sequence[str], version: Callable[[], int]) -> None:
        self._addresses, self._version = {address_of(url) for url in urls}, version

    def of(self, url: str) -> dict[str, str]:
        """What is added to a request."""
        is_asked = urlsplit(url).path.endswith(GENERATE) and address_of(url) in self._addresses
        return {"cache_salt": str(self._version())} if is_asked else {}


_salt: ContextVar[_Salt | None] = ContextVar("salt", default=None)
_episode: ContextVar[_Episode | None] = ContextVar("episode", default=None)


@contextmanager
def playing(ctx: Turns, urls: Sequence[str]) -> Iterator[None]:
    """Requests for tokens made inside, of the policy that answers at these addresses, are turns of this rollout."""
    token = _episode.set(_Episode(ctx, urls))
    try:
        yield
    finally:
        _episode.reset(token)


@contextmanager
def salted(urls: Sequence[str], version: Callable[[], int]) -> Iterator[None]:
    """Requests for tokens made inside, of the policy that answers at these addresses, share prompts of one version."""
    token = _salt.set(_Salt(urls, version))
    try:
        yield
    finally:
        _salt.reset(token)


async def post(
    url: str, payload: dict[str, Any], max_retries: int = 60, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Send JSON, return JSON. Where the server cannot be reached or answers 5xx it is tried again, every second.

    Raises: EngineError when it answers an error, or not at all; EnvError for a request that says too little.
    """
    episode = _episode.get()
    if episode is not None and episode.is_asked(url):
        async with episode.lock:  # turns of one rollout come one after the other
            return await _turn(episode.ctx, payload)
    if (salt := _salt.get()) is not None:
        payload = salt.of(url) | payload
    return await _send(url, payload, max_retries, headers)


async def _turn(ctx: Turns, payload: dict[str, Any]) -> dict[str, Any]:
    tokens = payload.get("token_ids")
    if not tokens:
        raise EnvError("a request to /inference/v1/generate needs `token_ids`, the tokens to continue")
    given = {NAMES.get(key, key): value for key, value in (payload.get("sampling_params") or {}).items()}
    if unknown := sorted(set(given) - SAMPLING - IGNORED - {"n", "seed"}):
        known = ", ".join(sorted(SAMPLING))
        raise EnvError(f"sampling_params has {', '.join(unknown)}; a turn of a rollout takes {known}")
    if given.get("n", 1) != 1:
        raise EnvError("sampling_params.n: a turn has one reply; the run's group_size makes several rollouts")
    settings = {key: value for key, value in given.items() if key in SAMPLING and value is not None}
    if "stop_token_ids" in settings:
        settings["stop_token_ids"] = tuple(settings["stop_token_ids"])
    if isinstance(stop := settings.get("stop"), str | list):
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    reply = await ctx.generate(np.asarray(tokens, np.int32), **settings)
    choice = {
        "index": 0,
        "token_ids": reply.token_ids.tolist(),
        "text": reply.text,
        "finish_reason": reply.finish_reason,
    }
    return {"choices": [choice]}


async def _send(
    url: str, payload: dict[str, Any], max_retries: int, headers: dict[str, str] | None
) -> dict[str, Any]:
    import aiohttp

    last = ""
    async with aiohttp.ClientSession() as session:
        for attempt in range(max_retries + 1):
            try:
                async with session.post(url, json=payload, headers=headers) as response:
                    if response.status < 500:
                        if response.status >= 400:
                            text = (await response.text())[:500]
                            raise EngineError(f"POST {url}: {response.status}: {text}")
                        return await response.json(content_type=None)
                    last = f"{response.status}: {(await response.text())[:200]}"
            except (aiohttp.ClientConnectionError, TimeoutError) as cause:
                last = f"{type(cause).__name__}: {cause}"
            if attempt < max_retries:
                await asyncio.sleep(1.0)
    raise EngineError(f"POST {url}: no answer in {max_retries + 1} attempts; the last: {last}")
