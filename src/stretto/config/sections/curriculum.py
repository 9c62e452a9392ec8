"""Which tasks are drawn, which groups make a batch, and which rollouts are left out of it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from stretto.config.section import Section

POOLS = 'curriculum.sampler.type = "difficulty_pool"'
"""The key that needs an add-on."""


class StandardSampler(Section):
    """Every task once per epoch, in a new random order."""

    type: Literal["standard"] = "standard"


class PoolSection(Section):
    """A pool of tasks of similar difficulty."""

    threshold: float
    """Greatest running reward of its tasks; the pool with the greatest threshold has those above it, too."""
    weight: float = Field(1.0, ge=0)
    """Chance of one of its tasks, relative to a task that was never drawn."""


class DifficultySampler(Section):
    """Tasks are drawn by difficulty: each is in a pool according to its running reward."""

    type: Literal["difficulty_pool"] = "difficulty_pool"
    hard_threshold: float = 0.25
    """Tasks whose running reward is at most this are hard."""
    easy_threshold: float = 0.75
    """Tasks whose running reward is above this are easy; what lies between is normal."""
    hard_weight: float = Field(0.2, ge=0)
    """Chance of a hard task to be drawn, relative to a task that was never drawn, whose weight is 1."""
    normal_weight: float = Field(1.0, ge=0)
    """Chance of a normal task, relative to one that was never drawn."""
    easy_weight: float = Field(0.2, ge=0)
    """Chance of an easy task, relative to one that was never drawn."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Share of the running reward that stays when a group's mean reward comes in; 0: the latest mean counts."""
    pools: dict[str, PoolSection] = Field({})
    """Pools by name, in the place of hard, normal and easy. Each has a `threshold`, the greatest running reward of its
    tasks (the pool with the greatest has those above it, too), and a `weight`, the chance of one of its tasks relative
    to one that was never drawn (1)."""

    @property
    def ordered(self) -> list[tuple[str, float, float]]:
        """Name, threshold and weight of every pool, by threshold; the last one has all tasks above the others."""
        if self.pools:
            named = [(name, pool.threshold, pool.weight) for name, pool in self.pools.items()]
            return sorted(named, key=lambda pool: pool[1])
        return [
            ("hard", self.hard_threshold, self.hard_weight),
            ("normal", self.easy_threshold, self.normal_weight),
            ("easy", math.inf, self.easy_weight),
        ]


Sampler = Annotated[StandardSampler | DifficultySampler, Field(discriminator="type")]


class RangeGate(Section):
    """Keys of all gates."""

    type: str
    reject_min: float = 0.0
    """Lower end of the range, which belongs to it."""
    reject_max: float = 0.0
    """Upper end of the range, which belongs to it."""


class AdvantageGate(RangeGate):
    """Rejects a group whose advantages all lie in the range: by default those without signal, as DAPO does."""

    type: Literal["advantage_range"] = "advantage_range"


class RewardGate(RangeGate):
    """Rejects a group whose mean reward lies in the range."""

    type: Literal["reward_range"] = "reward_range"


Gate = Annotated[AdvantageGate | RewardGate, Field(discriminator="type")]


class CurriculumSection(Section):
    """How the tasks of an environment are drawn, and which of its groups are trained on."""

    sampler: Sampler = StandardSampler()
    gates: dict[str, Gate] = Field({})
    """By name; a group is trained on if every gate admits it. Rejected ones are replaced by other draws."""


class FilterSection(Section):
    """Keys of all filters."""

    type: str
    enforce: bool = False
    """Leave flagged rollouts out of the batch; false: count them only."""


class GibberishFilter(FilterSection):
    """Flags a rollout with a rare token that the policy itself found less likely than chance."""

    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(100_000, ge=0)
    """Tokens with greater ids are rare: byte-pair vocabularies are sorted by frequency."""
    logprob_offset: float = Field(2.0, ge=0)
    """Nats below the log-probability of the uniform distribution, -log(vocabulary)."""


class RepetitionFilter(FilterSection):
    """Flags a rollout with a long run of tokens of a probability near 1: it repeats itself."""

    type: Literal["repetition"] = "repetition"
    window: int = Field(3000, ge=1)
    """Sampled tokens in a row."""
    prob_threshold: float = Field(0.99, gt=0, le=1)
    """Probability that each of them exceeds."""


class ZeroAdvantageFilter(FilterSection):
    """Flags a rollout whose advantage is 0: it would only dilute the mean over the batch's tokens."""

    type: Literal["zero_advantage"] = "zero_advantage"
    enforce: bool = True


class TruncatedFilter(FilterSection):
    """Flags a rollout that was cut: it reached a limit of tokens or turns before it ended."""

    type: Literal["truncated"] = "truncated"
    enforce: bool = True


Filter = Annotated[
    GibberishFilter | RepetitionFilter | ZeroAdvantageFilter | TruncatedFilter, Field(discriminator="type")
]
