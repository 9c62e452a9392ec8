"""`stretto bisect`: the commit, and the changes of a configuration, that make a recorded step come out differently."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from runs import rl, start, untrained_model, wait

pytest.importorskip("stretto_review")
pytestmark = pytest.mark.slow

LOSS = """
from stretto.algorithms.custom import LossInputs, LossOutputs


def loss(inputs: LossInputs) -> LossOutputs:
    ratio = (inputs.logprobs - inputs.behavior_logprobs).exp()
    return LossOutputs(-{scale} * ratio * inputs.advantages)
"""


def git(directory: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(directory), *named, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_commit_and_changes_are_found(tmp_path: Path) -> None:
    model = untrained_model(tmp_path / "model")
    project = tmp_path / "project"
    project.mkdir()
    git(project, "init", "--quiet")
    commits = []
    for number in range(4):
        (project / "my_loss.py").write_text(LOSS.format(scale=1.0 if number < 2 else 0.5))
        (project / "notes.txt").write_text(f"{number}")
        git(project, "add", ".")
        git(project, "commit", "--quiet", "-m", f"change {number}")
        commits.append(git(project, "rev-parse", "HEAD"))
    git(project, "checkout", "--quiet", commits[0])
    settings = {
        "max_steps": 2,
        "seq_len": 256,
        "model": {"name": str(model)},
        "ckpt": {"interval": 1},
        "orchestrator": {
            "batch_size": 16,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 8}},
            "env": [{"id": "envs:Delayed"}],
        },
        "trainer": {"optim": {"lr": 1e-3}, "loss": {"type": "custom", "import_path": "my_loss:loss"}},
    }
    run = rl(project, settings)
    rl(project, settings, "--run.name", "other", "--trainer.optim.lr", "2e-3", "--trainer.optim.eps", "1e-7")
    git(project, "checkout", "--quiet", commits[-1])
    bundle = tmp_path / "step_2.bundle"
    code, output = wait(start("replay", [str(run.run.path), "--bundle", "2", "--out", str(bundle)], project))
    assert code == 0, output

    before = git(project, "status", "--short")
    code, output = wait(start("bisect", [str(bundle), "--commits", f"{commits[0]}..HEAD"], project))
    assert code == 0 and "THE DIFFERENCE COMES FROM" in output, output
    assert "change 2" in output.split("COMES FROM")[1] and commits[2] in output, output
    assert git(project, "worktree", "list").count("\n") == 0 and git(project, "status", "--short") == before
    code, output = wait(start("bisect", [str(bundle), "--commits", f"{commits[0]}..{commits[1]}"], project))
    assert code == 2 and f"at {commits[1]} there is NO DIFFERENCE" in output, output

    git(project, "checkout", "--quiet", commits[0])
    code, output = wait(start("bisect", [str(bundle), "--changes-of", str(project / "other")], project))
    assert code == 0 and "--trainer.optim.lr 0.002" in output.split("COMES FROM")[1], output
    words = ["--ckpt.keep-last", "7", "--trainer.optim.weight-decay", "0.5", "--log.level", "debug"]
    code, output = wait(start("bisect", [str(bundle), *words], project))
    assert code == 0 and output.split("COMES FROM")[1].split() == ["--trainer.optim.weight-decay", "0.5"], output
