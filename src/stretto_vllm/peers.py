"""Watches the other nodes of one engine: when one of them is lost, this node ends too.

The ranks of a mixture of experts, of TP and of PP compute every step together. If the ranks of one node are lost, the
others wait for them, or do not notice while they have no requests; and a restarted node cannot join the others. So each
node polls /health of the others and ends if one does not answer; the supervisor then restarts all.

A node whose ranks belong to the server of another node (`headless`) runs `HeadlessNode`, which answers /health too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

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
"""Limit for the first answer of a peer: all nodes begin to serve when the last one is ready."""
ENDING_S = 30.0
"""How long this process may take to end once a peer is lost. vLLM's server may wait for its own tasks without end."""
_CONNECT_S = 1.0
PROCESS_HEADER = "X-Stretto-Process"
"""A headless node's process id in answers: it answers soon after a restart, which others must detect."""


class Peers:
    """The servers of the other nodes; `failure` is a message about the lost peer, or None."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self.failure: str | None = None
        self.start_s = START_S

    async def watch(self) -> None:
        """Watch all peers; if one is lost, end this process by SIGTERM."""
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
            _end_this_process()

    def find_lost(self) -> None:
        """After a failure of this engine, set `failure` if a peer refuses connections, the likely cause.

        A peer that fails as a consequence still accepts connections at this time.
        """
        for url in self.urls:
            at = urlsplit(url)
            try:
                socket.create_connection((at.hostname, at.port), _CONNECT_S).close()
            except OSError as error:
                self.failure = self.failure or _failure_message(url, str(error))

    async def _watch(self, http: aiohttp.ClientSession, url: str) -> None:
        limit_s, last_answer = self.start_s, time.monotonic()
        known_process: str | None = None
        while True:
            reason, process = await _check(http, url)
            if reason is None:
                limit_s, last_answer = REFUSED_S, time.monotonic()
                if known_process not in (None, process):
                    raise EngineError(_failure_message(url, "it was restarted"))
                known_process = process
            elif time.monotonic() - last_answer > limit_s:
                raise EngineError(_failure_message(url, reason))
            await asyncio.sleep(INTERVAL_S)


class HeadlessNode:
    """A node without a server of vLLM's: answers /health and watches the others, in a thread of its own."""

    def __init__(self, host: str, port: int, peers: Peers) -> None:
        self._host, self._port, self._peers = host, port, peers
        # The others serve when the weights of all are loaded. A node that ends before that breaks the connections
        # of the ranks, which then end by themselves.
        peers.start_s = math.inf

    def start(self) -> None:
        """Start the thread; it ends with the process."""
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True, name="headless-node").start()

    async def _run(self) -> None:
        headers = {PROCESS_HEADER: uuid.uuid4().hex}

        async def alive(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok"}, headers=headers)

        app = web.Application()
        app.router.add_routes([web.get(api.HEALTH, alive), web.get(api.LIVENESS, alive)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            self._peers.failure = f"cannot listen at {self._host}:{self._port}: {error}"
            _end_this_process()
            return
        await self._peers.watch()
        await asyncio.Event().wait()  # answer until the process ends


def _end_this_process() -> None:
    """By SIGTERM, and at once where that has not ended it in ENDING_S."""
    overdue = threading.Timer(ENDING_S, os._exit, (1,))
    overdue.daemon = True
    overdue.start()
    os.kill(os.getpid(), signal.SIGTERM)


async def _check(http: aiohttp.ClientSession, url: str) -> tuple[str | None, str | None]:
    """Why the server at `url` is not healthy (None if it is), and its PROCESS_HEADER if it has one."""
    try:
        async with http.get(url + api.HEALTH) as answer:
            reason = None if answer.status == 200 else f"HTTP {answer.status}"
            return reason, answer.headers.get(PROCESS_HEADER)
    except TimeoutError:
        return f"no answer in {SILENT_S:g} s", None
    except (aiohttp.ClientError, OSError) as error:
        return str(error), None


def _failure_message(url: str, reason: str) -> str:
    return (
        f"another node of this engine, {url}, is gone ({reason}). An engine over several nodes ends if any of them "
        "does; restart it on all nodes"
    )
