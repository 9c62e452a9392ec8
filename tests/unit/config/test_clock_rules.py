"""What `deterministic` refuses and fills in."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.config import ENV, complaints

from stretto.config.load import load
from stretto.config.root import RLConfig


@pytest.mark.parametrize(
    "key",
    [
        'orchestrator.batch_order = "finished"',
        "orchestrator.token_batch_size = 100\norchestrator.batch_size = 128",
        "orchestrator.oversampling_factor = 2.0",
    ],
)
def test_what_goes_by_who_is_done_first_is_refused(tmp_path: Path, key: str) -> None:
    said = complaints(tmp_path, f"deterministic = true\n{key}\n{ENV}", "")
    assert any(key.partition(" ")[0] in line and "done first, and deterministic = true" in line for line in said), said


def test_an_interval_without_the_switch_does_nothing(tmp_path: Path) -> None:
    [line] = complaints(tmp_path, f"orchestrator.sync_interval = 5\n{ENV}", "")
    assert "orchestrator.sync_interval = 5 does nothing with deterministic = false" in line


@pytest.mark.parametrize("given, interval, keep", [("", 20, 2), ("ckpt.interval = 7\n", 7, None)])
def test_checkpoints_are_due_by_steps_and_batches_wait_for_them(
    tmp_path: Path, given: str, interval: int, keep: int | None
) -> None:
    (tmp_path / "a.toml").write_text(f"deterministic = true\n{given}{ENV}")
    cfg = load(RLConfig, ["@", str(tmp_path / "a.toml")])
    assert cfg.ckpt is not None and (cfg.ckpt.interval, cfg.ckpt.keep_last) == (interval, keep)
    assert cfg.orchestrator_config().sync_interval == interval
    assert cfg.orchestrator_config().deterministic and cfg.trainer_config().is_deterministic
