"""Who uses the devices that trainer and engines share ([colocate]).

    use         the trainer's memory                        the engines' memory
    starting    nothing: it is not started yet              weights, cache, as they were started
    training    weights, gradients, optimizer state         nothing
    loading     nothing                                     weights
    rollouts    nothing                                     weights, cache

    starting -> training    the engines are ready and were put to sleep; the launcher then starts the trainer
    loading  -> rollouts    every engine has loaded the version; then it is checked, evaluated and sampled from
    rollouts -> training    a batch is ready, or the run is being stopped: engines sleep before the trainer gets it
    training -> loading     the trainer has published its first or next version and freed its memory

A run that is stopped during another use waits for that of rollouts, and until the trainer knows of it: the trainer must
not save while engines take memory for a version that it has announced. An engine that comes back joins the current use
(transports/engine/client.py).

With offload_train or offload_rollout = false that side keeps its memory; the uses are the same. A published version
is in shared memory, or with `ipc` on the GPU, from its publication until that of the next one.
"""

from __future__ import annotations

import logging
import time
from enum import StrEnum

from stretto.config.sections.run import ColocateSection
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)


class Use(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    LOADING = "loading"
    ROLLOUTS = "rollouts"


MOVES = {
    (Use.STARTING, Use.TRAINING),
    (Use.LOADING, Use.ROLLOUTS),
    (Use.ROLLOUTS, Use.TRAINING),
    (Use.TRAINING, Use.LOADING),
}


class SharedDevices:
    """Lets engines sleep while the trainer trains, and wakes them for its versions, in a run with [colocate]."""

    def __init__(self, engines: EngineClient, section: ColocateSection) -> None:
        self._engines, self._section = engines, section
        self.use = Use.STARTING

    async def begin(self) -> None:
        """Put the engines, which are ready, to sleep; the trainer may then be started."""
        if self.use is Use.STARTING:
            await self.end_rollouts()

    async def begin_loading(self) -> None:
        """Let engines take memory for weights; the trainer has published and freed its memory."""
        self._move(Use.LOADING)
        if self._section.offload_rollout:
            await self._engines.wake_up("weights")

    async def begin_rollouts(self) -> None:
        """Let engines take memory for the cache: every engine has loaded the version."""
        if self._section.offload_rollout:
            await self._engines.wake_up("kv_cache")
        self._move(Use.ROLLOUTS)

    async def end_rollouts(self) -> None:
        """Put the engines to sleep; the trainer may then train or save."""
        self._move(Use.TRAINING)
        if self._section.offload_rollout:
            started = time.perf_counter()
            await self._engines.sleep(self._section.sleep_level)
            logger.debug("engines sleep after %.3f s", time.perf_counter() - started)

    def _move(self, use: Use) -> None:
        assert (self.use, use) in MOVES, f"devices cannot go from {self.use} to {use}"
        self.use = use
        logger.debug("devices: %s", use)
