"""The orchestrator's half of a checkpoint, and the marker that completes both halves.

The trainer writes its half of RUN/checkpoints/step_N first and reports it. A checkpoint exists once its COMPLETE
file does, which is written last, after everything else is on disk. The ledger knows which tasks were drawn and which
rollouts can still be trained. This half has what a run's summary and its curricula need.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import DataError
from stretto.base.files import flush_parents, write_atomic
from stretto.base.paths import RunDir
from stretto.base.rundir import recovery_advice


class Progress(msgspec.Struct, kw_only=True):
    """A run's progress up to `step`, over all its incarnations."""

    step: int = 0  # trained
    num_rollouts: int = 0  # trained
    num_tokens: int = 0  # sampled and trained
    train_s: float = 0.0  # from each incarnation's first draw to its latest trained step
    wall_s: float = 0.0
    mismatch_kl_max: float | None = None
    sampled: dict[int, float] = {}  # version -> mean held-out reward
    greedy: dict[int, float] = {}
    num_resumes: int = 0
    curriculum: dict[str, dict[str, float]] = {}  # environment -> task id -> running reward, as of `step`
    baselines: dict[str, dict[str, float]] = {}  # environment -> agent -> running reward, as of `step`
    data: dict[str, int] = {}  # environment -> fingerprint of the files of its tasks
    ratios: dict[str, float] = {}  # environment -> share of the draws
    next_draw: int = 0  # the first draw number that was not used when `step` was trained
    open_draws: list[int] = []  # draws below it that were not yet trained or dropped
    origin: str | None = None  # checkpoint of another run from which this one started
    first_step: int = 0  # its step


def carry_over(saved: Progress, data: Mapping[str, int | None], ratios: Mapping[str, float]) -> Progress:
    """The progress of a new run from another run's checkpoint; its statistics start at 0.

    data, ratios: fingerprints and ratios of the environments that are trained on now. Draws continue if these are the
    same, otherwise they start at 0. Running rewards are kept for environments whose tasks are the same.
    """
    same = {name for name, now in data.items() if name in saved.ratios and saved.data.get(name) == now}
    is_same_mix = saved.ratios == ratios and len(same) == len(ratios)
    return Progress(
        step=saved.step,
        origin=saved.origin,
        first_step=saved.step,
        curriculum={env: rewards for env, rewards in saved.curriculum.items() if env in same},
        baselines={env: rewards for env, rewards in saved.baselines.items() if env in same},
        next_draw=saved.next_draw if is_same_mix else 0,
        open_draws=saved.open_draws if is_same_mix else [],
    )


def snapshot(progress: Progress) -> Progress:
    """A copy of the progress that later evals do not change.

    The states of pools and baselines, which may be large, are shared: both build a new one for every checkpoint.
    """
    return msgspec.structs.replace(progress, sampled=dict(progress.sampled), greedy=dict(progress.greedy))


def save(run_dir: RunDir, progress: Progress) -> None:
    """Write orchestrator.json, then the marker: the checkpoint of `progress.step` is complete."""
    directory = run_dir.checkpoint(progress.step)
    directory.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(progress))
    write_atomic(_path(run_dir, progress.step), content, is_durable=True)
    flush_parents(directory, run_dir.path.parent)
    marker = {"step": progress.step, "time": time.time()}
    write_atomic(run_dir.complete_marker(progress.step), json.dumps(marker).encode(), is_durable=True)


def has_orchestrator_half(run_dir: RunDir, step: int) -> bool:
    """Did an orchestrator write its half of that checkpoint?"""
    return _path(run_dir, step).exists()


def load(run_dir: RunDir, step: int) -> Progress:
    """Load the progress up to `step`.

    Raises: DataError if the checkpoint is not complete or its file is damaged.
    """
    path = _path(run_dir, step)
    if not run_dir.complete_marker(step).exists():
        raise DataError(f"checkpoint {path.parent} is not complete (no {run_dir.complete_marker(step).name})")
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError) as cause:
        raise DataError(f"{path}: {cause}; {recovery_advice(run_dir, step)}") from cause
    if progress.step != step:
        raise DataError(f"{path} is of step {progress.step}, not {step}; it was moved or copied there")
    return progress


def _path(run_dir: RunDir, step: int) -> Path:
    return run_dir.checkpoint(step) / "orchestrator.json"


def summary_of(
    progress: Progress, *, max_steps: int | None, stopped_because: str | None = None, verdict: str | None = None
) -> dict[str, Any]:
    """The contents of summary.json: the results of a run."""

    def first_and_last(means: dict[int, float]) -> tuple[float | None, float | None]:
        if not means:
            return None, None
        first = progress.first_step
        return means.get(first), means[max(means)] if max(means) > first else None

    reward_before, reward_after = first_and_last(progress.sampled)
    greedy_before, greedy_after = first_and_last(progress.greedy)
    return {
        "reward_before": reward_before,
        "reward_after": reward_after,
        "greedy_before": greedy_before,
        "greedy_after": greedy_after,
        "steps": progress.step,
        "max_steps": max_steps,
        "rollouts": progress.num_rollouts,
        "tokens": progress.num_tokens,
        "wall_s": progress.wall_s,
        "train_s": progress.train_s,
        "tokens_per_s": progress.num_tokens / progress.train_s if progress.train_s else None,
        "mismatch_kl_max": progress.mismatch_kl_max,
        "resumed": progress.num_resumes > 0,
        "origin": progress.origin,
        "stopped_because": stopped_because,
        "verdict": verdict,
        "evals": {
            "sampled": {str(version): mean for version, mean in sorted(progress.sampled.items())},
            "greedy": {str(version): mean for version, mean in sorted(progress.greedy.items())},
        },
    }
