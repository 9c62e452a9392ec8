"""Return values of hooks that are more than a number or a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.vime.sample import Sample


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns: groups of samples, and metrics."""

    samples: list[list[Sample]] | list[list[list[Sample]]]
    """Groups; a member is a sample, or the list of the samples of its episode."""
    metrics: dict[str, float] | None = None


@dataclass
class RecordedBatch(RolloutFnTrainOutput):
    """The batch of step `rollout_id + 1` as a ledger has it: its groups, of `records.rollout`, however many."""

    samples: list[Any]


@dataclass
class RolloutFnEvalOutput:
    """What an eval function returns: results by data set, and metrics, which are logged as `eval/NAME`.

    The result of a data set has `rewards` and, optionally, `truncated` and `samples`. Samples are written to RUN/evals
    if the eval saves samples.
    """

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] | None = None


@dataclass
class DynamicFilterOutput:
    """What a dynamic-sampling filter returns: is the group trained, and if not, why."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = field(default=False)
