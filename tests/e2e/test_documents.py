"""What the documents show first works as it stands: an environment of one's own, without another setting."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from runs import start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "environments.md").read_text()


def test_the_first_environment_of_the_page_trains_under_a_name_that_is_made_for_it(tmp_path: Path) -> None:
    [code, *_], [table, *_] = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("python", "toml"))
    (tmp_path / "my_envs.py").write_text(code)
    model = untrained_model(tmp_path / "model")
    (tmp_path / "rl.toml").write_text(f'max_steps = 2\nseq_len = 256\n[model]\nname = "{model}"\n{table}')
    code_, output = wait(start("rl", ["@", "rl.toml"], tmp_path))
    assert code_ == 0, output
    run = RunDir(tmp_path / "outputs" / "Shout-model")
    assert f"run {run.path.relative_to(tmp_path)}" in output and audit(run) == []


def test_the_task_of_the_first_hour_is_learned_and_looked_at(sorter: Path, tmp_path: Path) -> None:
    page = (DOCS / "first_hour.md").read_text()
    code, script, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    [table] = re.findall(r"```toml\n(.*?)```", page, re.S)
    (tmp_path / "my_envs.py").write_text(code)
    (tmp_path / "vowels.toml").write_text(table)
    model = tmp_path / "outputs" / "sort-letters-sft" / "weights" / "latest"
    model.parent.mkdir(parents=True)
    model.symlink_to(sorter)
    code_, output = wait(start("rl", ["@", "vowels.toml"], tmp_path))
    assert code_ == 0, output
    (tmp_path / "look.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "look.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and float(done.stdout.splitlines()[0]) > 0.8, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 4 and ": improved" in output


def test_a_new_project_learns(tmp_path: Path) -> None:
    code, output = wait(start("init", ["mine"], tmp_path))
    assert code == 0 and "rl @ rl.toml" in output
    for verb in ("sft", "rl"):
        code, output = wait(start(verb, ["@", f"{verb}.toml"], tmp_path / "mine"))
        assert code == 0, output
    summary = json.loads((tmp_path / "mine" / "outputs" / "vowels" / "summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.3, summary
