"""Whose turn it is on devices that trainer and engines share ([colocate]), and who may hold what.

    turn        the trainer holds                           the engines hold
    starting    weights, optimizer state                    weights, cache, as they were started
    trainer     weights, gradients, optimizer state         nothing
    loading     nothing                                     weights
    rollouts    nothing                                     weights, cache

    starting -> loading     the trainer has published its first version and put its memory away
    loading  -> rollouts    every engine has loaded the version; then it is checked, evaluated and sampled from
    rollouts -> trainer     a batch is ready, or the run is being stopped: engines sleep before the trainer is told
    trainer  -> loading     the trainer has published the next version and put its memory away

Who keeps its memory all the same (offload_train, offload_rollout = false) is not told to put it away; the turns are the
same. A published version lies in shared memory, or with `ipc` on the GPU, from its publication to the next one's.
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
    (Turn.STARTING, Turn.LOADING),
    (Turn.LOADING, Turn.ROLLOUTS),
    (Turn.ROLLOUTS, Turn.TRAINER),
    (Turn.TRAINER, Turn.LOADING),
}


class Turns:
    """The turn of a run with [colocate]; without it every call does nothing."""

    def __init__(self, engines: EngineClient, section: ColocateSection | None) -> None:
        self._engines, self._section = engines, section
        self.turn = Turn.STARTING
        self._has_slept = False

    async def begin_loading(self) -> None:
        """A version was published, and the trainer's memory is away: engines take memory for weights."""
        if self._section is None:
            return
        is_first = self.turn is Turn.STARTING
        self._move(Turn.LOADING)
        if self._section.offload_rollout and not is_first:
            await self._engines.wake_up("weights")

    async def begin_rollouts(self) -> None:
        """Every engine has the version: they take memory for the cache."""
        if self._section is None:
            return
        self._move(Turn.ROLLOUTS)
        if self._section.offload_rollout and self._has_slept:
            await self._engines.wake_up("kv_cache")

    async def end_rollouts(self) -> None:
        """Put the engines to sleep; the trainer may be told to train or to save."""
        if self._section is None or self.turn is Turn.TRAINER:
            return
        self._move(Turn.TRAINER)
        if self._section.offload_rollout:
            started = time.perf_counter()
            await self._engines.sleep(self._section.sleep_level)
            self._has_slept = True
            logger.debug("engines sleep after %.3f s", time.perf_counter() - started)

    def _move(self, turn: Turn) -> None:
        assert (self.turn, turn) in MOVES, f"the turn of {self.turn} was to become that of {turn}"
        self.turn = turn
