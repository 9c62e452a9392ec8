"""The segments of a packed row: runs of tokens, each of which may continue another one.

A segment's tokens see all tokens of the segments that it continues, its ancestors, and those of its own up to
themselves. So texts that begin alike are computed once up to where they part. Every kind of attention gets the tree
in the form that it computes with: the runs that a segment sees, or their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class SegmentTree:
    """Segment s is tokens bounds[s]:bounds[s + 1] and continues parents[s], or starts a document if that is -1."""

    bounds: Int[np.ndarray, " bounds"]
    parents: Int[np.ndarray, " segments"]

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], parents: Sequence[int] | None = None) -> SegmentTree:
        """parents: None if no segment continues another one."""
        bounds = np.asarray(cu_seqlens, np.int64)
        of = np.full(len(bounds) - 1, -1, np.int64) if parents is None else np.asarray(parents, np.int64)
        assert (of < np.arange(len(of))).all(), "a segment stands behind the one that it continues"
        return cls(bounds, of)

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """What layers compute from it once for all of them, by what it is for; kept as long as the tree is."""
        return {}

    @cached_property
    def lengths(self) -> Int[np.ndarray, " segments"]:
        """Tokens of each segment alone."""
        return np.diff(self.bounds)

    @cached_property
    def prefixes(self) -> Int[np.ndarray, " segments"]:
        """Tokens of each segment's ancestors: the position of its first token."""
        found = np.zeros(len(self.parents), np.int64)
        lengths, parents = self.lengths, self.parents
        for segment in np.flatnonzero(parents >= 0).tolist():
            found[segment] = found[parents[segment]] + lengths[parents[segment]]
        return found

    @cached_property
    def ancestors(self) -> list[tuple[int, ...]]:
        """The segments that each one continues, the first one first."""
        found: list[tuple[int, ...]] = []
        for parent in self.parents.tolist():
            found.append((*found[parent], parent) if parent >= 0 else ())
        return found

    @cached_property
    def longest(self) -> int:
        """Most tokens that a token sees."""
        return int((self.lengths + self.prefixes).max(initial=0))

    @cached_property
    def intervals(self) -> tuple[Int[np.ndarray, " segments"], Int[np.ndarray, " segments"]]:
        """Numbers first and last: segment a is an ancestor of s, or s, if first[a] <= first[s] < last[a]."""
        sizes = np.ones(len(self.parents), np.int64)
        parents = self.parents.tolist()
        for segment in reversed(range(len(parents))):
            if parents[segment] >= 0:
                sizes[parents[segment]] += sizes[segment]
        first, free = np.zeros_like(sizes), np.zeros_like(sizes)  # free: the next number below each segment
        next_root = 0
        for segment, parent in enumerate(parents):
            if parent < 0:
                first[segment], next_root = next_root, next_root + sizes[segment]
            else:
                first[segment] = free[parent]
                free[parent] += sizes[segment]
            free[segment] = first[segment] + 1
        return first, first + sizes

    def prefix_rows(self, segment: int) -> Int[np.ndarray, " prefix"]:
        """The tokens of a segment's ancestors, in order."""
        runs = [np.arange(self.bounds[a], self.bounds[a + 1]) for a in self.ancestors[segment]]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)
