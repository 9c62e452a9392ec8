"""Loads the versions that the trainer publishes into all engines, one by one.

The trainer publishes what a start begins with, the versions whose batches say so (`decide`), and the last one. States
of a version: due (its batch is shipped) -> published (announced by the trainer) -> loaded (acknowledged by every
engine). A version is used only after it is loaded: a completion stamped v must have been sampled from weights v.
Running requests continue through an update; the engines take care of that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from stretto.base.aio import wait_for
from stretto.base.errors import WireError
from stretto.ledger.writer import Ledger
from stretto.orchestrator.versions.canary_check import CanaryCheck
from stretto.orchestrator.versions.shared_devices import SharedDevices
from stretto.records.weight_manifest import Canary, WeightManifest
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)


class VersionLoader:
    """Loads published versions into the engines in order, and checks what they compute."""

    def __init__(
        self,
        engines: EngineClient,
        ledger: Ledger,
        *,
        start: int,
        timeout_s: float,
        interval: int = 1,
        end: int | None = None,
        is_evaluated: Callable[[int], bool] = lambda version: False,
        tolerance: float | None = None,
        generation: Callable[[], int] = lambda: 0,
        devices: SharedDevices | None = None,
    ) -> None:
        """interval: steps between two versions, which steering may change. end: the last one, which comes in any case,
        as those that `is_evaluated`, and the last of a stopped run.

        tolerance: of the canary check, in nats; None: `canary.tolerance_of` it. devices: of a run with [colocate].
        generation: returns a number that grows whenever an engine goes down or comes back.
        """
        self._start, self.loaded = start, -1
        self.interval, self._end, self._is_evaluated = interval, end, is_evaluated
        self._due = deque([start])  # versions that the trainer has to publish
        self._decided = start  # the newest version of which is known whether engines get it
        self._sent = start  # the newest of those that they get
        self._is_stopped = False  # a version came that was not due: the last one of a stopped run
        self.load_s = 0.0  # of the latest load
        self._engines, self._ledger, self._timeout_s = engines, ledger, timeout_s
        self._check_canary, self._generation = CanaryCheck(tolerance), generation
        self.devices = devices
        self._checked_generation: int | None = None  # its engines passed the latest check
        self.canary_tolerance = 0.0  # that of the latest check; 0 before there is one
        self.canary_error = 0.0  # mean difference to the trainer's logprobs at the latest check, nats
        self.num_checked = 0  # versions that passed a check
        self.wants_reading = False  # is a finished rollout to be read again (read_check.py)?
        self.rollout_error: float | None = None  # mean difference of the one that was read last, nats
        self.num_compared = 0  # groups of tensors whose bits all engines have compared at the latest check
        self._published: asyncio.Queue[WeightManifest] = asyncio.Queue()
        self._newest = start - 1

    def decide(self, step: int) -> bool:
        """Whether engines get the version that `step` makes: each of the interval, evaluated ones, and the last.

        Between the multiples of two intervals there may be more steps than both have, so that batches would wait for
        a version that nobody sends: where the interval changes it comes after so many steps too.
        """
        assert step == self._decided + 1, f"step {step} is decided after {self._decided}"
        self._decided = step
        is_late = step - self._sent >= self.interval
        if is_sent := is_late or step == self._after(step - 1) or self._is_evaluated(step):
            self._sent = step
            self._due.append(step)
        return is_sent

    def on_published(self, manifest: WeightManifest) -> None:
        """Queue a version that the trainer has published."""
        version = manifest.version
        next_due = self._due[0] if self._due else self._decided
        if self._is_stopped or not self._newest < version <= next_due:
            due = "none" if self._is_stopped or not self._due else f"version {next_due}"
            raise WireError(
                f"the trainer published version {version} after {self._newest}, and {due} is due; batches say which "
                "versions are"
            )
        if self._due and version == next_due:
            self._due.popleft()
        else:
            self._is_stopped = True
        self._newest = version
        self._published.put_nowait(manifest)

    async def load_next(self) -> int:
        """Wait for the next version, load it and return its number.

        Raises: EngineError as `load` does.
        """
        manifest = await self._published.get()
        await self.load(manifest)
        return manifest.version

    async def load(self, manifest: WeightManifest) -> None:
        """Load a version into every engine.

        Raises: EngineError if an engine does not load it in time, or computes with other weights than the
        trainer.
        """
        version = manifest.version
        self._ledger.version_published(version, _fingerprint(manifest))
        started, generation = time.perf_counter(), self._generation()
        what = f"all engines to load version {version}"
        if self.devices is not None:
            await self.devices.begin_loading()
        is_probed = manifest.canary is not None and manifest.canary.probe is not None
        first = msgspec.structs.replace(manifest, is_probe=is_probed)
        await wait_for(self._engines.update_weights(first), self._timeout_s, what)
        if self.devices is not None:
            await self.devices.begin_rollouts()
        if manifest.canary is not None and is_probed:
            await self._check_probe(manifest, manifest.canary)
            await wait_for(self._engines.update_weights(manifest), self._timeout_s, what)
        if manifest.canary is not None:
            what = f"the engines to score the canary of version {version}"
            await wait_for(self._check(manifest, manifest.canary), self._timeout_s, what)
            self._checked_generation = generation
            self.num_checked, self.wants_reading = self.num_checked + 1, True
        self._ledger.version_loaded(version)
        self.load_s = time.perf_counter() - started
        self.loaded = version
        logger.debug("loaded version=%d in %.3fs", version, self.load_s)

    async def _check(self, manifest: WeightManifest, canary: Canary) -> None:
        """Compare what every engine holds, and what it computes for the canary, with the trainer.

        Raises: EngineError if bits differ, or numbers by more than rounding explains.
        """
        updated = self._engines.updated
        for url, each in updated.items():
            each.check(url, manifest.version)
        self.num_compared = min((each.num_compared for each in updated.values()), default=0)
        name = f"canary-{manifest.version}"
        answers = await self._engines.score_canary(np.array(canary.token_ids, np.int32), name, canary.image)
        self.canary_error = self._check_canary(manifest, canary, answers)
        self.canary_tolerance = self._check_canary.tolerance_of(manifest)

    async def _check_probe(self, manifest: WeightManifest, canary: Canary) -> None:
        """Check that the engines compute with all of the version as they have loaded it: scaled by `probe_scale`.

        They have no requests yet, and load the version itself afterwards.

        Raises: EngineError if an engine computes with another one.
        """
        tokens, name = np.array(canary.token_ids, np.int32), f"probe-{manifest.version}"
        what = f"the engines to score a probe of version {manifest.version}"
        scoring = self._engines.score_canary(tokens, name, canary.image)
        answers = await wait_for(scoring, self._timeout_s, what)
        self._check_canary.probe(manifest, canary, answers)

    @property
    def next_version(self) -> int:
        """The version that is due to be loaded, if the interval stays as it is."""
        return self._start if self.loaded < 0 else self._after(self.loaded)

    def _after(self, version: int) -> int:
        """The version that is due after `version`."""
        following = (version // self.interval + 1) * self.interval
        return following if self._end is None or version >= self._end else min(following, self._end)

    @property
    def wants_canary(self) -> bool:
        """Has an engine gone down or come back since the latest check, or was there no check yet?"""
        return self._checked_generation != self._generation()

    @property
    def num_waiting(self) -> int:
        """Number of versions that are published and not yet being loaded."""
        return self._published.qsize()


def _fingerprint(manifest: WeightManifest) -> str | None:
    """Which bytes are sent, and how: equal for equal weights that are sent in one way; None without bytes."""
    how = f"{manifest.transport}/{len(manifest.shards)}/{manifest.checksum_kind}"
    return f"{how}/{manifest.checksum:08x}" if manifest.checksum else None
