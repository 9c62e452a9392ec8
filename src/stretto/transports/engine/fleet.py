"""Which engines of a run may be given work: those that answer and hold the current weights.

States of an engine: READY <-> DOWN. It goes DOWN when it does not load a version, or does not answer /liveness in
its deadline; its requests under way are then cut, so that they are tried elsewhere. It comes back when it
answers again (whoever starts processes has started it anew) and has loaded the newest version. With none READY,
loading a version waits for one to come back, and says so.

The fleet only keeps the states; how an engine is asked and updated is the client's (client.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from stretto.base.errors import EngineError

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    READY = "ready"
    DOWN = "down"


@dataclass(eq=False)
class Member:
    """One engine. `since` is when its state began, monotonic seconds."""

    url: str
    state: EngineState = EngineState.READY
    reason: str = ""
    since: float = field(default_factory=time.monotonic)
    requests: set[asyncio.Task] = field(default_factory=set)
    """Attempts under way on it that shall be cut when it goes down."""


class Fleet:
    """All engines of a run, by address."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        check: Callable[[str], Awaitable[None]],
        restore: Callable[[str], Awaitable[None]],
        interval_s: float,
        recovery_timeout_s: float,
        on_down: Callable[[str, str], None] = lambda url, reason: None,
    ) -> None:
        """check raises EngineError when an engine is not alive; restore gives it the newest weights."""
        self.members = {url: Member(url) for url in urls}
        self._check, self._restore, self._on_down = check, restore, on_down
        self._interval_s, self._recovery_timeout_s = interval_s, recovery_timeout_s
        self._changed = asyncio.Condition()
        self.generation = 0
        """Grows whenever an engine goes or comes back."""
        self.updating = asyncio.Lock()
        """Held while versions are loaded: an engine comes back between two of them."""

    def ready(self) -> list[str]:
        return [member.url for member in self.members.values() if member.state is EngineState.READY]

    @property
    def num_down(self) -> int:
        return len(self.members) - len(self.ready())

    async def mark_down(self, url: str, reason: str) -> None:
        """This engine gets no more work, and what it was doing is cut."""
        member = self.members[url]
        if member.state is EngineState.DOWN:
            return
        member.state, member.reason, member.since = EngineState.DOWN, reason, time.monotonic()
        self.generation += 1
        logger.warning(
            "engine %s is down: %s; %d of %d are left", url, reason, len(self.ready()), len(self.members)
        )
        for task in tuple(member.requests):
            task.cancel()
        self._on_down(url, reason)
        async with self._changed:
            self._changed.notify_all()

    async def watch(self) -> None:
        """Ask every engine whether it lives, for ever; let those in again that do."""
        await asyncio.gather(*(self._watch(member) for member in self.members.values()))

    async def _watch(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._check(member.url)
            except EngineError as error:
                await self.mark_down(member.url, str(error))
                continue
            if member.state is EngineState.DOWN:
                await self._let_in(member)

    async def _let_in(self, member: Member) -> None:
        async with self.updating:
            self.generation += 1
            try:
                await self._restore(member.url)
            except EngineError as error:
                member.reason = str(error)
                logger.warning("engine %s answers again, but takes no weights: %s", member.url, error)
                return
            away = time.monotonic() - member.since
            member.state, member.reason, member.since = EngineState.READY, "", time.monotonic()
        logger.info("engine %s is back after %.1f s", member.url, away)
        async with self._changed:
            self._changed.notify_all()

    async def wait_for_one(self) -> list[str]:
        """The engines that are READY, at least one.

        Raises: EngineError when none comes back in recovery_timeout_s.
        """
        if ready := self.ready():
            return ready
        why = "; ".join(f"{member.url}: {member.reason}" for member in self.members.values())
        logger.warning("no engine is left (%s); waiting up to %g s for one", why, self._recovery_timeout_s)
        try:
            async with asyncio.timeout(self._recovery_timeout_s), self._changed:
                await self._changed.wait_for(self.ready)
        except TimeoutError:
            raise EngineError(
                f"no engine came back in {self._recovery_timeout_s:g} s (client.recovery_timeout_s): {why}"
            ) from None
        return self.ready()
