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

import numpy as np

from stretto.base.aio import wait_for
from stretto.base.errors import EngineError, WireError
from stretto.records.weights import Canary, WeightManifest

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """The part of an engine client that a policy needs."""

    async def update_weights(self, manifest: WeightManifest) -> None: ...

    async def prompt_logprobs(self, token_ids: np.ndarray, name: str) -> dict[str, np.ndarray]: ...


class VersionLog(Protocol):
    """The part of the ledger that hears of versions before they take effect."""

    def version_published(self, version: int) -> None: ...

    def version_loaded(self, version: int) -> None: ...


def default_tolerance(manifest: WeightManifest) -> float:
    """Mean difference of log-probabilities that rounding explains.

    Measured with real engines: float32 under 1e-5, bfloat16 0.013.
    """
    return 1e-3 if {entry.dtype for entry in manifest.tensors} <= {"float32"} else 0.1


def suspects(manifest: WeightManifest) -> str:
    """Which tensors an engine is known to keep old copies of, of those that were sent."""
    names = [entry.name for entry in manifest.tensors]
    found = []
    if "lm_head.weight" not in names and (tied := [n for n in names if n.endswith("embed_tokens.weight")]):
        found.append(f"the output matrix, which is {tied[0]} here and may have a packed copy of its own")
    if experts := [name for name in names if ".experts." in name]:
        found.append(f"the {len(experts)} tensors of experts ({experts[0]} ...), which engines pack")
    if not found:
        found.append(f"all {len(names)} of them, for no kind stands out ({names[0]} ... {names[-1]})")
    return "Suspect " + "; and ".join(found) + "."


class Policy:
    """The published versions in order, and how they get into the engines."""

    def __init__(
        self,
        engines: Engines,
        versions: VersionLog,
        *,
        start: int,
        timeout_s: float,
        tolerance: float | None = None,
    ) -> None:
        self.next_version = start
        self.load_s = 0.0  # of the latest load
        self._engines, self._versions, self._timeout_s = engines, versions, timeout_s
        self._tolerance = tolerance
        self.canary_error = (
            0.0  # mean difference to the trainer's log-probabilities at the latest check, nats
        )
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

        Raises: EngineError when an engine does not load it in time, or computes with other weights than the
        trainer.
        """
        manifest = await self._published.get()
        version = manifest.version
        self._versions.version_published(version)
        started = time.perf_counter()
        what = f"all engines to load version {version}"
        await wait_for(self._engines.update_weights(manifest), self._timeout_s, what)
        if manifest.canary is not None:
            what = f"the engines to score the canary of version {version}"
            await wait_for(self._check(manifest, manifest.canary), self._timeout_s, what)
        self._versions.version_loaded(version)
        self.load_s = time.perf_counter() - started
        self.next_version = version + 1
        logger.debug("loaded version=%d in %.3fs", version, self.load_s)
        return version

    async def _check(self, manifest: WeightManifest, canary: Canary) -> None:
        """Every engine must give the canary's tokens the trainer's log-probabilities."""
        expected = np.array(canary.logprobs[1:])
        answers = await self._engines.prompt_logprobs(
            np.array(canary.token_ids, np.int32), f"canary-{manifest.version}"
        )
        tolerance = self._tolerance or default_tolerance(manifest)
        errors = {url: np.abs(found[1:] - expected) for url, found in answers.items()}
        self.canary_error = max((float(error.mean()) for error in errors.values()), default=0.0)
        for url, error in errors.items():
            if not error.mean() <= tolerance:
                worst = int(error.argmax()) + 1
                raise EngineError(
                    f"{url} does not compute with version {manifest.version}: its log-probabilities of fixed tokens "
                    f"differ from the trainer's by {error.mean():.2g} on average and {error.max():.2g} at token "
                    f"{worst} (tolerance {tolerance:g}, weight_broadcast.canary_tolerance). {suspects(manifest)}"
                )

    @property
    def num_waiting(self) -> int:
        """Versions that are published and not yet being loaded."""
        return self._published.qsize()
