"""Counts how rollouts ended, for the metrics `outcomes/...`, and whether long ones are left out more often.

A rollout that infrastructure ended is left out of its group's baseline. That is harmless if it strikes at random. If it
strikes long rollouts more often, the rest is no fair sample of the policy; the two shares by length show it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from stretto.records.rollout import Group, RolloutStatus


@dataclass
class Ends:
    """The ends of the rollouts since the last batch."""

    reasons: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)  # sampled tokens; those of a left-out one up to its end
    is_left_out: list[bool] = field(default_factory=list)

    def add(self, group: Group) -> None:
        """Count the rollouts of a played group."""
        for rollout in group.rollouts:
            if rollout.reason is not None:
                self.reasons[rollout.reason] += 1
            self.lengths.append(rollout.num_sampled_tokens + rollout.num_lost_tokens)
            self.is_left_out.append(rollout.status is RolloutStatus.FAILED)

    def metrics(self) -> dict[str, float]:
        """Share of each reason, and of left-out rollouts in all and by length; {} if no rollout has ended."""
        if not self.lengths:
            return {}
        lengths, left_out = np.array(self.lengths), np.array(self.is_left_out)
        row = {f"outcomes/{reason}": count / len(lengths) for reason, count in sorted(self.reasons.items())}
        row["outcomes/left_out"] = float(left_out.mean())
        is_long = lengths > np.median(lengths)
        if is_long.any():
            row["outcomes/left_out_long"] = float(left_out[is_long].mean())
            row["outcomes/left_out_short"] = float(left_out[~is_long].mean())
        return row


@dataclass
class Counts:
    """Numbers of groups since the last batch; BatchShipper logs and resets them."""

    drawn: int = 0
    finished: int = 0
    failed: int = 0
    zero_signal: int = 0
    rejected: int = 0
    stale: int = 0
    late_s: float = 0.0  # seconds for which the batch had enough groups and waited for others that would be late
    ends: Ends = field(default_factory=Ends)  # of rollouts, by reason and length
    flags: Counter[str] = field(default_factory=Counter)  # rollouts by the filter that flagged them
