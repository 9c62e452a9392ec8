"""Students of a real teacher, whose engine `rl` starts: on their own rollouts, on the teacher's, on both in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import merged, rl, sorting

from stretto.ledger.audit import audit

NUM_STEPS = 40


@pytest.fixture(scope="module")
def teacher(warmed_up: Callable[..., Path]) -> Path:
    """Sorts nearly always."""
    return warmed_up(max_steps=300, seed=1, scheduler={"type": "constant", "warmup_steps": 20})


@pytest.fixture(scope="module")
def settings(sorter: Path) -> dict[str, Any]:
    """A synchronous run of a student that sorts one try in five."""
    settings = sorting(sorter, NUM_STEPS)
    settings["orchestrator"]["batch_size"] = 128
    return settings


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Means over the first and the last eighth of a run."""
    eighth = NUM_STEPS // 8
    return float(np.mean(values[:eighth])), float(np.mean(values[-eighth:]))


@pytest.mark.slow
def test_opd_pulls_the_student_to_its_teacher(settings: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    """The distance to the teacher falls, on the student's own rollouts."""
    taught = {"orchestrator": {"algo": {"type": "opd"}, "teacher": {"model": teacher}}}
    ended = rl(tmp_path, merged(settings, taught))
    assert "teacher on" in ended.output and (ended.run.logs / "teacher.log").exists()
    before, after = first_and_last(ended.column("teacher_kl/mean"))
    assert after < 0.8 * before, (before, after)
    assert max(ended.column("mismatch_kl/mean")) < 1e-6  # what was learned is what the student sampled
    assert audit(ended.run) == []


@pytest.mark.slow
def test_sft_copies_the_teacher(settings: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    """The rewards are the teacher's; the cross-entropy of its tokens falls, and the student's own reward rises."""
    copied = {
        "orchestrator": {
            "algo": {"type": "sft", "min_reward": 1.0},
            "teacher": {"model": teacher},
            "eval": {"num_examples": 128, "greedy": False},
        }
    }
    ended = rl(tmp_path, merged(settings, copied))
    before, after = first_and_last(ended.column("nll/mean"))
    assert after < 0.8 * before, (before, after)
    assert np.mean(ended.column("reward/mean")) > 0.7
    summary = ended.summary()
    assert summary["reward_after"] > summary["reward_before"] + 0.1
    assert "mismatch_kl/mean" not in ended.steps()[1]  # nothing of it was sampled by the student
    assert audit(ended.run) == []


@pytest.mark.slow
def test_rewards_teachers_and_demonstrations_share_a_run(
    settings: dict[str, Any], warmed_up: Callable[..., Path], tmp_path: Path
) -> None:
    teacher = warmed_up(max_steps=40, seed=1)  # another model than the student, good or not
    env = settings["orchestrator"]["env"][0]
    algos = {
        "rewarded": {"type": "grpo"},
        "taught": {"type": "opd"},
        "copied": {"type": "sft"},
        "shown": {"type": "opsd", "template": "{demonstration}"},
        "echoed": {"type": "echo", "user": 0.1},
    }
    envs = [env | {"name": name, "algo": algo} for name, algo in algos.items()]
    envs[-1] |= {"id": "alphabet-sort", "args": {}}
    mixed = {
        "max_steps": 3,
        "orchestrator": {
            "env": envs,
            "teacher": {"model": teacher},
            "max_async_level": 1,
            "batch_size": 80,
            "filter_zero_advantages": False,
        },
    }
    ended = rl(tmp_path, merged(settings, mixed))
    for row in ended.steps("trainer").values():
        assert {"teacher_kl/mean", "nll/mean", "mismatch_kl/mean"} <= row.keys()
        assert {f"mismatch_kl/{name}/mean" for name in ("rewarded", "taught", "shown")} <= row.keys()
        assert "mismatch_kl/copied/mean" not in row
    for row in ended.steps().values():
        assert {f"reward/{name}/mean" for name in algos} <= row.keys()
        assert {"env/taught/teacher_kl", "env/shown/teacher_kl"} <= row.keys()
    assert audit(ended.run) == []
