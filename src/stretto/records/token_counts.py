"""Which tokens are trained in which loss component, and how many of them a step has.

A step's loss is divided by the counts of all its micro batches, wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stretto.records.sample import MicroBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class TokenCounts(NamedTuple):
    """Number of tokens with a non-zero weight in each loss component."""

    rl: float
    ce: float
    ref_kl: float
    rl_samples: float = 0.0  # samples with rl tokens; with the reduction `rollout`, rollouts


@dataclass(frozen=True)
class ComponentWeights:
    """The weight of every token in each loss component; None if all weights are 0."""

    rl: Float[np.ndarray, " tokens"] | None
    ce: Float[np.ndarray, " tokens"] | None
    ref_kl: Float[np.ndarray, " tokens"] | None

    @classmethod
    def of(cls, mb: MicroBatch) -> ComponentWeights:
        """The weights of a micro batch.

        Without a stream, rl is 1 where loss_mask is set, ce and ref_kl are 0.
        """
        rl = mb.loss_mask.astype(np.float32) if mb.rl_weights is None else mb.rl_weights * mb.loss_mask
        return cls(*(w if w is not None and np.any(w) else None for w in (rl, mb.ce_weights, mb.ref_kl_weights)))

    @property
    def is_trained(self) -> Bool[np.ndarray, " tokens"] | None:
        """True for tokens with a weight in any component; None if there are none."""
        present = [w != 0 for w in (self.rl, self.ce, self.ref_kl) if w is not None]
        return np.logical_or.reduce(present) if present else None


def count_tokens(micro_batches: Sequence[MicroBatch], *, by_sample: bool = False) -> TokenCounts:
    """The tokens of each component on this rank; samples are counted only if `by_sample`."""
    counts = np.zeros(4)
    for mb in micro_batches:
        weights = ComponentWeights.of(mb)
        streams = (weights.rl, weights.ce, weights.ref_kl)
        samples = 0
        if by_sample and weights.rl is not None:
            samples = len(np.unique(find_documents(np.flatnonzero(weights.rl), np.asarray(mb.cu_seqlens))))
        counts += np.array([*(0 if w is None else np.count_nonzero(w) for w in streams), samples])
    return TokenCounts(*counts.tolist())


NO_ADVANTAGE = 1e-6
"""Advantages up to this are 0: means of equal rewards are off by about 1e-17."""


def has_signal(mb: MicroBatch) -> bool:
    """True if a token of the micro batch has an advantage, or a target of another component."""
    weights = ComponentWeights.of(mb)
    if weights.ce is not None or weights.ref_kl is not None:
        return True
    return weights.rl is not None and bool(np.any(np.abs(mb.advantages[weights.rl != 0]) > NO_ADVANTAGE))


def weigh_by_rollout(micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], float]:
    """Divide rl weights by the rl tokens of their rollout; returns also the number of rollouts.

    A rollout that is only partly in them counts with that share of its rl tokens, so that the numbers of all ranks add
    up.
    """
    weighted, num_rollouts = [], 0.0
    for mb in micro_batches:
        weights = ComponentWeights.of(mb).rl
        if weights is not None:
            tokens = np.flatnonzero(weights)
            documents = find_documents(tokens, np.asarray(mb.cu_seqlens))
            totals = np.array(mb.rollout_tokens, np.float64)[documents]
            weights = weights.copy()
            weights[tokens] /= totals
            num_rollouts += float((1 / totals).sum())
            mb = replace(mb, rl_weights=weights)
        weighted.append(mb)
    return weighted, num_rollouts


def find_documents(
    tokens: Int[np.ndarray, " positions"], bounds: Int[np.ndarray, " bounds"]
) -> Int[np.ndarray, " positions"]:
    """The document of each of these token positions; bounds: `cu_seqlens` of the row."""
    return np.searchsorted(bounds, tokens, side="right") - 1


def counts_of_step(micro_batches: Sequence[MicroBatch], reduction: str) -> TokenCounts:
    """The counts by which a loss of this reduction is divided, over a whole step."""
    counts = count_tokens(micro_batches, by_sample=reduction != "token")
    if reduction != "rollout":
        return counts
    return counts._replace(rl_samples=weigh_by_rollout(micro_batches)[1])
