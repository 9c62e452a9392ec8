"""What hooks return when it is more than a number or a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.hooks.sample import Sample


@dataclass
class RolloutFnTrainOutput:
    """Of a rollout function: groups of samples, and metrics of its own."""

    samples: list[list[Sample]]
    metrics: dict[str, float] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Of an eval function: by data set `rewards`, and perhaps `truncated` and `samples`, which are kept in RUN/evals
    where the eval keeps samples; and metrics of its own, logged with the eval as `eval/NAME`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] | None = None


@dataclass
class DynamicFilterOutput:
    """Of a dynamic-sampling filter: is the group trained, and if not, why."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = field(default=False)
