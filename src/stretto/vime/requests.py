"""JSON over HTTP for a user's functions and for rewards that servers compute."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from stretto.base.errors import EngineError
from stretto.vime.arguments import Address, address_of

CONNECT_TIMEOUT_S = 30.0
GENERATE = "/inference/v1/generate"
SAMPLING_ROUTES = (GENERATE, "/v1/completions", "/v1/chat/completions")
"""Ends of the paths whose answers are sampled: the same request twice gives two."""
_model_keys: dict[Address, str] = {}


def give_key(urls: Sequence[str], key: str) -> None:
    """Let `send` give this API key to a frozen model's engines at these addresses, and to no other server."""
    _model_keys.update({address_of(url): key for url in urls})


async def send(
    url: str, payload: dict[str, Any], max_retries: int = 60, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Send JSON, return JSON. Retries every second while the server is unreachable or full (429, 503).

    It waits for an answer without a limit. A request that samples is never sent again once the server may have
    received it; all others are, after any 5xx and after a broken connection. A frozen model of the run gets its key.

    Raises: EngineError when the server answers an error or does not answer.
    """
    import aiohttp

    if (key := _model_keys.get(address_of(url))) is not None:
        headers = {"Authorization": f"Bearer {key}"} | (headers or {})
    last = ""
    is_sampling = urlsplit(url).path.endswith(SAMPLING_ROUTES)
    # The time of an answer has no limit, because a reply may be long.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for attempt in range(max_retries + 1):
            try:
                async with session.post(url, json=payload, headers=headers) as response:
                    if response.status < 400:
                        return await response.json(content_type=None)
                    text = (await response.text())[:500]
                    # A request that samples is sent again only if the server has turned it away.
                    if response.status not in (429, 503) and (is_sampling or response.status < 500):
                        raise EngineError(f"POST {url}: {response.status}: {text}")
                    last = f"{response.status}: {text[:200]}"
            except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as cause:  # it was not sent
                last = f"{type(cause).__name__}: {cause}"
            except (aiohttp.ClientConnectionError, TimeoutError) as cause:
                if is_sampling:
                    raise EngineError(
                        f"POST {url}: the connection broke while the reply was sampled ({cause!r}); the request is "
                        "not sent again, because that would sample another"
                    ) from cause
                last = f"{type(cause).__name__}: {cause}"
            if attempt < max_retries:
                await asyncio.sleep(1.0)
    raise EngineError(f"POST {url}: no answer in {max_retries + 1} attempts; the last: {last}")
