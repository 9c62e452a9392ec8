"""[orchestrator.concurrency]: how many rollouts are in flight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.config.section import Section


class FixedConcurrency(Section):
    """As many as max_inflight_rollouts and the bound on staleness allow."""

    type: Literal["fixed"] = "fixed"


class AdaptiveConcurrency(Section):
    """As many as the engines take: more, step by step, while they have room; fewer, at once, when they have not."""

    type: Literal["adaptive"] = "adaptive"
    min_rollouts: int = Field(16, gt=0)
    """Never fewer."""
    max_rollouts: int | None = Field(None, gt=0)
    """Never more; None: what max_inflight_rollouts or the slots of the batches allow."""
    initial_rollouts: int | None = Field(None, gt=0)
    """At the start; None: min_rollouts."""
    interval_s: float = Field(2.0, gt=0)
    """Seconds between two looks at the engines."""
    increase: int = Field(16, gt=0)
    """Rollouts more after a look that found room."""
    decrease: float = Field(0.8, gt=0, lt=1)
    """Share that is left after a look that found none."""
    cache_low: float = Field(0.8, gt=0, le=1)
    """There is room while less of the cache than this is used (mean over engines) ..."""
    cache_high: float = Field(0.95, gt=0, le=1)
    """... and none above this."""
    waiting_high: float = Field(8.0, ge=0)
    """There is none while more requests than this wait in an engine (mean over engines)."""
    cooldown_s: float = Field(10.0, ge=0)
    """Seconds after a decrease in which nothing is changed: running requests must end first."""


Concurrency = Annotated[FixedConcurrency | AdaptiveConcurrency, Field(discriminator="type")]
