"""`sft` that starts its own ranks: trains like one, ends in good order, and says which rank failed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from runs import start, toml, until, wait

from stretto.base.paths import RunDir
from stretto.base.status import SUPERVISED_VAR
from stretto.models import hub

SETTINGS = {
    "max_steps": 4,
    "batch_size": 16,
    "seq_len": 128,
    "num_threads": 1,
    "model": {"scratch": {"hidden_size": 16, "num_layers": 1}},
    "data": {"type": "environment", "id": "sort-letters", "num_rows": 64},
    "optim": {"lr": 1e-3},
}


def start_sft(directory: Path, *words: str, name: str = "run", **settings) -> subprocess.Popen[str]:
    path = directory / f"{name}.toml"
    path.write_text(toml(SETTINGS | {"output_dir": directory, "run": {"name": name}} | settings))
    return start("sft", ["@", str(path), *words], directory)


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, in their order."""
    ranks = {}
    for pid in map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()):
        for line in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
            if line.startswith("RANK="):
                ranks[int(line.removeprefix("RANK="))] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def test_two_ranks_train_like_one(tmp_path):
    ended = {"one": wait(start_sft(tmp_path, name="one"))}
    ended["two"] = wait(start_sft(tmp_path, "--trainer-gpu-ids", "0,1", name="two"))
    deployment = {"type": "single_node", "num_train_gpus": 2}
    ended["again"] = wait(start_sft(tmp_path, "--resume.dir", "one", name="again", deployment=deployment))
    for name, (code, output) in ended.items():
        assert code == 0, (name, output)
    assert "sft_0 | step 4/4" in ended["two"][1] and "sft_1 |" not in ended["two"][1]
    assert "2 ranks" in RunDir(tmp_path / "two").log("sft_1").read_text()
    assert "resumed from step 4 of" in ended["again"][1]
    one, *others = (hub.load_model(RunDir(tmp_path / name).latest_weights, dtype=torch.float32) for name in ended)
    for other in others:
        for (name, ours), theirs in zip(other.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_finishes_the_step_and_saves(tmp_path, number):
    run = RunDir(tmp_path / "run")
    popen = start_sft(tmp_path, "--trainer-gpu-ids", "0,1", max_steps=100_000, ckpt={"interval": 2})
    until(lambda: run.latest_complete_checkpoint() is not None, popen, "a checkpoint")
    popen.send_signal(number)
    code, output = wait(popen)
    assert code == 0, output
    saved = run.latest_complete_checkpoint()
    assert f"stopped at step {saved} of 100000" in output
    code, output = wait(start_sft(tmp_path, "--resume", max_steps=saved + 1))
    assert code == 0 and f"resumed from step {saved}" in output, output


def test_a_rank_that_is_killed_is_named_and_takes_the_others_with_it(tmp_path):
    run = RunDir(tmp_path / "run")
    popen = start_sft(tmp_path, "--trainer-gpu-ids", "0,1", max_steps=100_000, ckpt={"interval": 2})
    until(lambda: run.latest_complete_checkpoint() is not None, popen, "a checkpoint")
    ranks = ranks_of(popen)
    os.kill(ranks[1], signal.SIGKILL)
    code, output = wait(popen)
    assert code == 1 and "FAILED: sft_1" in output and "killed by SIGKILL" in output, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    _, _, command = output.partition(f"continue from step {run.latest_complete_checkpoint()}:\n")
    assert f"@ {tmp_path}/run.toml --trainer-gpu-ids 0,1 --resume --max-steps 100000" in command, output


def test_what_is_wrong_with_the_data_is_reported(tmp_path):
    data = {"type": "file", "name": str(tmp_path / "nowhere.jsonl")}
    code, output = wait(start_sft(tmp_path, "--trainer-gpu-ids", "0,1", data=data))
    assert code == 2 and output.count("nowhere.jsonl") == 1 and "FAILED" not in output, output


def test_ranks_of_somebody_else_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.delenv(SUPERVISED_VAR, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, output = wait(start_sft(tmp_path, "--trainer-gpu-ids", "0,1"))
    assert code == 2 and "ask for 2 ranks, but torchrun has started 4 (WORLD_SIZE)" in output
    assert not (tmp_path / "run").exists()
