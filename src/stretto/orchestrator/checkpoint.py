"""The orchestrator's half of a checkpoint, and the marker that closes both halves.

The trainer writes its half of RUN/checkpoints/step_N first and says so. A checkpoint exists once its
COMPLETE file does, which is written last and after everything else has reached the disk. Which tasks were
drawn and which rollouts are left to train is not in here: the ledger knows. What is here is what the end of
a run tells about all of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import DataError
from stretto.base.paths import RunDir


class Progress(msgspec.Struct, kw_only=True):
    """What a run has to tell about itself up to `step`; goes on over restarts."""

    step: int = 0  # trained
    num_rollouts: int = 0  # trained
    num_tokens: int = 0  # sampled and trained
    train_s: float = 0.0  # from the first draw of each life of the run to its latest trained step
    wall_s: float = 0.0
    mismatch_kl_max: float | None = None
    sampled: dict[int, float] = {}  # version -> mean held-out reward
    greedy: dict[int, float] = {}
    num_resumes: int = 0
    curriculum: dict[str, dict[str, float]] = {}  # environment -> task id -> running reward, as of `step`
    baselines: dict[str, dict[str, float]] = {}  # environment -> agent -> running reward, as of `step`
    data: dict[str, int] = {}  # environment -> fingerprint of the files its tasks are made from
    ratios: dict[str, float] = {}  # environment -> share of the draws
    next_draw: int = 0  # the first draw number that was not used when `step` was trained
    open_draws: list[int] = []  # draws below it that were not yet trained or given up
    origin: str | None = None  # checkpoint of another run that this one began at
    first_step: int = 0  # its step


def begun_at(saved: Progress, data: Mapping[str, int | None], ratios: Mapping[str, float]) -> Progress:
    """What a new run takes over of another one's checkpoint; its figures begin anew.

    data, ratios: of the environments that are trained on now. Draws go on where they were if these are the
    same, and begin anew if not; running rewards are taken over of environments whose tasks are the same.
    """
    same = {name for name, found in data.items() if name in saved.ratios and saved.data.get(name) == found}
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


def save(run_dir: RunDir, progress: Progress) -> None:
    """Write orchestrator.json, then the marker.

    From here on the checkpoint of `progress.step` is complete.
    """
    directory = run_dir.checkpoint(progress.step)
    directory.mkdir(parents=True, exist_ok=True)
    _write(_path(run_dir, progress.step), msgspec.json.format(msgspec.json.encode(progress)))
    marker = {"step": progress.step, "time": time.time()}
    _write(run_dir.complete_marker(progress.step), json.dumps(marker).encode())


def is_there(run_dir: RunDir, step: int) -> bool:
    """Whether an orchestrator wrote a half of that checkpoint."""
    return _path(run_dir, step).exists()


def load(run_dir: RunDir, step: int) -> Progress:
    """What was told up to `step`.

    Raises: DataError when the checkpoint is not complete or its file is damaged.
    """
    path = _path(run_dir, step)
    if not run_dir.complete_marker(step).exists():
        raise DataError(f"checkpoint {path.parent} is not complete (no {run_dir.complete_marker(step).name})")
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError) as cause:
        raise DataError(f"{path}: {cause}; resume from another step with --resume.step") from cause
    if progress.step != step:
        raise DataError(f"{path} is of step {progress.step}, not {step}; it was moved or copied there")
    return progress


def _path(run_dir: RunDir, step: int) -> Path:
    return run_dir.checkpoint(step) / "orchestrator.json"


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and on disk when this returns."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def summary_of(progress: Progress, *, max_steps: int | None) -> dict[str, Any]:
    """summary.json: what a run came to."""

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
        "evals": {
            "sampled": {str(version): mean for version, mean in sorted(progress.sampled.items())},
            "greedy": {str(version): mean for version, mean in sorted(progress.greedy.items())},
        },
    }
