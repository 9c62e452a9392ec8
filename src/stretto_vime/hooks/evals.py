"""What an eval function returns: checked, scored, and its samples as lines of a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stretto.base.errors import EnvError, boundary
from stretto.chat.render import Renderer
from stretto.data.values import checked_number, with_whole_text
from stretto.orchestrator.eval_scores import EvalScore
from stretto.vime.sample import Sample, Status
from stretto_vime.hooks.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput

STATUSES = dict.fromkeys(Status, "finished") | {
    Status.TRUNCATED: "truncated",
    Status.FAILED: "failed",
    Status.ABORTED: "failed",
}
"""The status of a rollout for each status of an eval function's sample."""


def checked_results(output: Any, where: str) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The entries by data set of what a function returned, and its metrics.

    where: the function, for messages. Raises: EnvError for anything but entries with rewards.
    """
    with boundary(EnvError, where):
        data = output.data if isinstance(output, RolloutFnEvalOutput) else output
        if not isinstance(data, dict) or not data:
            rule = 'return RolloutFnEvalOutput(data={"name": {"rewards": [...]}})'
            if isinstance(output, RolloutFnTrainOutput | list):
                rule += ', or let the environments play: eval_function = "environments"'
            raise EnvError(f"{where} returned {type(output).__name__} for evaluation=True; {rule}")
        metrics = checked_metrics(getattr(output, "metrics", None), "eval", where)
        for name, entry in data.items():
            _check_entry(name, entry, f"{where}:")
    return {str(name): entry for name, entry in data.items()}, metrics


def build_score(name: str, entry: dict[str, Any], version: int, time_s: float) -> EvalScore:
    """The eval score of one data set."""
    rewards = [float(reward) for reward in entry["rewards"]]
    lengths = [sample.response_length for sample in entry.get("samples") or ()]
    return EvalScore(
        env=name,
        mode="sampled",
        mean=sum(rewards) / len(rewards),
        k=1,
        pass_at_k={},
        pass_all_k={},
        num_tasks=len(rewards),
        num_failed=0,
        num_truncated=sum(map(bool, entry.get("truncated") or ())),
        completion_tokens=sum(lengths) / max(len(lengths), 1),
        time_s=time_s,
        version=version,
    )


def sample_lines(
    name: str, entry: Mapping[str, Any], renderer: Renderer, version: int, task_ids: Mapping[int | None, str]
) -> Iterator[dict[str, Any]]:
    """Prompt, reply, reward and more of each sample of a data set, as those of a run's own evals are written.

    task_ids: by group_index, for samples of held-out tasks.
    """
    samples, rewards = entry["samples"], entry["rewards"]
    members: Counter[int | None] = Counter()
    for index, sample in enumerate(samples):
        start = len(sample.tokens) - sample.response_length
        texts = {"prompt": sample.prompt, "reply": sample.response}
        if sample.tokens:
            ids = np.asarray(sample.tokens, np.int32)
            texts = {"prompt": renderer.readable(ids[:start]), "reply": renderer.readable(ids[start:])}
        yield {
            "version": version,
            "env": name,
            "mode": "sampled",
            "task_id": task_ids.get(sample.group_index),
            "member": members[sample.group_index],
            "reward": float(rewards[index]) if len(rewards) == len(samples) else None,
            "status": STATUSES[sample.status],
            "error": None,
            "metrics": {},
            "num_turns": 1,
            "num_tokens": sample.effective_response_length,
            "branches": [texts],
        }
        members[sample.group_index] += 1


def checked_metrics(metrics: Any, prefix: str, where: str) -> dict[str, float]:
    """A function's metrics, under a prefix.

    Raises: EnvError for a metric that is no number.
    """
    if not isinstance(metrics, dict | None):
        raise EnvError(f"{where}: metrics are {type(metrics).__name__}, not a dictionary of numbers")
    return {
        f"{prefix}/{with_whole_text(str(name))}": checked_number(value, where, f"the metric {name}")
        for name, value in (metrics or {}).items()
    }


def _check_entry(name: Any, entry: Any, where: str) -> None:
    """Raises: EnvError if the entry of a data set is not valid."""
    if not isinstance(entry, dict) or "rewards" not in entry:
        raise EnvError(f"{where} {name!r} is {type(entry).__name__}, not a dictionary with rewards")
    try:
        is_finite = all([math.isfinite(float(reward)) for reward in entry["rewards"]])
    except (TypeError, ValueError):
        is_finite = False
    if not is_finite:
        raise EnvError(f"{where} the rewards of {name!r} are no list of finite numbers")
    if not len(entry["rewards"]):
        raise EnvError(f"{where} {name!r} has no reward")
    samples, truncated = entry.get("samples") or [], entry.get("truncated")
    if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
        raise EnvError(f"{where} the samples of {name!r} are no list of Sample")
    if not isinstance(truncated, list | tuple | None):
        raise EnvError(f"{where} truncated of {name!r} is {type(truncated).__name__}, not a list")
