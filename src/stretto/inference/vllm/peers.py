"""Watches the other nodes of one engine: when one of them is gone, this node ends too.

The ranks of a mixture of experts compute every step together. If the ranks of one node are gone, the others wait for
them, or do not notice while they have no requests; and a restarted node cannot join the others. So each node's server
polls /health of the others and ends if one does not answer; the supervisor then restarts all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp

from stretto.base.aio import task_group
from stretto.base.errors import EngineError
from stretto.transports.engine import api

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
REFUSED_S = 5.0
"""How long a peer may refuse connections or answer with an error."""
SILENT_S = 60.0
"""How long a peer may leave a request unanswered."""
START_S = 600.0
"""Time to the first answer of a peer: all nodes begin to serve when the last one is ready."""
_CONNECT_S = 1.0


class Peers:
    """The servers of the other nodes; `failure` is a message about the peer that is gone, or None."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self.failure: str | None = None

    async def watch(self) -> None:
        """Watch all peers; if one is gone, end this process by SIGTERM."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SILENT_S)) as http,
                task_group() as group,
            ):
                for url in self.urls:
                    group.create_task(self._watch(http, url))
        except EngineError as error:
            self.failure = str(error)
            logger.error("%s", error)
            os.kill(os.getpid(), signal.SIGTERM)

    def find_lost(self) -> None:
        """After a failure of this engine, set `failure` if a peer refuses connections: the likely cause.

        A peer that fails as a consequence still accepts connections at this time.
        """
        for url in self.urls:
            at = urlsplit(url)
            try:
                socket.create_connection((at.hostname, at.port), _CONNECT_S).close()
            except OSError as error:
                self.failure = self.failure or _failure_message(url, str(error))

    async def _watch(self, http: aiohttp.ClientSession, url: str) -> None:
        limit_s, last_answer = START_S, time.monotonic()
        while True:
            reason = await _check(http, url)
            if reason is None:
                limit_s, last_answer = REFUSED_S, time.monotonic()
            elif time.monotonic() - last_answer > limit_s:
                raise EngineError(_failure_message(url, reason))
            await asyncio.sleep(INTERVAL_S)


async def _check(http: aiohttp.ClientSession, url: str) -> str | None:
    """Why the server at `url` is not healthy; None if it is."""
    try:
        async with http.get(url + api.HEALTH) as answer:
            return None if answer.status == 200 else f"HTTP {answer.status}"
    except TimeoutError:
        return f"no answer in {SILENT_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return str(error)


def _failure_message(url: str, reason: str) -> str:
    return (
        f"another node of this engine, {url}, is gone ({reason}). An engine over several nodes ends if any of them "
        "does; restart it on all nodes"
    )
