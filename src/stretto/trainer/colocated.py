"""The trainer's memory in a run with [colocate]: here while it trains and saves, away while engines sample.

States: HERE <-> AWAY. AWAY before a published version is announced, HERE when a batch or a Stop has come; the
orchestrator (versions/shared_devices.py there) has put the engines to sleep by then. Put away are weights, optimizer
state, the frozen reference and a valuer's network on the same ranks; gradients are freed. Communicators of NCCL stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from torch import Tensor

from stretto.models.device.memory_offload import MemoryOffload
from stretto.trainer.learner import Learner

logger = logging.getLogger(__name__)


class TrainerMemory:
    """A learner's memory on its device; is_moved: whether it is put away at all."""

    def __init__(self, learner: Learner, *, is_moved: bool) -> None:
        self._learner, self._is_moved = learner, is_moved
        self._away = MemoryOffload()

    def put_away(self) -> None:
        """Free the device for the engines."""
        if not self._is_moved or self._away.is_offloaded:
            return
        started = time.perf_counter()
        for network in self._learner.networks:
            network.weights.zero_grad()
        freed = self._away.offload(self._tensors(), keeps=True)
        logger.debug("put %d bytes away in %.3f s", freed, time.perf_counter() - started)

    def bring_back(self) -> None:
        """Bring everything back to the device."""
        if self._away.is_offloaded:
            started = time.perf_counter()
            self._away.restore()
            logger.debug("memory is back after %.3f s", time.perf_counter() - started)

    def _tensors(self) -> Iterator[Tensor]:
        for network in self._learner.networks:
            yield from network.tensors()
