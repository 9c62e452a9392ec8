"""What an eval says about a version: scores by environment, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class EvalScore:
    """The score of one environment in one mode. Means are over the rollouts that did not fail."""

    env: str
    mode: str  # "sampled" | "greedy"
    mean: float
    k: int  # rollouts per task; `mean` is avg@k
    pass_at_k: dict[int, float]  # probability that one of k succeeds, k = 1, 2, 4, ...; 0/1 rewards only
    pass_all_k: dict[int, float]  # probability that all of k succeed
    num_tasks: int
    num_failed: int
    num_truncated: int
    completion_tokens: float  # mean
    time_s: float
    metrics: dict[str, float] = field(default_factory=dict)  # what environments report beside the reward: means
    version: int = 0  # loaded when the eval began
    versions: tuple[int, int] | None = None  # oldest and newest of its tokens, if the engine reports them


def mean_over_envs(scores: Sequence[EvalScore], mode: str) -> float | None:
    """Mean over environments in one mode; None if the mode was not played."""
    means = [score.mean for score in scores if score.mode == mode]
    return float(np.mean(means)) if means else None


def eval_row(scores: Sequence[EvalScore]) -> dict[str, float]:
    """The metrics of an eval."""
    row = {}
    for score in scores:
        name = f"eval/{score.env}/{score.mode}"
        row[f"{name}/mean"] = score.mean
        row[f"{name}/completion_tokens"] = score.completion_tokens
        row[f"{name}/num_failed"] = float(score.num_failed)
        if score.k > 1:
            row[f"{name}/avg@{score.k}"] = score.mean
        row |= {f"{name}/metrics/{metric}": value for metric, value in score.metrics.items()}
        row |= {f"{name}/pass@{k}": value for k, value in score.pass_at_k.items() if k > 1}
        row |= {f"{name}/pass^{k}": value for k, value in score.pass_all_k.items() if k > 1}
    return row | {"eval/time_s": sum(score.time_s for score in scores)}
