"""Whose turn it is on devices that trainer and engines share ([colocate]).

    turn        the trainer's memory                        the engines' memory
    starting    nothing: it is not started yet              weights, cache, as they were started
    trainer     weights, gradients, optimizer state         nothing
    loading     nothing                                     weights
    rollouts    nothing                                     weights, cache

    starting -> trainer     the engines are ready and were put to sleep; the launcher then starts the trainer
    loading  -> rollouts    every engine has loaded the version; then it is checked, evaluated and sampled from
    rollouts -> trainer     a batch is ready, or the run is being stopped: engines sleep before the trainer gets it
    trainer  -> loading     the trainer has published its first or next version and freed its memory

A stop in another turn waits for the turn of rollouts, and until the trainer knows of it: the trainer must not save
while engines take memory for a version that it has announced. An engine that comes back joins the current turn
(transports/engine/client.py).

With offload_train or offload_rollout = false that side keeps its memory; the turns are the same. A published version
is in shared memory, or with `ipc` on the GPU, from its publication until that of the next one.
"""

from __future__ import annotations

import logging
import time
from enum import StrEnum

from stretto.config.sections.run import ColocateSection
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)


class Turn(StrEnum):
    STARTING = "starting"
    TRAINER = "trainer"
    LOADING = "loading"
    ROLLOUTS = "rollouts"


MOVES = {
    (Turn.STARTING, Turn.TRAINER),
    (Turn.LOADING, Turn.ROLLOUTS),
    (Turn.ROLLOUTS, Turn.TRAINER),
    (Turn.TRAINER, Turn.LOADING),
}


class Turns:
    """The turn of a run with [colocate]; without it every call does nothing."""

    def __init__(self, engines: EngineClient, section: ColocateSection | None) -> None:
        self._engines, self._section = engines, section
        self.turn = Turn.STARTING

    @property
    def are_taken(self) -> bool:
        """Whether the run has [colocate]."""
        return self._section is not None

    async def begin(self) -> None:
        """Put the engines, which are ready, to sleep; the trainer may then be started."""
        if self.turn is Turn.STARTING:
            await self.end_rollouts()

    async def begin_loading(self) -> None:
        """Let engines take memory for weights; the trainer has published and freed its memory."""
        if self._section is None:
            return
        self._move(Turn.LOADING)
        if self._section.offload_rollout:
            await self._engines.wake_up("weights")

    async def begin_rollouts(self) -> None:
        """Let engines take memory for the cache: every engine has loaded the version."""
        if self._section is None:
            return
        if self._section.offload_rollout:
            await self._engines.wake_up("kv_cache")
        self._move(Turn.ROLLOUTS)

    async def end_rollouts(self) -> None:
        """Put the engines to sleep; the trainer may then train or save."""
        if self._section is None:
            return
        self._move(Turn.TRAINER)
        if self._section.offload_rollout:
            started = time.perf_counter()
            await self._engines.sleep(self._section.sleep_level)
            logger.debug("engines sleep after %.3f s", time.perf_counter() - started)

    def _move(self, turn: Turn) -> None:
        assert (self.turn, turn) in MOVES, f"the turn cannot go from {self.turn} to {turn}"
        self.turn = turn
        logger.debug("turn: %s", turn)
