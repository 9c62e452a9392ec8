"""Fine-tuning that evaluates on an environment as it goes: other processes, the same weights, nothing lost."""

from __future__ import annotations

import json
import os
import signal

import pytest
from runs import start, toml, until, wait

from stretto.base.paths import RunDir
from stretto.monitors.file import read_metrics


def settings(directory, **changes):
    return {
        "max_steps": 90,
        "seq_len": 2048,
        "num_threads": 1,
        "output_dir": directory,
        "run": {"name": "run"},
        "model": {"scratch": {"hidden_size": 64, "num_layers": 2}},
        "data": {"type": "environment", "id": "sort-letters", "args": {"num_letters": 3}, "num_rows": 4096},
        "optim": {"lr": 2e-3},
        "scheduler": {"type": "constant", "warmup_steps": 20},
        "eval": {
            "env": [{"id": "sort-letters", "args": {"num_letters": 3}}],
            "interval": 45,
            "num_examples": 64,
            "sampling": {"max_completion_tokens": 6},
        },
    } | changes


def sft(directory, **changes):
    (directory / "sft.toml").write_text(toml(settings(directory, **changes)))
    return start("sft", ["@", "sft.toml"], directory)


@pytest.mark.slow
def test_every_version_that_is_due_is_evaluated_and_scores_rise(tmp_path):
    code, output = wait(sft(tmp_path))
    assert code == 0, output
    run = RunDir(tmp_path / "run")
    evals = json.loads(run.summary.read_text())["evals"]
    assert list(evals) == ["0", "45", "90"]
    means = [evals[version]["sort-letters/sampled"] for version in evals]
    assert means[0] == 0 and means[-1] > 0.2
    rows = read_metrics(run.metrics("evals"))
    assert [row["step"] for row in rows if "eval/sort-letters/sampled/mean" in row] == [0, 45, 90]
    assert len((run.eval(90) / "sort-letters-sampled.jsonl").read_text().splitlines()) == 64
    assert "step 90: sort-letters/sampled" in output


def test_an_eval_that_dies_costs_no_training_and_is_reported_at_the_end(tmp_path):
    popen = sft(tmp_path, max_steps=60)
    run = RunDir(tmp_path / "run")
    log = run.log("evals")
    until(lambda: log.exists() and "started inference" in log.read_text(), popen, "engine of the evals")
    pid = next(int(word.split("=")[1]) for word in log.read_text().split() if word.startswith("pid="))
    os.kill(pid, signal.SIGKILL)
    code, output = wait(popen)
    assert code == 1
    assert "the process of the evals ended" in output and "the engine ended" in output
    assert run.latest_weights.exists() and run.complete_checkpoints() == [60]
    assert json.loads(run.summary.read_text())["steps"] == 60
    assert "Traceback" not in output


BROKEN = """
from stretto.envs.bundled.sort_letters import SortLetters


class Broken(SortLetters):
    def score(self, task, text):
        raise ValueError("the scorer is on strike")
"""


def test_an_environment_that_fails_costs_the_evals_and_nothing_else(tmp_path):
    (tmp_path / "broken_env.py").write_text(BROKEN)
    section = settings(tmp_path)["eval"]
    broken = {"id": "broken_env:Broken", "args": {"num_letters": 3}}
    code, output = wait(sft(tmp_path, max_steps=4, eval=section | {"env": [broken], "interval": 2, "num_examples": 4}))
    assert code == 0, output
    run = RunDir(tmp_path / "run")
    assert json.loads(run.summary.read_text())["evals"] == {}
    log = run.log("evals").read_text()
    assert "no eval of version 2" in log and "no eval of version 4" in log and "on strike" in log
    said = " ".join(line for line in output.splitlines() if "no eval of version" in line)
    assert all(str(version) in said for version in (0, 2, 4)) and f"{run.log('evals')} says why" in said
