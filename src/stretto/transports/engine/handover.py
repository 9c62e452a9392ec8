"""Drains engines that leave a run: nothing new, time for what they are sampling, and the rest is handed over.

    READY -> (off the routers' lists) -> wait_s for its replies -> ended with the tokens that they have -> idle

The client continues such a reply on another engine (client.py). Without a router it knows what runs on the engine, and
whose an answer is. A router tells neither: the engine is asked for the number of its requests, and a reply that ends
early is handed over if a handover has begun since it was sent, and nobody has ended replies on purpose meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from stretto.base.errors import EngineError
from stretto.transports.engine import api
from stretto.transports.engine.fleet import EngineNode, EngineState, Fleet
from stretto.transports.engine.routed import RoutedFleet

logger = logging.getLogger(__name__)

_ABORT_S = 0.5  # after which the requests of a drained engine are aborted again
_COUNT_S = 0.2  # interval at which an engine behind a router is asked how many requests it has
_MAX_SILENT = 3  # answers in a row that it may fail to give until it counts as gone

Mark = tuple[int, int]
"""Handovers and aborts up to a moment."""


class Handover:
    """Engines of a fleet that leave it, or have left."""

    def __init__(
        self, fleet: Fleet, routed: RoutedFleet, admin: Callable[..., Awaitable[bytes]], timeout_s: float
    ) -> None:
        """admin: makes a call to a route of one engine; timeout_s: longest wait for its answer."""
        self._fleet, self._routed, self._admin, self._timeout_s = fleet, routed, admin, timeout_s
        self._done: set[str] = set()  # engines whose replies are handed over, without a router
        self.num_handovers = 0
        """How many engines behind a router had replies that were ended."""
        self.num_aborts = 0
        """Calls that end replies which nobody continues."""

    def mark(self) -> Mark:
        """This moment, at which a request is sent."""
        return self.num_handovers, self.num_aborts

    def covers(self, url: str, since: Mark) -> bool:
        """Whether a reply from an engine, or a router, that ends early is to be continued."""
        if not self._routed.has_router:
            return url in self._done
        return self.num_handovers > since[0] and self.num_aborts == since[1]

    def forget(self, url: str) -> None:
        """This engine joins again: its replies are its own."""
        self._done.discard(url)

    async def drain(self, url: str, wait_s: float) -> None:
        """Send an engine nothing new; replies that do not end within wait_s end with the tokens that they have.

        Raises: EngineError if no other engine is up, or if a router would go on sending it requests.
        """
        node = self._fleet.nodes[url]
        if (fault := await self._routed.fault()) is not None:
            raise EngineError(f"{fault}: it would go on sending requests to {url}; end the engine itself")
        together = await self._fleet.drain(url)
        if self._routed.has_router:
            self._routed.follow(together)
            await asyncio.gather(*(self.admit(each, is_open=False) for each in together))
            await self._routed.correct_until_done()
            await self._end_routed(node, wait_s)
            return
        await node.wait_until_idle(wait_s)
        self._done.add(url)
        while node.requests and self._fleet.nodes.get(url) is node:
            if not await self._abort_all(url):  # it is gone, perhaps with its host: they are sent again elsewhere
                for call in tuple(node.requests):
                    call.cancel()
            await node.wait_until_idle(_ABORT_S)

    async def _end_routed(self, node: EngineNode, wait_s: float) -> None:
        """Wait until an engine behind a router has no requests; from wait_s on they are ended.

        If it does not answer, its requests fail, and the router or the client sends them again.
        """
        deadline, num_idle, num_silent = time.monotonic() + wait_s, 0, 0
        while self._fleet.nodes.get(node.url) is node and node.state is EngineState.DRAINED:
            try:
                num_idle = 0 if await self.num_requests(node.url) else num_idle + 1
                num_silent = 0
            except (EngineError, TimeoutError) as error:
                logger.info("engine %s does not say what it still plays: %s", node.url, error)
                num_idle, num_silent = 0, num_silent + 1
                if num_silent == _MAX_SILENT:
                    return
                await asyncio.sleep(_COUNT_S)
                continue
            if num_idle == 2:  # the router may have had a request on its way to it
                return
            if not num_idle and time.monotonic() >= deadline:
                self.num_handovers += 1
                await self._abort_all(node.url)
            await asyncio.sleep(_COUNT_S)

    async def num_requests(self, url: str) -> float:
        """Requests that run and wait on an engine. Raises: EngineError, TimeoutError if it does not answer."""
        async with asyncio.timeout(self._timeout_s):
            found = api.metrics_of((await self._admin(url, api.METRICS, method="GET")).decode())
        return found.get("vllm:num_requests_running", 0.0) + found.get("vllm:num_requests_waiting", 0.0)

    async def _abort_all(self, url: str) -> bool:
        """End all requests of an engine with the tokens they have; False if it does not answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._admin(url, api.ABORT, msgspec.json.encode({"request_ids": None}))
        except (EngineError, TimeoutError):
            return False
        return True

    async def admit(self, url: str, *, is_open: bool) -> None:
        """Let an engine tell routers whether they may send it requests; one that does not answer does not tell."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._admin(url, f"{api.ADMIT}?open={str(is_open).lower()}")
        except (EngineError, TimeoutError) as error:
            logger.info("engine %s does not tell routers that it is %s: %s", url, "in" if is_open else "out", error)
