"""The list of engines of the routers in front of them, as engines join and leave while a run goes on.

A router knows the engines that it was started with. Those that have joined or left since are *followed*: they are on
its list exactly while they are READY. That is corrected at intervals, so a router that was started anew gets its list
again. How a router is asked is an add-on's knowledge (`list` of the group stretto.routers).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from stretto import addons
from stretto.base.errors import ConfigError, EngineError
from stretto.transports.engine.fleet import Fleet

logger = logging.getLogger(__name__)

CORRECT_S = 1.0
"""Interval at which the lists are corrected."""


class RouterList(Protocol):
    """The list of engines of one router. Both raise OSError if it does not answer now."""

    def engines(self) -> list[str]:
        """Their addresses. Raises: EngineError if the router has no list that engines enter and leave."""
        ...

    def correct(self, wanted: Mapping[str, bool]) -> None:
        """Enter the engines that are wanted and take out the others, where the list differs.

        Raises: EngineError if the router refuses that.
        """
        ...


class RoutedFleet:
    """The engines of a fleet on the lists of all its routers; it has none if there is no router."""

    def __init__(self, routers: Sequence[str], fleet: Fleet, key: str | None) -> None:
        self._routers, self._fleet, self._key = routers, fleet, key
        self._lists: dict[str, RouterList] = {}
        self._followed: set[str] = set()
        self._fault = ""
        self._correcting = asyncio.Lock()

    @property
    def has_router(self) -> bool:
        return bool(self._routers)

    async def fault(self) -> str | None:
        """Why engines cannot enter and leave the list of a router; None if they can.

        Raises: EngineError if a router does not answer.
        """
        for router in self._routers:
            try:
                await asyncio.to_thread(self._list_of(router).engines)
            except (ConfigError, EngineError) as error:
                return str(error)
            except OSError as error:
                raise EngineError(
                    f"the router {router} does not show its list: {error}; try again when it does"
                ) from error
        return None

    def follow(self, urls: Sequence[str]) -> None:
        """Have these engines on the lists exactly while they are READY, from now on."""
        if self._routers:
            self._followed.update(urls)

    async def correct(self) -> bool:
        """Correct all lists now; whether that was possible: what does not answer or refuses is logged, once."""
        fault = ""
        async with self._correcting:
            wanted = {url: self._fleet.is_ready(url) for url in sorted(self._followed)}
            for router in self._routers if wanted else ():
                try:
                    await asyncio.to_thread(self._list_of(router).correct, wanted)
                except (ConfigError, EngineError, OSError) as error:
                    fault = f"the list of engines of the router {router} cannot be corrected: {error}"
        if fault and fault != self._fault:
            logger.warning("%s; trying again", fault)
        self._fault = fault
        return not fault

    async def correct_until_done(self) -> None:
        """Correct all lists, however long the routers do not answer."""
        while not await self.correct():
            await asyncio.sleep(CORRECT_S)

    async def watch(self) -> None:
        """Correct the lists at intervals; runs for ever."""
        while True:
            await asyncio.sleep(CORRECT_S)
            await self.correct()

    def _list_of(self, router: str) -> RouterList:
        if router not in self._lists:
            open_list = addons.load("stretto.routers", "list", f"a router ({router}) whose engines join and leave")
            self._lists[router] = open_list(router, self._key)
        return self._lists[router]
