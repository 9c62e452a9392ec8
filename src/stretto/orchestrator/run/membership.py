"""Engines that join and leave while a run goes on, as `stretto engines` asks for in RUN/engines.

There is a file per address: {"url": "http://host:8000", "state": "on" | "drained" | "removed", "wait_s": 30.0,
"asked_at": unix time}.
What came of it, and every other change of an engine's state, is an event `fleet` of the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from stretto.base.errors import EngineError
from stretto.base.files import read_json
from stretto.base.ports import is_same_server
from stretto.orchestrator.run.parts import RunParts
from stretto.transports.engine.fleet import EngineNode, EngineState

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval at which wishes are read."""


class Membership:
    """Follows the wishes in a run's directory."""

    def __init__(self, run: RunParts) -> None:
        self._run, self._engines = run, run.engines
        old = [wish for wish in _wishes(run.run_dir.engines) if wish["state"] != "on"]
        self._applied: dict[str, Any] = {wish["url"]: wish for wish in old}  # those engines are there again
        self._returning = [wish["url"] for wish in old]
        self._refused: dict[str, str] = {}
        self._recorded: dict[str, Any] = {}
        self._applying: dict[str, asyncio.Task[None]] = {}

    def update(self, tasks: asyncio.TaskGroup) -> None:
        """Apply each new wish, in a task of the group, and record how the fleet has changed.

        A wish replaces an older one for its address, also one that is being applied. Engines that had joined join
        again after a resume, and routers get those of the config that had left.
        """
        nodes = self._engines.fleet.nodes
        for url in {self._name_of(url) for url in self._returning} & nodes.keys():
            tasks.create_task(self._take_back(url), name=f"engine {url}")
        self._returning = []
        for wish in _wishes(self._run.run_dir.engines):
            if self._applied.get(wish["url"]) != wish:
                self._applied[wish["url"]] = wish
                url = self._name_of(wish["url"])
                self._refused.pop(url, None)
                if (older := self._applying.get(url)) is not None:
                    older.cancel()
                self._applying[url] = tasks.create_task(self._apply(url, wish), name=f"engine {url}")
        self._record()

    def _name_of(self, url: str) -> str:
        """The address under which the fleet has this engine, or will have it: it may have another name here."""
        names = [*self._engines.fleet.nodes, *filter(self._is_applying, self._applying)]
        return url if url in names else next((known for known in names if is_same_server(known, url)), url)

    def _is_applying(self, url: str) -> bool:
        return (task := self._applying.get(url)) is not None and not task.done()

    async def _take_back(self, url: str) -> None:
        try:
            await self._engines.take_back_engine(url)
        except EngineError as error:
            logger.warning("engine %s, which had left, may get no requests: %s", url, error)

    async def _apply(self, url: str, wish: dict[str, Any]) -> None:
        nodes = self._engines.fleet.nodes
        try:
            if wish["state"] == "on":
                await self._engines.add_engine(url)
                return
            if url in nodes:
                await self._engines.drain_engine(url, wish["wait_s"])
                if wish["state"] == "removed":
                    self._engines.forget_engine(url)
        except EngineError as error:
            what = "does not join" if wish["state"] == "on" else "stays"
            logger.warning("engine %s %s: %s", url, what, error)
            self._refused[url] = str(error)

    def _record(self) -> None:
        def shown(node: EngineNode) -> dict[str, Any]:
            # Behind a router the fleet does not know what the engine plays: it leaves until its wish is applied.
            is_busy = bool(node.requests) or self._is_applying(node.url)
            is_leaving = node.state is EngineState.DRAINED and is_busy
            return {"state": "leaving" if is_leaving else node.state.value, "reason": node.reason}

        engines = {url: shown(node) for url, node in self._engines.fleet.nodes.items()}
        if (now := {"engines": engines, "refused": dict(self._refused)}) != self._recorded:
            self._recorded = now
            self._run.ledger.event("fleet", now)


def _wishes(directory: Path) -> list[dict[str, Any]]:
    """Those of all files that are whole."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    found = [read_json(directory / name) for name in names if name.endswith(".json")]
    return [wish for wish in found if {"url", "state", "wait_s"} <= wish.keys()]
