"""Ends requests under way so that nothing they have sampled is lost: partial rollouts.

A stop ends all requests on the engines, which answer with what they have; every turn is written into the ledger
(`Journal`), and the episodes wait to be cancelled. A run that is killed keeps the turns that were done. When the
run is resumed, the episodes are played again and their requests answered from what was kept, for as long as they
are the same token for token; the reply that was interrupted goes on from its last token (recorder.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from stretto.base.errors import EngineError
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.partial import Turn

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long engines have to answer with what they have sampled."""
AGAIN_S = 0.5
"""After which those that have not are asked once more."""


class Journal(Protocol):
    """The part of the ledger that keeps the turns of rollouts that are not done."""

    def turn_played(self, group_id: int, member: int, turn: Turn) -> None: ...


class Engine(Protocol):
    """An engine client, as far as requests can be ended."""

    async def generate(self, request: GenerateRequest) -> list[Completion]: ...


class Interruption:
    """The requests under way of a run's rollouts, and their end."""

    def __init__(self) -> None:
        self.is_on = False
        self._under_way: dict[str, None] = {}
        self._quiet = asyncio.Event()

    async def generate(self, engine: Engine, request: GenerateRequest) -> list[Completion]:
        """engine.generate, unless the rollouts were interrupted: then this never returns."""
        if self.is_on:
            await self.forever()
        self._under_way[request.request_id] = None
        try:
            return await engine.generate(request)
        finally:
            self._under_way.pop(request.request_id, None)
            if not self._under_way:
                self._quiet.set()

    async def begin(self, abort: Callable[[list[str]], Awaitable[Any]]) -> None:
        """Let no request begin any more, and return when those under way were answered, or in ANSWER_S."""
        self.is_on = True
        self._quiet.clear()
        if not self._under_way:
            return
        num_requests = len(self._under_way)
        try:
            async with asyncio.timeout(ANSWER_S):
                while self._under_way:
                    await abort(list(self._under_way))
                    with suppress(TimeoutError):  # a request may have been on its way to the engine
                        async with asyncio.timeout(AGAIN_S):
                            await self._quiet.wait()
        except (EngineError, TimeoutError) as error:
            logger.warning("%d of %d replies are lost: %r", len(self._under_way), num_requests, error)
        await asyncio.sleep(0)  # those that were answered write down what they have

    async def forever(self) -> NoReturn:
        """Wait to be cancelled."""
        while True:
            await asyncio.Event().wait()
