"""What evals say: scores over rollouts, the files they are kept in, and the table a person reads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import comb
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from stretto.base.paths import RunDir
from stretto.chat.render import Renderer
from stretto.hooks.sample import Status
from stretto.orchestrator.rollout import kind_of
from stretto.orchestrator.scoring import is_counted
from stretto.records.rollout import Branch, Group, RolloutStatus

STATUSES = dict.fromkeys(Status, "finished") | {
    Status.TRUNCATED: "truncated",
    Status.FAILED: "failed",
    Status.ABORTED: "failed",
}
"""What the samples of an eval function are called beside rollouts."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Score:
    """One environment played one way. Means are over the rollouts that did not fail."""

    env: str
    mode: str  # "sampled" | "greedy"
    mean: float
    k: int  # rollouts a task; `mean` is avg@k
    pass_at_k: dict[
        int, float
    ]  # chance that one of k is a success, for k = 1, 2, 4, ...; only for 0/1 rewards
    pass_all_k: dict[int, float]  # chance that all of k are
    num_tasks: int
    num_failed: int
    num_truncated: int
    completion_tokens: float  # mean
    time_s: float
    version: int = 0  # loaded when it began
    versions: tuple[int, int] | None = (
        None  # oldest and newest that tokens came from, where the engine says so
    )


def overall(scores: Sequence[Score], mode: str) -> float | None:
    """Mean over environments of one way of playing; None where it was not played."""
    means = [score.mean for score in scores if score.mode == mode]
    return float(np.mean(means)) if means else None


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is a success: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374, equation 1. Differs: exact integers.
    """
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def pass_all_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased chance that all of k samples are successes: C(c, k) / C(n, k)."""
    return comb(num_solved, k) / comb(num_samples, k)


def _at_k(groups: Sequence[Group], k: int, estimate: Callable[[int, int, int], float]) -> dict[int, float]:
    """Mean over tasks by powers of two up to k; a task with too many failed rollouts is left out of a mean."""
    counts = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts if is_counted(rollout)]
        counts.append((len(rewards), sum(reward == 1.0 for reward in rewards)))
    sizes = [2**i for i in range(k.bit_length()) if 2**i <= k]
    estimates = {size: [estimate(n, c, size) for n, c in counts if n >= size] for size in sizes}
    return {size: float(np.mean(values)) for size, values in estimates.items() if values}


async def write_samples(
    path: Path, groups: Sequence[Group], renderer: Renderer, mode: str, version: int
) -> None:
    """A line a rollout: what was asked, what was said, what it earned. Whole or not at all.

    Rollouts of the training run go on between two groups.
    """
    with _written(path) as file:
        for group in groups:
            for rollout in group.rollouts:
                line = {
                    "version": version,
                    "env": rollout.task.env,
                    "mode": mode,
                    "task_id": rollout.task.task_id,
                    "member": rollout.member,
                    "reward": rollout.reward,
                    "status": str(rollout.status),
                    "error": rollout.error,
                    "metrics": rollout.metrics,
                    "num_turns": rollout.num_turns,
                    "num_tokens": rollout.num_sampled_tokens,
                    "branches": [_texts(branch, renderer) for branch in rollout.branches],
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            await asyncio.sleep(0)


async def write_own_samples(
    path: Path,
    name: str,
    entry: Mapping[str, Any],
    renderer: Renderer,
    version: int,
    task_ids: Mapping[int | None, str],
) -> None:
    """As `write_samples`, of what a user's eval function gave for a data set.

    task_ids: by group_index, where the samples are of held-out tasks.
    """
    samples, rewards = entry["samples"], entry["rewards"]
    members: Counter[int | None] = Counter()
    with _written(path) as file:
        for index, sample in enumerate(samples):
            start = len(sample.tokens) - sample.response_length
            texts = {"prompt": sample.prompt, "reply": sample.response}
            if sample.tokens:
                ids = np.asarray(sample.tokens, np.int32)
                texts = {"prompt": renderer.decode(ids[:start]), "reply": renderer.decode(ids[start:])}
            line = {
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
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            await asyncio.sleep(0)


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """A file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        yield file
    part.replace(path)


def _texts(branch: Branch, renderer: Renderer) -> dict[str, str]:
    """The prompt up to the first sampled token, and everything after it."""
    start = int(branch.is_sampled.argmax()) if branch.is_sampled.any() else len(branch.token_ids)
    ids = branch.token_ids
    return {"prompt": renderer.decode(ids[:start]), "reply": renderer.decode(ids[start:])}


def write_results(path: Path, scores: Sequence[Score]) -> None:
    with _written(path) as file:
        file.write(json.dumps([dataclasses.asdict(score) for score in scores], indent=2) + "\n")


def recall(run_dir: RunDir, version: int) -> dict[str, float] | None:
    """Mean rewards of an eval that was done, by way of playing; None where there was none."""
    path = run_dir.eval_results(version)
    if not path.exists():
        return None
    rows = json.loads(path.read_text())
    modes = {row["mode"] for row in rows}
    return {mode: float(np.mean([row["mean"] for row in rows if row["mode"] == mode])) for mode in modes}


def score_of(env: str, mode: str, k: int, groups: Sequence[Group], time_s: float) -> Score:
    """What these groups say.

    Raises: the error that says who must act, when no rollout succeeded.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counted = [rollout for rollout in rollouts if is_counted(rollout)]
    if rollouts and not counted:
        cause = rollouts[-1].error or "unknown"
        raise kind_of(cause)(f"eval of {env}: none of {len(rollouts)} rollouts succeeded; the last: {cause}")
    if num_failed := len(rollouts) - len(counted):
        cause = next(rollout.error for rollout in rollouts if rollout.error)
        logger.warning(
            "eval of %s: %d of %d rollouts failed and are left out; such as: %s",
            env,
            num_failed,
            len(rollouts),
            cause,
        )
    is_binary = all(rollout.reward in (0.0, 1.0) for rollout in counted)
    versions = [s.version for r in counted for branch in r.branches for s in branch.versions]
    return Score(
        env=env,
        mode=mode,
        mean=float(np.mean([rollout.reward for rollout in counted])),
        k=k,
        pass_at_k=_at_k(groups, k, pass_at_k) if is_binary and k > 1 else {},
        pass_all_k=_at_k(groups, k, pass_all_k) if is_binary and k > 1 else {},
        num_tasks=len(groups),
        num_failed=num_failed,
        num_truncated=sum(rollout.status is RolloutStatus.TRUNCATED for rollout in counted),
        completion_tokens=float(np.mean([rollout.num_sampled_tokens for rollout in counted])),
        time_s=time_s,
        versions=(min(versions), max(versions)) if versions else None,
    )


def table(scores: Sequence[Score]) -> str:
    """Scores as aligned text, one line an environment and way of playing."""
    sizes = sorted({k for score in scores for k in score.pass_at_k if k > 1})
    passes = [f"pass@{k}" for k in sizes]
    rows = [("environment", "mode", "k", "avg@k", *passes, "tasks", "failed", "truncated", "tokens", "time")]
    for score in scores:
        passed = [f"{score.pass_at_k[k]:.3f}" if k in score.pass_at_k else "" for k in sizes]
        counts = (str(score.num_tasks), str(score.num_failed), str(score.num_truncated))
        length, time_s = f"{score.completion_tokens:.1f}", f"{score.time_s:.1f}s"
        rows.append(
            (score.env, score.mode, str(score.k), f"{score.mean:.3f}", *passed, *counts, length, time_s)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
