"""The time of a step of `sft`: examples are drawn and packed as it does, and rows take what `Costs` says.

There is nobody to wait for, so nothing is simulated: the slowest data-parallel rank decides.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

import numpy as np

from stretto.config.root import SFTConfig
from stretto.foresee.costs import Costs
from stretto.foresee.workload import Numbers
from stretto.records.rows import pack_rows

STEPS = 40


@dataclass(frozen=True)
class SftTimes:
    """Means per step, in seconds, tokens and rows."""

    step_s: float
    passes_s: float
    """Forward and backward passes of the slowest rank."""
    update_s: float
    rank_idle: float
    """Share of the passes in which a data-parallel rank waits for the slowest one, on average."""
    tokens: float
    rows: float
    fill: float
    """Share of the rows' seq_len tokens that examples fill."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


def sft_times(costs: Costs, examples: Numbers, *, steps: int = STEPS, seed: int = 0) -> SftTimes:
    """The times of steps with examples of these lengths."""
    cfg, dp = costs.setup.cfg, costs.setup.degrees.dp
    assert isinstance(cfg, SFTConfig)
    rng, found = random.Random(seed), []
    for _ in range(steps):
        drawn = (round(examples.draw(rng)) for _ in range(cfg.batch_size))
        lengths = np.array([min(max(length, 1), cfg.seq_len) for length in drawn], np.int64)
        rows = [lengths[row] for row in pack_rows(lengths, cfg.seq_len)]
        as_costs = [(float(row.sum()), float((row**2).sum() / 2 / row.sum())) for row in rows]
        ranks = [costs.train_s(as_costs[rank::dp]) for rank in range(dp)]
        found.append((max(ranks), 1 - statistics.mean(ranks) / max(ranks), float(lengths.sum()), len(rows)))
    passes, idle, tokens, rows_per_step = (statistics.mean(values) for values in zip(*found))
    return SftTimes(
        step_s=passes + costs.update_s,
        passes_s=passes,
        update_s=costs.update_s,
        rank_idle=idle,
        tokens=tokens,
        rows=rows_per_step,
        fill=tokens / (rows_per_step * cfg.seq_len),
    )


def default_examples(cfg: SFTConfig) -> Numbers:
    """What is assumed of a config alone."""
    return Numbers(cfg.seq_len / 4, 0.7)
