"""Limits on requests: to one engine, learnt from those that it rejects (HTTP 429), and to the engines behind a router.

A router passes on whatever it gets, and most of its policies look at no queues (consistent_hash, round_robin,
random). A request that waits at an engine stays there, whoever joins: the new engine gets its share of new requests
alone, which is what it samples, so that its own queue never fills, while those of the others stay as long as they were.
A request that waits here goes to whatever engine has room.

So every second the engines are asked how many requests they run and have waiting. If requests wait at all of them,
fewer are sent; if none waits at one, more. A limit that a full engine has set is corrected likewise: what one
engine rejects, others may have room for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import NamedTuple

from stretto.base.errors import EngineError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two readings, of ten engines at most; longer for more."""
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
MARGIN = 4
"""An engine may have this part of what it runs waiting, so that it is busy until the next reading."""
LEAST_MARGIN = 2.0
FIRST = 32
"""Requests per engine before the first reading."""
MAX_SILENT = 10
"""Readings in a row without the queues of an engine until all requests are sent."""


class Ended(Exception):
    """The request has been ended on purpose while it waited."""


class RequestGate:
    """Admits requests to one engine: all of them, until the engine is full for the first time.

    From then on it admits as many at once as the engine accepted, and one more after each round of that many answers.
    The others wait here, first come, first served; those that an engine has rejected have come before all others.
    """

    def __init__(self) -> None:
        self.limit = float("inf")
        self.num_running = 0
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._rejects_since: float | None = None  # while none of our requests runs and the engine rejects all

    @property
    def rejects_for_s(self) -> float:
        """How long the engine has rejected all our requests while none of them was running."""
        return 0.0 if self._rejects_since is None else time.monotonic() - self._rejects_since

    @property
    def is_open(self) -> bool:
        """Would `enter` return at once?"""
        return self.num_running + 1 <= self.limit and not self._waiting

    def enter_now(self) -> bool:
        """Send one more request if it need not wait; call `leave` after it."""
        if not self.is_open:
            return False
        self.num_running += 1
        return True

    async def enter(self, name: str = "", *, is_again: bool = False) -> None:
        """Wait until one more request may be sent; call `leave` after each.

        is_again: an engine has rejected it. Raises: Ended.
        """
        if self.enter_now():
            return
        turn = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_again else self._waiting.append)((name, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()
            raise

    def end(self, names: Container[str] | None) -> None:
        """End requests that wait here, by their names; None: all. Their `enter` raises Ended."""
        for name, turn in self._waiting:
            if not turn.done() and (names is None or name in names):
                turn.set_exception(Ended(name))

    def leave(self, *, was_full: bool = False, was_served: bool = False) -> None:
        """A request has ended; was_full: the engine rejected it; was_served: it was answered."""
        if was_full:
            self.limit = max(1.0, min(self.limit, self.num_running - 1))
        elif was_served:
            self.limit += 1 / self.limit
        self.num_running -= 1
        if not was_full or self.num_running:
            self._rejects_since = None
        elif self._rejects_since is None:
            self._rejects_since = time.monotonic()
        self._admit()

    def set_limit(self, limit: float) -> None:
        """Admit this many from now on, at least one."""
        self.limit = max(1.0, limit)
        self._admit()

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return sum(not turn.done() for _, turn in self._waiting)

    def _admit(self) -> None:
        while self._waiting and self.num_running + 1 <= self.limit:
            _, turn = self._waiting.popleft()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)


class Queue(NamedTuple):
    """The requests of one engine."""

    running: float
    waiting: float

    @property
    def margin(self) -> float:
        return max(LEAST_MARGIN, self.running / MARGIN)


def limit_of(limit: float, num_sent: int, queues: Sequence[Queue]) -> float:
    """The requests that may be at the router, after a reading of all its engines.

    limit: until now. num_sent: that are there now. Routers divide requests about evenly, so what the least busy engine
    lacks or has too much counts for each.
    """
    if not queues:
        return limit
    num, most = len(queues), max(queue.running for queue in queues)
    surplus = min(queue.waiting - queue.margin for queue in queues)
    if surplus > 0:  # half of it: replies that end meanwhile take the rest
        return max(min(limit, num_sent - num * surplus / 2), num * most)
    idle = [queue for queue in queues if not queue.waiting]
    if not idle:
        return limit
    # Without a queue nobody knows how many it could run: as many as others do, or twice as many as now.
    lack = max(max(most - queue.running, queue.running) + queue.margin for queue in idle)
    return max(limit, min(limit, num_sent) + num * lack)


async def keep_busy(
    readings: Callable[[], Awaitable[Mapping[str, Mapping[str, float]]]],
    apply: Callable[[Sequence[Queue] | None], None],
    num_engines: int,
) -> None:
    """Read the engines' queues and pass them on at intervals; runs for ever.

    readings: metrics of every engine that is up, by its address; raises EngineError if one does not answer. apply: gets
    None once the first reading, or MAX_SILENT later ones in a row, lack an engine's queue; one that has just started
    may not tell it yet.
    """
    num_silent = MAX_SILENT - 1  # until they have told it once, a single reading without it is enough
    while True:
        await asyncio.sleep(INTERVAL_S * max(1.0, num_engines / 10))
        try:
            found = await readings()
        except EngineError as error:  # the fleet finds out whether it is down
            logger.debug("no queues of engines: %s", error)
            continue
        num_engines = len(found)
        silent = [url for url, own in found.items() if RUNNING not in own or WAITING not in own]
        num_silent = num_silent + 1 if silent else 0
        if num_silent == MAX_SILENT:
            text = "engines do not tell their queues (%s): until they do, requests go to the router as they come"
            logger.warning(text, ", ".join(silent))
            apply(None)
        if not silent:
            apply([Queue(own[RUNNING], own[WAITING]) for own in found.values()])
