"""Loads the versions that the trainer publishes into all engines, one by one.

States of a version: published (announced by the trainer) -> loaded (acknowledged by every engine). A version is
used only after it is loaded: a completion stamped v must have been sampled from weights v. Running requests
continue through an update; the engines take care of that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from stretto.base.aio import wait_for
from stretto.base.errors import EngineError, WireError
from stretto.ledger.writer import Ledger
from stretto.orchestrator.turns import Turns
from stretto.records.weights import Canary, WeightManifest
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)


ROUNDING_MARGIN = 3.0
"""Factor on the trainer's estimate of 8-bit rounding, which leaves out the experts' second product."""


def default_tolerance(manifest: WeightManifest) -> float:
    """Mean difference of log-probabilities that rounding can explain, in nats.

    Measured with real engines: float32 under 1e-5, bfloat16 0.013. For 8 bits the trainer has estimated it for this
    version.
    """
    types = {entry.dtype for entry in manifest.tensors} - {"float8_e4m3fn"}
    rounding = 0.0 if manifest.canary is None else manifest.canary.rounding
    return max(1e-3 if types <= {"float32"} else 0.1, ROUNDING_MARGIN * rounding)


def describe_suspects(manifest: WeightManifest) -> str:
    """A sentence that names the tensors of which engines are known to keep separate copies."""
    names = [entry.name for entry in manifest.tensors]
    suspects = []
    if "lm_head.weight" not in names and (tied := [n for n in names if n.endswith("embed_tokens.weight")]):
        suspects.append(
            f"the output matrix ({tied[0]} here), of which the engine may have a separate packed copy"
        )
    if experts := [name for name in names if ".experts." in name]:
        suspects.append(f"the {len(experts)} tensors of experts ({experts[0]} ...), which engines pack")
    if not suspects:
        suspects.append(f"all {len(names)} tensors, none in particular ({names[0]} ... {names[-1]})")
    return "Suspect " + "; and ".join(suspects) + "."


class VersionLoader:
    """Loads published versions into the engines in order, and checks what they compute."""

    def __init__(
        self,
        engines: EngineClient,
        ledger: Ledger,
        *,
        start: int,
        timeout_s: float,
        tolerance: float | None = None,
        generation: Callable[[], int] = lambda: 0,
        turns: Turns | None = None,
    ) -> None:
        """tolerance: of the canary check, in nats; None: `default_tolerance`. turns: of a run with [colocate].

        generation: returns a number that grows whenever an engine goes down or comes back.
        """
        self.next_version = start
        self.load_s = 0.0  # of the latest load
        self._engines, self._ledger, self._timeout_s = engines, ledger, timeout_s
        self._tolerance, self._generation = tolerance, generation
        self.turns = turns or Turns(engines, None)
        self._checked_generation: int | None = None  # its engines passed the latest check
        self.canary_error = 0.0  # mean difference to the trainer's logprobs at the latest check, nats
        self._published: asyncio.Queue[WeightManifest] = asyncio.Queue()
        self._newest = start - 1

    def on_published(self, manifest: WeightManifest) -> None:
        """Queue a version that the trainer has published."""
        if manifest.version != self._newest + 1:
            raise WireError(
                f"the trainer published version {manifest.version} after {self._newest}; versions must come one by one"
            )
        self._newest = manifest.version
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
        self._ledger.version_published(version)
        started, generation = time.perf_counter(), self._generation()
        what = f"all engines to load version {version}"
        await self.turns.begin_loading()
        await wait_for(self._engines.update_weights(manifest), self._timeout_s, what)
        await self.turns.begin_rollouts()
        if manifest.canary is not None:
            what = f"the engines to score the canary of version {version}"
            await wait_for(self._check(manifest, manifest.canary), self._timeout_s, what)
            self._checked_generation = generation
        self._ledger.version_loaded(version)
        self.load_s = time.perf_counter() - started
        self.next_version = version + 1
        logger.debug("loaded version=%d in %.3fs", version, self.load_s)

    async def _check(self, manifest: WeightManifest, canary: Canary) -> None:
        """Compare every engine's log-probabilities of the canary's tokens with the trainer's.

        Raises: EngineError if they differ by more than the tolerance.
        """
        token_ids, image = np.array(canary.token_ids, np.int32), canary.image
        at = (
            np.arange(1, len(token_ids)) if image is None else np.flatnonzero(token_ids != image.token_id)[1:]
        )
        expected = np.array(canary.logprobs)[at]
        answers = await self._engines.prompt_logprobs(token_ids, f"canary-{manifest.version}", image)
        tolerance = self._tolerance or default_tolerance(manifest)
        errors = {url: np.abs(logprobs[at] - expected) for url, logprobs in answers.items()}
        self.canary_error = max((float(error.mean()) for error in errors.values()), default=0.0)
        for url, error in errors.items():
            if not error.mean() <= tolerance:
                worst = int(at[error.argmax()])
                raise EngineError(
                    f"{url} does not compute with version {manifest.version}: its log-probabilities of fixed tokens "
                    f"differ from the trainer's by {error.mean():.2g} on average and {error.max():.2g} at token "
                    f"{worst} (tolerance {tolerance:g}, weight_broadcast.canary_tolerance). "
                    + describe_suspects(manifest)
                )

    @property
    def wants_canary(self) -> bool:
        """Has an engine gone down or come back since the latest check, or was there no check yet?"""
        return self._checked_generation != self._generation()

    @property
    def num_waiting(self) -> int:
        """Number of versions that are published and not yet being loaded."""
        return self._published.qsize()
