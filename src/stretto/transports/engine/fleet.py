"""The states of a run's engines: those that answer and have the current weights get requests.

States of an engine: READY <-> DOWN, and DRAINED. It goes DOWN if it does not load a version, or does not answer
/liveness in time; its running requests are then cancelled, so that they are retried on other engines. It comes back
when it answers again (the launcher has restarted it) and has loaded the newest version. If none is READY, loading a
version waits for one to come back, and logs that. An engine may join while the run goes on: it is DOWN until it has
loaded the newest version and computes what others do. One that is DRAINED gets neither requests nor weights, until it
joins again.

The fleet only keeps the states; client.py updates the engines, dispatch.py sends them requests, handover.py lets
them leave, routed.py has them on the lists of routers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stretto.base.aio import Call, task_group
from stretto.base.errors import EngineError
from stretto.transports.engine import http

logger = logging.getLogger(__name__)

JOIN_S = 0.5
"""Interval at which an engine that joins, or went down lately, is asked whether it is there."""
LATELY_S = 60.0
"""An engine that is down for longer is asked as seldom as the others."""


class EngineState(StrEnum):
    READY = "ready"
    DOWN = "down"
    DRAINED = "drained"


@dataclass(eq=False)
class EngineNode:
    """One address of an engine: a whole engine, or one node of an engine that spans several."""

    url: str
    state: EngineState = EngineState.READY
    reason: str = ""
    since: float = field(default_factory=time.monotonic)
    """Start of its state, monotonic seconds."""
    requests: set[Call] = field(default_factory=set)
    """Running requests on it, which are ended when it goes down, or is drained and does not answer."""
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last of them has ended; cleared by who waits for that."""
    other_nodes: frozenset[str] = frozenset()
    """Addresses of the other nodes of its engine: they go down and come back together."""
    is_new: bool = False
    """Whether it has joined and was not READY yet: it is proved first."""
    is_suspected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection to it broke, and when it goes down: whoever watches it does not sleep on."""
    note: str = ""
    """Its reason while it is READY."""

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until no request runs on it, at most so long."""
        self.is_idle.clear()
        if self.requests:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.is_idle.wait()


class Fleet:
    """All engines of a run, by address."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        check: Callable[[str], Awaitable[None]],
        restore: Callable[..., Awaitable[None]],
        prove: Callable[[str], Awaitable[None]],
        interval_s: float,
        recovery_timeout_s: float,
        on_down: Callable[[str, str], None] = lambda url, reason: None,
    ) -> None:
        """Make a fleet with all engines READY.

        check: raises EngineError if the engine is not alive. restore: loads the newest weights on one engine, given
        the addresses of all its nodes. prove: raises EngineError if a new engine computes otherwise than others.
        on_down: called with address and reason.
        """
        self.nodes = {url: EngineNode(url) for url in urls}
        self._check, self._restore, self._prove, self._on_down = check, restore, prove, on_down
        self._watching: asyncio.TaskGroup | None = None
        self._interval_s, self._recovery_timeout_s = interval_s, recovery_timeout_s
        self._changed = asyncio.Condition()
        self.drained: set[str] = set()
        """Addresses that get no more requests, also of engines that were removed."""
        self.generation = 0
        """Grows whenever an engine goes down or comes back."""
        self.updating = asyncio.Lock()
        """Held while a version is loaded, so that an engine comes back between two versions."""

    def ready(self) -> list[str]:
        return [node.url for node in self.nodes.values() if node.state is EngineState.READY]

    def is_ready(self, url: str) -> bool:
        """Whether this engine is there and READY."""
        return (node := self.nodes.get(url)) is not None and node.state is EngineState.READY

    def group_nodes(self, urls: Iterable[str]) -> None:
        """Record that these addresses are the nodes of one engine."""
        for url in (together := frozenset(urls)):
            self.nodes[url].other_nodes = together - {url}

    def whole_engines(self, urls: Iterable[str]) -> list[str]:
        """These addresses and the other nodes of their engines, without those that are DOWN."""
        nodes = {each for url in urls for each in (url, *self.nodes[url].other_nodes)}
        return [url for url in self.ready() if url in nodes]

    def add(self, url: str, note: str = "") -> None:
        """Let an engine join, or one that is DRAINED join again: it is READY once it has the newest version.

        note: what is to be said of it even then.
        """
        if (known := self.nodes.get(url)) is not None and known.state is not EngineState.DRAINED:
            return
        self.drained.discard(url)
        node = self.nodes[url] = EngineNode(url, EngineState.DOWN, "it joins", is_new=True, note=note)
        if self._watching is not None:
            self._watching.create_task(self._watch(node), name=f"watch {url}")

    async def drain(self, url: str) -> tuple[str, ...]:
        """Send neither requests nor weights to this engine any more; what runs on it goes on. Returns all its nodes.

        Raises: EngineError if no other engine is up.
        """
        async with self.updating:  # between two versions
            together = (url, *sorted(self.nodes[url].other_nodes))
            if not set(self.ready()) - {*together}:
                raise EngineError(f"{url} is the only engine that is up")
            for each in together:
                node = self.nodes[each]
                node.state, node.reason, node.since = EngineState.DRAINED, "", time.monotonic()
                self.drained.add(each)
                self.generation += 1
        async with self._changed:
            self._changed.notify_all()
        return together

    def forget(self, url: str) -> None:
        """Remove a DRAINED engine."""
        assert self.nodes[url].state is EngineState.DRAINED
        del self.nodes[url]

    def suspect(self, url: str) -> None:
        """A connection to this address broke: check at once whether its engine is alive."""
        if (node := self.nodes.get(url)) is not None and node.state is EngineState.READY:
            node.is_suspected.set()

    async def mark_down(self, url: str, reason: str) -> None:
        """Send no more requests to this engine, and cancel those that run on it; nothing if it was forgotten."""
        if (node := self.nodes.get(url)) is None or node.state is not EngineState.READY:
            return
        await self._mark_down(url, reason)
        for other in sorted(self.nodes[url].other_nodes):
            if self.nodes[other].state is EngineState.READY:
                await self._mark_down(other, f"another node of its engine, {url}, is down")

    async def _mark_down(self, url: str, reason: str) -> None:
        node = self.nodes[url]
        node.state, node.reason, node.since = EngineState.DOWN, reason, time.monotonic()
        node.is_suspected.set()
        self.generation += 1
        logger.warning("engine %s is down: %s; %d of %d are up", url, reason, len(self.ready()), len(self.nodes))
        for call in tuple(node.requests) if len(self.nodes) > 1 else ():
            call.cancel()
        self._on_down(url, reason)
        async with self._changed:
            self._changed.notify_all()

    async def watch(self) -> None:
        """Check every engine at intervals, mark dead ones down, and readmit those that answer again."""
        async with task_group() as self._watching:
            for node in list(self.nodes.values()):
                self._watching.create_task(self._watch(node), name=f"watch {node.url}")
            await asyncio.Event().wait()

    async def _watch(self, node: EngineNode) -> None:
        """Watch an engine until it is drained; one that joins again is watched anew."""
        while True:
            node.is_suspected.clear()
            before = node.state
            is_awaited = node.is_new or (node.state is EngineState.DOWN and time.monotonic() < node.since + LATELY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(JOIN_S, self._interval_s) if is_awaited else self._interval_s):
                    await node.is_suspected.wait()
            if node.state is EngineState.DRAINED:
                return
            if node.state is EngineState.DOWN and before is EngineState.READY:
                continue  # it is given a moment
            try:
                await self._check(node.url)
            except EngineError as error:
                if node.is_new:
                    node.reason = str(error)
                if node.state is EngineState.READY:  # neither drained nor forgotten meanwhile
                    await self.mark_down(node.url, str(error))
                continue
            if node.state is EngineState.DOWN:
                await self._readmit(node)

    async def _readmit(self, node: EngineNode) -> None:
        """Load the newest weights on an engine that answers again, and mark all its nodes READY."""
        together = [node, *(self.nodes[url] for url in sorted(node.other_nodes))]
        for other in together[1:]:
            try:
                await self._check(other.url)
            except EngineError:
                node.reason = f"another node of its engine, {other.url}, is down"
                return
        async with self.updating:
            if node.state is not EngineState.DOWN:
                return  # drained meanwhile, or readmitted by another node of its engine
            self.generation += 1
            try:
                await self._restore(*(each.url for each in together))
                if node.is_new:
                    await self._prove(node.url)
            except EngineError as error:
                if str(error) != node.reason:
                    logger.warning("engine %s answers, but is not let in: %s", node.url, error)
                node.reason = str(error)
                return
            self.generation += 1  # calls made meanwhile to the engines that were up did not reach this one
            for each in together:
                what, down_s = "has joined" if each.is_new else "is back", time.monotonic() - each.since
                each.state, each.reason, each.since = EngineState.READY, each.note, time.monotonic()
                each.is_new = False
                logger.info("engine %s %s after %.1f s", each.url, what, down_s)
        async with self._changed:
            self._changed.notify_all()

    async def wait_for_any(self) -> list[str]:
        """The READY engines; waits until there is one.

        Raises: EngineError if none comes back in recovery_timeout_s.
        """
        if ready := self.ready():
            return ready
        why = "; ".join(f"{node.url}: {node.reason}" for node in self.nodes.values())
        logger.warning("no engine is up (%s); waiting up to %g s for one", why, self._recovery_timeout_s)
        try:
            async with asyncio.timeout(self._recovery_timeout_s), self._changed:
                await self._changed.wait_for(self.ready)
        except TimeoutError:
            raise EngineError(
                f"no engine came back in {self._recovery_timeout_s:g} s (client.recovery_timeout_s): {why}"
            ) from None
        return self.ready()

    async def while_up(self, url: str, call: Coroutine[Any, Any, bytes]) -> bytes:
        """Make a call to one engine, which ends when the engine goes down: an unreachable host never answers.

        Raises: http.Transient then, and the errors of the call.
        """
        node = self.nodes.get(url)
        if node is None:
            return await call
        request = Call()
        node.requests.add(request)
        try:
            return await call
        except asyncio.CancelledError:
            if not request.absorb():
                raise
            what = "was drained and does not answer" if node.state is EngineState.DRAINED else "went down"
            raise http.Transient(f"{url} {what}: {node.reason}".removesuffix(": ")) from None
        finally:
            request.absorb()
            node.requests.discard(request)
            if not node.requests:
                node.is_idle.set()
