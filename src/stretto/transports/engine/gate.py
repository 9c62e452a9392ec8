"""Limits concurrent requests to one engine; the limit is learnt from requests that it rejects (HTTP 429)."""

from __future__ import annotations

import asyncio
import time
from collections import deque


class RequestGate:
    """Admits requests to one engine: all of them, until the engine is full for the first time.

    From then on it admits as many at once as the engine accepted, and one more after each round of that many answers.
    The others wait here, first come, first served.
    """

    def __init__(self) -> None:
        self.limit = float("inf")
        self.num_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._rejects_since: float | None = None  # while none of our requests runs and the engine rejects all

    @property
    def rejects_for_s(self) -> float:
        """How long the engine has rejected all our requests while none of them was running."""
        return 0.0 if self._rejects_since is None else time.monotonic() - self._rejects_since

    @property
    def is_open(self) -> bool:
        """Would `enter` return at once?"""
        return self.num_running + 1 <= self.limit and not self._waiting

    async def enter(self) -> None:
        """Wait until one more request may be sent; call `leave` after each."""
        if self.is_open:
            self.num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

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
        return sum(not turn.done() for turn in self._waiting)

    def _admit(self) -> None:
        while self._waiting and self.num_running + 1 <= self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)
