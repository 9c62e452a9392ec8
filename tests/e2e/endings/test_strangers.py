"""What somebody else starts beside a live run does it no harm."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ports import free_ports
from runs import start, start_rl, until, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.base.secret import SECRET_VAR
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics


def steps_of(run: RunDir) -> set[int]:
    path = run.metrics("orchestrator")
    return {row["step"] for row in read_metrics(path)} if path.exists() else set()


@pytest.mark.slow
def test_a_second_trainer_is_refused_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained_model(tmp_path)
    control, rollouts, http = free_ports(3)
    settings = {
        "max_steps": 5000,
        "seq_len": 256,
        "model": {"name": str(model)},
        "control": {"port": control},
        "rollout_transport": {"port": rollouts},
        "inference": {"device": "cpu", "server": {"port": http}},
        "orchestrator": {
            "batch_size": 16,
            "group_size": 4,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }
    run = RunDir(tmp_path / "run")
    live = start_rl(tmp_path, settings)
    try:
        until(lambda: bool(steps_of(run)), live, "its first step")
        words = ["@", str(run.config("run"))]
        code, output = wait(start("trainer", words, tmp_path))
        assert code == 2 and f"in use by process {live.pid}" in output, output
        # As on another machine, where the run directory is not seen.
        monkeypatch.setenv(SECRET_VAR, run.secret.read_text().strip())
        code, output = wait(start("trainer", [*words, "--output-dir", str(tmp_path / "away")], tmp_path))
        assert code == 1 and "rank 0 is taken by trainer rank 0 (pid" in output, output
        refused_at = max(steps_of(run))
        until(lambda: max(steps_of(run)) > refused_at + 5, live, "steps after the refusal")
        live.send_signal(signal.SIGINT)
        code, output = wait(live)
        assert code == 0, output
    finally:
        live.kill()
    assert audit(run) == []
    secret = run.secret.read_text().strip()
    said = [path for path in run.path.rglob("*") if path.is_file() and path != run.secret]
    assert not [path for path in said if secret.encode() in path.read_bytes()]
