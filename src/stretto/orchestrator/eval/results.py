"""Results of evals: scores over rollouts, their files, the printed table, and a few conversations as examples."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import comb
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from stretto.base.files import atomic_path, read_rows
from stretto.base.paths import RunDir
from stretto.chat.render import Renderer
from stretto.orchestrator.eval_scores import EvalScore
from stretto.orchestrator.rollout.player import error_type_of
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus

logger = logging.getLogger(__name__)


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased probability that at least one of k samples succeeds: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374, equation 1. Differs: exact integers.
    """
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def pass_all_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased probability that all of k samples succeed: C(c, k) / C(n, k)."""
    return comb(num_solved, k) / comb(num_samples, k)


def _mean_at_k(groups: Sequence[Group], k: int, estimate: Callable[[int, int, int], float]) -> dict[int, float]:
    """Mean estimate over tasks for each power of two up to k.

    A task with fewer counted rollouts is not in that mean.
    """
    counts = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts if rollout.is_counted]
        counts.append((len(rewards), sum(reward == 1.0 for reward in rewards)))
    sizes = [2**i for i in range(k.bit_length()) if 2**i <= k]
    estimates = {size: [estimate(n, c, size) for n, c in counts if n >= size] for size in sizes}
    return {size: float(np.mean(values)) for size, values in estimates.items() if values}


async def write_samples(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines of JSON, one per rollout, atomically; other tasks of the event loop run between two lines."""
    with _open_atomic(path) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            await asyncio.sleep(0)


def sample_lines(groups: Sequence[Group], renderer: Renderer, mode: str, version: int) -> Iterator[dict[str, Any]]:
    """Prompt, reply, reward and more of each rollout."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        yield {
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
            "branches": [branch_texts(branch, renderer) for branch in rollout.branches],
        }


@contextmanager
def _open_atomic(path: Path) -> Iterator[TextIO]:
    """Open a file that appears only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, is_durable=True) as part, part.open("w") as file:
        yield file


def branch_texts(branch: Branch, renderer: Renderer) -> dict[str, str]:
    """The prompt up to the first sampled token, and the rest as the reply."""
    start = int(branch.is_sampled.argmax()) if branch.is_sampled.any() else len(branch.token_ids)
    ids = branch.token_ids
    return {"prompt": renderer.readable(ids[:start]), "reply": renderer.readable(ids[start:])}


def write_results(path: Path, scores: Sequence[EvalScore]) -> None:
    """Write the scores as JSON, atomically."""
    with _open_atomic(path) as file:
        file.write(json.dumps([dataclasses.asdict(score) for score in scores], indent=2) + "\n")


def load_mean_rewards(run_dir: RunDir, version: int) -> dict[str, float] | None:
    """Mean rewards by mode of an eval that was done; None if there is none, or if its file is damaged."""
    path = run_dir.eval_results(version)
    rows = read_rows(path, "mode", "mean")
    if rows is None:
        return None
    modes = {row["mode"] for row in rows}
    return {mode: float(np.mean([row["mean"] for row in rows if row["mode"] == mode])) for mode in modes}


def build_eval_score(env: str, mode: str, k: int, groups: Sequence[Group], time_s: float) -> EvalScore:
    """Build the score of these groups.

    Raises: StrettoError if no rollout succeeded; its class says who must act.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counted = [rollout for rollout in rollouts if rollout.is_counted]
    if rollouts and not counted:
        cause = rollouts[-1].error or "unknown"
        raise error_type_of(cause)(f"eval of {env}: none of {len(rollouts)} rollouts succeeded; the last: {cause}")
    if num_failed := len(rollouts) - len(counted):
        cause = next(rollout.error for rollout in rollouts if rollout.error)
        logger.warning(
            "eval of %s: %d of %d rollouts failed and are not in the means; the first: %s",
            env,
            num_failed,
            len(rollouts),
            cause,
        )
    is_binary = all(rollout.reward in (0.0, 1.0) for rollout in counted)
    versions = [s.version for r in counted for branch in r.branches for s in branch.versions]
    return EvalScore(
        env=env,
        mode=mode,
        mean=float(np.mean([rollout.reward for rollout in counted])),
        k=k,
        pass_at_k=_mean_at_k(groups, k, pass_at_k) if is_binary and k > 1 else {},
        pass_all_k=_mean_at_k(groups, k, pass_all_k) if is_binary and k > 1 else {},
        num_tasks=len(groups),
        num_failed=num_failed,
        num_truncated=sum(rollout.status is RolloutStatus.TRUNCATED for rollout in counted),
        completion_tokens=float(np.mean([rollout.num_sampled_tokens for rollout in counted])),
        time_s=time_s,
        metrics=_mean_metrics(counted),
        versions=(min(versions), max(versions)) if versions else None,
    )


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What environments report beside the reward, each the mean over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def format_table(scores: Sequence[EvalScore]) -> str:
    """Scores as aligned text, a line per environment and mode; below, what environments report beside the reward."""
    sizes = sorted({k for score in scores for k in score.pass_at_k if k > 1})
    passes = [f"pass@{k}" for k in sizes]
    rows = [("environment", "mode", "k", "avg@k", *passes, "tasks", "failed", "truncated", "tokens", "time")]
    for score in scores:
        passed = [f"{score.pass_at_k[k]:.3f}" if k in score.pass_at_k else "" for k in sizes]
        counts = (str(score.num_tasks), str(score.num_failed), str(score.num_truncated))
        length, time_s = f"{score.completion_tokens:.1f}", f"{score.time_s:.1f}s"
        rows.append((score.env, score.mode, str(score.k), f"{score.mean:.3f}", *passed, *counts, length, time_s))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for score in scores:
        if score.metrics:
            means = "  ".join(f"{name} {value:.4g}" for name, value in score.metrics.items())
            lines.append(f"{score.env}, {score.mode}: {means}")
    return "\n".join(lines)


PROMPT_CHARS = 300
REPLY_CHARS = 500


Row = dict[str, Any]
"""Text and numbers by column; `images` has PNG files, if one of the rows shows images."""


def choose(groups: Sequence[Group], count: int, seed: int) -> list[Rollout]:
    """The best rollout, the worst, then random others: at most `count` of those that did not fail."""
    played = [each for group in groups for each in group.rollouts if each.is_counted and each.branches]
    if not played:
        return []
    best, worst = max(played, key=lambda each: each.reward), min(played, key=lambda each: each.reward)
    extremes = [best] if worst is best else [best, worst]
    others = [each for each in played if each is not best and each is not worst]
    num_others = min(len(others), max(0, count - len(extremes)))
    return [*extremes, *random.Random(seed).sample(others, num_others)][:count]


def example_rows(groups: Sequence[Group], renderer: Renderer, mode: str, *, version: int, count: int) -> list[Row]:
    """Chosen conversations as rows of shortened text; of several branches the first is shown."""
    rows: list[Row] = []
    chosen = choose(groups, count, seed=version)
    has_images = any(rollout.branches[0].images for rollout in chosen)
    for rollout in chosen:
        texts = branch_texts(rollout.branches[0], renderer)
        rows.append(
            {
                "version": version,
                "env": rollout.task.env,
                "mode": mode,
                "task": rollout.task.task_id,
                "reward": rollout.reward,
                "prompt": shortened(texts["prompt"], PROMPT_CHARS),
                "reply": shortened(texts["reply"], REPLY_CHARS),
            }
        )
        if has_images:
            rows[-1]["images"] = renderer.pictures(rollout.branches[0].images)
    return rows


def shortened(text: str, num_chars: int) -> str:
    """The text, without its middle if it is longer than num_chars."""
    if len(text) <= num_chars:
        return text
    half = (num_chars - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def log_rows(rows: Sequence[Row]) -> None:
    """One line of the log per conversation; line breaks are written as \\n."""
    for row in rows:
        text = f"{row['prompt']} ▶ {row['reply']}".replace("\n", "\\n")
        logger.info(
            "version %s, %s %s, %s, reward %.3f: %s",
            row["version"], row["env"], row["task"], row["mode"], row["reward"], text,
        )  # fmt: skip
