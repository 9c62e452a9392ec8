"""What rollout functions written for vime import besides `post`: GET requests, loading of functions, an event loop.

vime.utils.http_utils.get        get             vime.utils.misc.load_function     load_function
vime.utils.async_utils.run       run             vime.rollout.rm_hub.async_rm      stretto.envs.rewards.builtin.async_rm
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from stretto.base.errors import EngineError
from stretto.base.foreign import load_object
from stretto_vime.hooks.engine import headers_for

WORKERS = "/workers"


async def get(url: str) -> dict[str, Any]:
    """The JSON at a URL. An engine without a router lists itself as the only worker.

    Raises: EngineError if the server answers an error or not at all.
    """
    import aiohttp

    parts = urlsplit(url)
    try:
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers_for(url)) as response:
            if response.status == 404 and parts.path == WORKERS:
                return {"workers": [{"url": f"{parts.scheme}://{parts.netloc}"}]}
            if response.status >= 400:
                raise EngineError(f"GET {url}: {response.status}: {(await response.text())[:500]}")
            return await response.json(content_type=None)
    except aiohttp.ClientError as cause:
        raise EngineError(f"GET {url}: {cause!r}") from cause


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module.function`.

    Raises: ConfigError if there is none.
    """
    return load_object(path, "load_function")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its result; for rollout functions that are not `async`, which run in a thread."""
    return asyncio.run(coroutine)
