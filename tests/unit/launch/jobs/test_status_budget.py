"""`stretto status` says what a run has used of its budget."""

from __future__ import annotations

import json

from stretto.base.paths import RunDir
from stretto.launch.control import status
from stretto.monitors.file import MetricsFile


def test_status_shows_what_is_used_and_where_the_budget_would_end(tmp_path, capsys):
    run = RunDir(tmp_path)
    run.configs.mkdir()
    run.config("run").write_text(json.dumps({"max_steps": 100, "orchestrator": {}}))
    file = MetricsFile(run.metrics("orchestrator"))
    row = {"budget/hours": 0.5, "budget/tokens": 145_000.0, "budget/cost": 1.25}
    file.log(7, {"reward/mean": 0.1, **row, "budget/share": 0.25, "budget/last_step": 28.0})
    file.close()
    status([str(tmp_path)])
    text = "0.5 h, 145k trained tokens, cost 1.25; 25% of the budget, which would end with step 28"
    assert text in capsys.readouterr().out
    run.summary.write_text(json.dumps({"used": {"hours": 0.75, "tokens": 145_000, "cost": 1.875}}))
    status([str(tmp_path)])
    assert "0.75 h, 145k trained tokens, cost 1.875" in capsys.readouterr().out  # a later start without a step
