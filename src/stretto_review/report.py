"""What a second reward would have taught, in numbers: pure numpy, over one row per rollout.

Ranks of equal values are their mean. "Within groups" is after each group's mean is subtracted: what an advantage sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

DOMINATED = 0.8
"""Share of a reward's variance within groups from which one thing alone explains it."""
SATURATED = 0.95
"""Share of rollouts with one and the same value from which a component says little."""
BINS = 64
MOST_SHOWN = 10


@dataclass(frozen=True)
class Columns:
    """One entry per rollout with both rewards."""

    groups: Int64[np.ndarray, " rollouts"]
    members: Int64[np.ndarray, " rollouts"]
    old: Float64[np.ndarray, " rollouts"]
    new: Float64[np.ndarray, " rollouts"]
    old_advantages: Float64[np.ndarray, " rollouts"]
    advantages: Float64[np.ndarray, " rollouts"]
    lengths: Mapping[str, Float64[np.ndarray, " rollouts"]]
    """In several units."""
    parts: Mapping[str, Float64[np.ndarray, " rollouts"]] = field(default_factory=dict)
    """The weighted components of the new reward; 0 where one has none."""


@dataclass(frozen=True)
class Component:
    """One of several summands of a reward."""

    name: str
    mean: float
    share: float
    """Its share in the variance of the reward within groups; all shares add up to 1."""
    same: float
    """Share of rollouts in which it has its most frequent value."""

    @property
    def dominates(self) -> bool:
        return self.share >= DOMINATED

    @property
    def is_saturated(self) -> bool:
        return self.same >= SATURATED


@dataclass(frozen=True)
class Report:
    """All of it; `nan` where there is nothing to compare."""

    rollouts: int
    old_mean: float
    new_mean: float
    rank_correlation: float
    rank_correlation_within_groups: float
    sign_changes: float
    """Share of rollouts whose advantage has the other sign."""
    muted: float
    """Share whose advantage becomes 0."""
    woken: float
    """Share whose advantage was 0 and is not."""
    by_length: dict[str, float]
    """Share of the variance within groups that the length of the reply explains: of either reward."""
    components: list[Component]
    disagreements: list[int]
    """Indices of the rollouts whose place in their group has changed most, in standard deviations, those first."""

    @property
    def is_dominated_by_length(self) -> bool:
        return self.by_length["new"] >= DOMINATED


def report(columns: Columns) -> Report:
    """Compare both rewards."""
    old, new, before, after = columns.old, columns.new, np.sign(columns.old_advantages), np.sign(columns.advantages)
    ranks = _ranks(old), _ranks(new)
    within = [_centered(each, columns.groups) for each in ranks]
    moved = np.abs(_standardized(old, columns.groups) - _standardized(new, columns.groups))
    return Report(
        rollouts=len(old),
        old_mean=_mean(old),
        new_mean=_mean(new),
        rank_correlation=_correlation(*ranks),
        rank_correlation_within_groups=_correlation(*within),
        sign_changes=_mean(before * after < 0),
        muted=_mean((before != 0) & (after == 0)),
        woken=_mean((before == 0) & (after != 0)),
        by_length={name: _by_length(each, columns) for name, each in (("old", old), ("new", new))},
        components=_components(columns),
        disagreements=[int(i) for i in np.argsort(-moved, kind="stable")[:MOST_SHOWN] if moved[i] > 0],
    )


def _components(columns: Columns) -> list[Component]:
    total = _centered(sum(columns.parts.values(), np.zeros(len(columns.new))), columns.groups)
    variance = float(np.dot(total, total))
    found = []
    for name, values in columns.parts.items():
        share = float(np.dot(_centered(values, columns.groups), total)) / variance if variance > 0 else float("nan")
        same = float(np.unique(values, return_counts=True)[1].max(initial=0)) / max(len(values), 1)
        found.append(Component(name, _mean(values), share, same))
    return found


def _by_length(rewards: Float64[np.ndarray, " rollouts"], columns: Columns) -> float:
    """How much of a reward its length explains within groups, by the length that explains most of it.

    A length explains what a curve over it explains: the means of BINS classes of equal size, corrected for how many
    there are (the adjusted correlation ratio), or the ranks, if those explain more.
    """
    values = _centered(rewards, columns.groups)
    return max((max(_by_classes(values, n, columns.groups), _by_ranks(rewards, n, columns.groups))
                for n in columns.lengths.values()), default=float("nan"))  # fmt: skip


def _by_ranks(
    rewards: Float64[np.ndarray, " rollouts"],
    lengths: Float64[np.ndarray, " rollouts"],
    groups: Int64[np.ndarray, " rollouts"],
) -> float:
    correlation = _correlation(_centered(_ranks(rewards), groups), _centered(_ranks(lengths), groups))
    return 0.0 if np.isnan(correlation) else correlation**2


def _by_classes(
    values: Float64[np.ndarray, " rollouts"],
    lengths: Float64[np.ndarray, " rollouts"],
    groups: Int64[np.ndarray, " rollouts"],
) -> float:
    """The share of the variance within groups that the best function of the class of the length explains."""
    total = float(np.dot(values, values))
    if total == 0 or len(values) < 2 * BINS:
        return 0.0
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, BINS + 1)[1:-1]))
    classes = np.searchsorted(edges, lengths, side="right")
    design = np.stack([_centered((classes == n).astype(np.float64), groups) for n in range(len(edges) + 1)], axis=1)
    fitted = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    freedom = len(values) - len(np.unique(groups))
    left = float(np.square(values - fitted).sum()) / max(freedom - len(edges), 1)
    return max(0.0, 1.0 - left / (total / max(freedom, 1)))


def _centered(
    values: Float64[np.ndarray, " rollouts"], groups: Int64[np.ndarray, " rollouts"]
) -> Float64[np.ndarray, " rollouts"]:
    """Minus the mean of their group; exactly 0 for a group of equal values."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    first = np.zeros(len(counts))
    first[index] = values  # any one of the group: differences from it are exact where all are equal
    shifted = values - first[index]
    means = np.bincount(index, shifted, len(counts)) / np.maximum(counts, 1)
    centered: np.ndarray = shifted - means[index]
    return centered


def _standardized(
    values: Float64[np.ndarray, " rollouts"], groups: Int64[np.ndarray, " rollouts"]
) -> Float64[np.ndarray, " rollouts"]:
    centered = _centered(values, groups)
    scale = float(np.sqrt(np.mean(np.square(centered)))) if len(centered) else 0.0
    return centered / scale if scale > 0 else centered


def _ranks(values: Float64[np.ndarray, " rollouts"]) -> Float64[np.ndarray, " rollouts"]:
    """Ranks from 0 to 1, of equal values their mean."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = ((ends - (counts + 1) / 2) / max(len(values) - 1, 1))[index]
    return ranks


def _correlation(a: Float64[np.ndarray, " rollouts"], b: Float64[np.ndarray, " rollouts"]) -> float:
    a, b = (each - each.mean() if len(each) else each for each in (a, b))
    scale = float(np.sqrt(np.dot(a, a) * np.dot(b, b)))
    return float(np.dot(a, b)) / scale if scale > 0 else float("nan")


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
