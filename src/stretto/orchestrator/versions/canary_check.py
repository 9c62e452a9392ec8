"""Judges what engines compute for a canary: whether they compute with the weights that the trainer has published.

A difference to the trainer's log-probabilities alone cannot tell an engine that stands still from rounding: in bfloat16
rounding explains 0.05 to 0.08 nats of SmolLM2-135M, more than hundreds of steps move at a rate of 1e-6. So changes are
compared too:

- at the start, a probe (records.weights.probe_scale) moves every tensor visibly
- from version to version, an engine must not stand still while the trainer moves
- since the first check, an engine must have moved as the trainer has
- tokens that the engine has just sampled must have the log-probabilities that it computes when it reads them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stretto.base.errors import EngineError
from stretto.records.weight_manifest import BFLOAT16_TOLERANCE, Canary, WeightManifest
from stretto.transports.engine.proof import CanaryScores

if TYPE_CHECKING:
    from jaxtyping import Float32


ROUNDING_MARGIN = 3.0
"""Factor on the trainer's estimate of 8-bit rounding, which leaves out the experts' second product."""


PROBE_NOISE = 0.1
"""Rounding to 16 bits in a probe, as a part of what it moves; with SmolLM2-135M 0.04."""


def tolerance_of(manifest: WeightManifest, given: float | None = None) -> float:
    """Mean difference of log-probabilities that rounding can explain, in nats.

    Measured between two programs, on random tokens with SmolLM2-135M: float32 8e-6, bfloat16 0.05 to 0.08. For 8 bits
    the trainer has estimated it for this version. given: that of the config.
    """
    types = {entry.dtype for entry in manifest.tensors} - {"float8_e4m3fn"}
    rounding = 0.0 if manifest.canary is None else manifest.canary.rounding
    return max(given or (1e-3 if types <= {"float32"} else BFLOAT16_TOLERANCE), ROUNDING_MARGIN * rounding)


def describe_suspects(manifest: WeightManifest) -> str:
    """A sentence that names the tensors of which engines are known to keep separate copies."""
    names = [entry.name for entry in manifest.tensors]
    suspects = []
    if "lm_head.weight" not in names and (tied := [n for n in names if n.endswith("embed_tokens.weight")]):
        suspects.append(f"the output matrix ({tied[0]} here), of which the engine may have a separate packed copy")
    if experts := [name for name in names if ".experts." in name]:
        suspects.append(f"the {len(experts)} tensors of experts ({experts[0]} ...), which engines pack")
    if not suspects:
        suspects.append(f"all {len(names)} tensors, none in particular ({names[0]} ... {names[-1]})")
    return "Suspect " + "; and ".join(suspects) + "."


@dataclass(frozen=True)
class _Checked:
    """Log-probabilities of one check, float32 [scored tokens] in nats."""

    version: int
    engine: Float32[np.ndarray, " scored"]
    trainer: Float32[np.ndarray, " scored"]


MARGIN = 4.0
"""Change of the difference between engine and trainer, as a multiple of the first one, that rounding can explain."""
LAG = 0.5
"""Part of the trainer's change that an engine may lack."""


class CanaryCheck:
    """The checks of a run's engines; remembers the first and the latest one of each."""

    def __init__(self, tolerance: float | None = None) -> None:
        """tolerance: mean difference that is let pass, nats; None: `tolerance_of` the version."""
        self._tolerance = tolerance
        self._first: dict[str, _Checked] = {}
        self._latest: dict[str, _Checked] = {}

    def tolerance_of(self, manifest: WeightManifest) -> float:
        """Mean difference of log-probabilities that is let pass for a version, nats."""
        return tolerance_of(manifest, self._tolerance)

    def __call__(self, manifest: WeightManifest, canary: Canary, answers: Mapping[str, CanaryScores]) -> float:
        """Check what the engines compute with a version; returns the largest mean difference to the trainer, nats.

        Raises: EngineError if one does not compute with it.
        """
        where, at = f"version {manifest.version}", _scored(canary)
        tolerance = self.tolerance_of(manifest)
        error = self._compare(manifest, canary, answers, canary.logprobs, where, tolerance)
        for url, scores in answers.items():
            now = _Checked(manifest.version, scores.prompt[at], np.array(canary.logprobs, np.float32)[at])
            self._check_moves(manifest, url, now)
            self._first.setdefault(url, now)
            self._latest[url] = now
        return error

    def probe(self, manifest: WeightManifest, canary: Canary, answers: Mapping[str, CanaryScores]) -> None:
        """Check what the engines compute with the probe of a version.

        Raises: EngineError if one does not compute with it.
        """
        assert canary.probe is not None
        where = f"a probe of version {manifest.version}, whose tensors are all scaled"
        tolerance = self.tolerance_of(manifest)
        if tolerance > 0.01:  # 16 bits: scaled as rounding is there
            moved = np.abs(np.subtract(canary.probe, canary.logprobs))[_scored(canary)].mean()
            tolerance = max(tolerance / 3, PROBE_NOISE * float(moved))
        self._compare(manifest, canary, answers, canary.probe, where, tolerance)

    def _compare(
        self,
        manifest: WeightManifest,
        canary: Canary,
        answers: Mapping[str, CanaryScores],
        trainer: tuple[float, ...],
        where: str,
        tolerance: float,
    ) -> float:
        """Compare engines with the trainer, and what they sample with what they read; the largest mean difference."""
        at, largest = _scored(canary), 0.0
        expected = np.array(trainer, np.float32)[at]
        for url, scores in answers.items():
            error = np.abs(scores.prompt[at] - expected)
            largest = max(largest, float(error.mean()))
            if not error.mean() <= tolerance:
                raise EngineError(
                    f"{url} does not compute with {where}: its log-probabilities of fixed tokens differ from the "
                    f"trainer's by {error.mean():.2g} on average and {error.max():.2g} at token "
                    f"{int(at[error.argmax()])} (tolerance {tolerance:g}, weight_broadcast.canary_tolerance). "
                    + describe_suspects(manifest)
                )
            # The median: a token whose experts change by rounding is no fault.
            gap = np.abs(scores.decoded - scores.read)
            if len(gap) and not np.median(gap) <= tolerance:
                raise EngineError(
                    f"{url} samples with other weights than {where}: {len(gap)} tokens that it has just sampled have "
                    f"log-probabilities that differ by {np.median(gap):.2g} (median) from those that it computes when "
                    f"it reads them (tolerance {tolerance:g}, weight_broadcast.canary_tolerance). Reading agrees with "
                    "the trainer. Suspect captured graphs, drafts, and copies of weights that only decoding uses."
                )
        return largest

    def _check_moves(self, manifest: WeightManifest, url: str, now: _Checked) -> None:
        """Compare how engine and trainer have moved since earlier checks.

        Raises: EngineError if the engine has not moved with the trainer.
        """
        first, latest = self._first.get(url), self._latest.get(url)
        if first is None or latest is None:
            return
        hint = describe_suspects(manifest)
        in_8_bits = any(entry.dtype.startswith("float8") for entry in manifest.tensors)
        moved = np.mean(now.trainer != latest.trainer)
        if moved > 0.5 and not in_8_bits and np.array_equal(now.engine, latest.engine):
            raise EngineError(
                f"{url} stands still: for version {now.version} it computes the same log-probabilities of fixed "
                f"tokens, bit by bit, as for version {latest.version}, and the trainer other ones for {moved:.0%} of "
                f"them. It answers that it has loaded version {now.version}. {hint}"
            )
        change = now.trainer - first.trainer
        lag = float(np.abs(now.engine - first.engine - change).mean())
        noise = float(np.abs(first.engine - first.trainer).mean())
        rounding = 0.0 if manifest.canary is None else manifest.canary.rounding
        floor = 1e-4 if tolerance_of(manifest) < 0.01 else 0.02
        if lag > max(MARGIN * max(noise, rounding), floor) and lag > LAG * np.abs(change).mean():
            raise EngineError(
                f"{url} does not follow the trainer: from version {first.version} to {now.version} the trainer's "
                f"log-probabilities of fixed tokens moved by {np.abs(change).mean():.2g} on average, and the engine's "
                f"moved differently, by {lag:.2g}; at version {first.version} they differed by {noise:.2g}. {hint}"
            )


def _scored(canary: Canary) -> np.ndarray:
    """Positions of the tokens that have a log-probability: not the first, and no placeholder of an image."""
    tokens, image = np.array(canary.token_ids), canary.image
    return np.arange(1, len(tokens)) if image is None else np.flatnonzero(tokens != image.token_id)[1:]
