"""Sends requests for tokens: chooses the engine, tries again after failures, and waits while an engine is full.

The turns of a rollout have a session id and go to the engine to which it hashes, where their prefix is cached; other
requests go to the engine with the fewest running requests. Failures:

    no connection, 5xx, 408, 409   infrastructure: retried within the deadline, on another engine if possible
    429 (the engine is full)       waits, without counting attempts or time; fails only if the engine has rejected all
                                   and run none of our requests for recovery_timeout_s
    any other 4xx                  our own mistake: raised at once, with the server's message
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from stretto.base.aio import Deadlines, Limit
from stretto.base.errors import EngineError
from stretto.transports.engine import api, http
from stretto.transports.engine.fleet import Fleet
from stretto.transports.engine.gate import FIRST, Queue, RequestGate, keep_busy, limit_of

logger = logging.getLogger(__name__)

FULL_S = 0.2
"""Pause before a request that found its engine full is sent again."""
_UNAVAILABLE_S = 0.5


class Dispatch:
    """Sends requests for tokens to a router, or to the engines of a fleet."""

    def __init__(
        self,
        urls: Sequence[str],
        connections: http.Connections,
        fleet: Fleet,
        *,
        timeout_s: float,
        max_retries: int,
        recovery_timeout_s: float,
        is_routed: bool,
    ) -> None:
        self._urls, self._http, self._fleet = urls, connections, fleet  # a list that may grow and shrink
        self._timeout_s, self._max_retries = timeout_s, max_retries
        self._recovery_timeout_s, self._is_routed = recovery_timeout_s, is_routed
        self.num_running: dict[str, int] = defaultdict(int)
        """Requests by address, including those that wait at the gate."""
        self._gates: dict[str, RequestGate] = defaultdict(RequestGate)
        self._deadlines = Deadlines()

    @property
    def num_held(self) -> int:
        """Requests that wait here until an engine has room."""
        return sum(gate.num_waiting for gate in self._gates.values())

    def end_held(self, names: Iterable[str] | None) -> None:
        """End requests that wait here, by their names in messages; None: all. Their `send` raises gate.Ended."""
        ended = None if names is None else frozenset(names)
        for gate in self._gates.values():
            gate.end(ended)

    async def keep_busy(self, readings: Callable[[], Awaitable[Mapping[str, Mapping[str, float]]]]) -> None:
        """Send routers as many requests as keep their engines busy, from now on; readings: those of gate.py.

        Every router has all engines.
        """
        gates = [self._gates[url] for url in self._urls]
        num_engines = len(self._fleet.nodes)
        try:
            for gate in gates:
                gate.set_limit(FIRST * num_engines / len(gates))
            await keep_busy(readings, self._follow, num_engines)
        finally:
            for gate in gates:
                gate.set_limit(float("inf"))

    def _follow(self, queues: Sequence[Queue] | None) -> None:
        """Set the gates of routers after a reading; None: the queues are not known, so everything is sent."""
        gates = [self._gates[url] for url in self._urls]
        limit, num_sent = sum(gate.limit for gate in gates), sum(gate.num_running for gate in gates)
        limit = float("inf") if queues is None else limit_of(limit, num_sent, queues)
        for gate in gates:
            gate.set_limit(limit / len(gates))

    async def send(self, what: str, body: bytes, headers: dict[str, str], session_id: str | None) -> tuple[str, bytes]:
        """Send a request and return the engine (or router) and its answer; what: its name in messages.

        Raises: EngineError; gate.Ended if it was ended before it was sent.
        """
        attempt, was_full = 0, False
        limit = self._deadlines.after(self._timeout_s)
        try:
            with limit:
                while True:
                    url = self.choose(session_id, attempt)
                    try:
                        return url, await self._attempt(url, body, headers, what, limit, is_again=was_full)
                    except http.Full as error:
                        was_full = True
                        self._check_rejects(url, what, error)
                    except http.Unavailable as error:
                        logger.info("%s: %s; waiting", what, error)
                        await asyncio.sleep(_UNAVAILABLE_S)
                        await self._fleet.wait_for_any()
                    except http.Transient as error:
                        await self._wait_after(error, url, what, attempt)
                        attempt += 1
        except TimeoutError:
            if not limit.is_over:
                raise
            raise EngineError(f"{what}: no answer from {', '.join(self._urls)} in {self._timeout_s:g} s") from None

    def _check_rejects(self, url: str, what: str, error: http.Full) -> None:
        """Raises: EngineError if an engine rejects everything for too long."""
        if (waited_s := self._gates[url].rejects_for_s) > self._recovery_timeout_s:
            reason = f"it has none of our requests and has accepted none for {waited_s:.0f} s"
            raise EngineError(f"{what}: {error}; {reason} (client.recovery_timeout_s)") from error
        logger.debug("%s: %s; waiting", what, error)

    async def _wait_after(self, error: http.Transient, url: str, what: str, attempt: int) -> None:
        """Wait before another attempt. Raises: EngineError after the last one."""
        if attempt >= self._max_retries:
            raise EngineError(f"{what}: {error} (after {attempt + 1} attempts)") from error
        logger.warning("%s: %s; trying again", what, error)
        if isinstance(error, http.Lost):
            self._fleet.suspect(url)
        await asyncio.sleep(http.backoff_s(attempt))
        await self._fleet.wait_for_any()

    async def _attempt(
        self, url: str, body: bytes, headers: dict[str, str], what: str, limit: Limit, *, is_again: bool
    ) -> bytes:
        """One attempt as soon as the engine has room; until then the limit's time does not run.

        is_again: an engine has rejected it.
        """
        gate = self._gates[url]
        self.num_running[url] += 1
        was_full = was_served = False
        try:
            if not gate.enter_now():
                await self._without_limit(limit, gate.enter(what, is_again=is_again))
            try:
                if url in self._fleet.drained:
                    raise http.Unavailable(f"{url} gets no more requests")
                data = await self._fleet.while_up(url, self._http.request("POST", url + api.GENERATE, body, headers))
                was_served = True
                return data
            except http.Full:
                was_full = True
                raise
            finally:
                gate.leave(was_full=was_full, was_served=was_served)
        except http.Full:
            await self._without_limit(limit, asyncio.sleep(FULL_S))
            raise
        finally:
            self.num_running[url] -= 1

    async def _without_limit(self, limit: Limit, wait: Awaitable[None]) -> None:
        """Wait; the limit's deadline moves by the time of that."""
        assert limit.when is not None
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit.move_to(None)
        await wait
        # From the moment that was meant: from shared deadlines, which are later, each wait would add to its time.
        limit.when += loop.time() - began
        limit.move_to(self._deadlines.at(limit.when))

    def choose(self, session_id: str | None, attempt: int) -> str:
        """The router, or an engine that is up: the session's, or the one with the fewest requests."""
        if len(self._urls) == 1:
            return self._urls[0]
        ready = self._urls if self._is_routed else (self._fleet.ready() or self._urls)
        if session_id is None:
            return min(ready, key=self.num_running.__getitem__)
        return ready[(zlib.crc32(session_id.encode()) + attempt) % len(ready)]
