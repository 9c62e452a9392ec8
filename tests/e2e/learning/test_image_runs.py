"""Each family with images, from nothing to `rl` on a CPU: the tower is trained, the embedded engine sees pictures."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import rl

from stretto.families.table import VISION_FAMILIES
from stretto.ledger.audit import audit

NUM_STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_family_with_images_trains_on_what_it_has_seen(
    family: str, warmed_up: Callable[..., Path], tmp_path: Path
) -> None:
    """The trainer finds the log-probabilities that the engine has sampled with, also after updates of the tower."""
    vlm = {"freeze_vision_encoder": False}
    scratch = {"family": family, "moe_intermediate_size": 48, "num_layers": 4, "vision": {}}
    tasks = {"type": "environment", "id": "count-shapes", "num_rows": 2048}
    model = warmed_up(max_steps=40, model={"scratch": scratch, "vlm": vlm}, data=tasks)
    settings = {
        "max_steps": NUM_STEPS,
        "seq_len": 1024,
        "model": {"name": model, "vlm": vlm},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "max_async_level": 0,
            "train": {"sampling": {"max_completion_tokens": 4}},
            "env": [{"id": "count-shapes"}],
            "eval": {"interval": NUM_STEPS, "num_examples": 8, "log_samples": 2},
        },
        "trainer": {"optim": {"lr": 1e-3}, "enable_router_replay": family.endswith("moe")},
    }
    ended = rl(tmp_path, settings)
    assert len(ended.column("reward/mean")) == NUM_STEPS
    assert all(0 <= value < 1e-6 for value in ended.column("mismatch_kl/max"))
    assert all(norm > 0 for norm in ended.column("optim/grad_norm", "trainer"))
    with sqlite3.connect(ended.run.ledger) as db:
        assert db.execute("SELECT count(*) FROM images").fetchone()[0] >= NUM_STEPS * 8
    assert audit(ended.run, payloads=True) == []
    logged = list((ended.run.path / "metrics" / "images").glob("*.png"))
    assert logged, "evals log the pictures"
