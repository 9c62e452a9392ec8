"""Which weights the engines sample from: follows the versions the trainer publishes, one by one.

States of a version: published (the trainer said so, the ledger has it) -> loaded (every engine answered).
Only then does anything count on it: a completion stamped v must have been sampled from weights v. Running
requests go on through an update; the engines see to that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from stretto.base.aio import wait_for
from stretto.base.errors import WireError
from stretto.records.weights import WeightManifest

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """The part of an engine client that a policy needs."""

    async def update_weights(self, manifest: WeightManifest) -> None: ...


class VersionLog(Protocol):
    """The part of the ledger that hears of versions before they take effect."""

    def version_published(self, version: int) -> None: ...

    def version_loaded(self, version: int) -> None: ...


class Policy:
    """The published versions in order, and how they get into the engines."""

    def __init__(self, engines: Engines, versions: VersionLog, *, start: int, timeout_s: float) -> None:
        self.next_version = start
        self.load_s = 0.0  # of the latest load
        self._engines, self._versions, self._timeout_s = engines, versions, timeout_s
        self._published: asyncio.Queue[WeightManifest] = asyncio.Queue()
        self._newest = start - 1

    def publish(self, manifest: WeightManifest) -> None:
        """The trainer has published this version."""
        if manifest.version != self._newest + 1:
            raise WireError(
                f"the trainer published version {manifest.version} after {self._newest}; they come one by one"
            )
        self._newest = manifest.version
        self._published.put_nowait(manifest)

    async def load_next(self) -> int:
        """Wait for the next version and load it into every engine; its number.

        Raises: EngineError when an engine does not load it in time.
        """
        manifest = await self._published.get()
        version = manifest.version
        self._versions.version_published(version)
        started = time.perf_counter()
        what = f"all engines to load version {version}"
        await wait_for(self._engines.update_weights(manifest), self._timeout_s, what)
        self._versions.version_loaded(version)
        self.load_s = time.perf_counter() - started
        self.next_version = version + 1
        logger.debug("loaded version=%d in %.3fs", version, self.load_s)
        return version

    @property
    def num_waiting(self) -> int:
        """Versions that are published and not yet being loaded."""
        return self._published.qsize()
