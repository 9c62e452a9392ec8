"""Programs started by torchrun: after a preemption all ranks stop after the same step, which is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port

import stretto
from stretto.base.paths import RunDir
from stretto.base.status import SUPERVISED_VAR, stop_signals

SFT = Path(stretto.__file__).parent / "trainer" / "sft.py"
TOML = """
max_steps = {max_steps}
batch_size = 16
seq_len = 128
num_threads = 1
output_dir = "{directory}"
[run]
name = "run"
[model]
{model}
[model.scratch]
hidden_size = 16
num_layers = 1
[data]
type = "environment"
id = "sort-letters"
num_rows = 64
[ckpt]
interval = 2
keep_last = 2
"""
DEADLINE_S = 120.0


def torchrun(directory: Path, *words: str, max_steps: int, model: str = "", num_ranks: int = 2):
    toml = directory / "sft.toml"
    toml.write_text(TOML.format(directory=directory, max_steps=max_steps, model=model))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    # torchrun itself never removes its logs; by default they are in the directory of temporary files.
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--log-dir", str(directory / "torchrun")]
    command += [str(SFT), "@", str(toml), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_preempted_sft_saves_and_resumes_on_another_mesh(tmp_path):
    run = RunDir(tmp_path / "run")
    ranks = torchrun(tmp_path, max_steps=100_000)
    deadline = time.monotonic() + DEADLINE_S
    while run.latest_complete_checkpoint() is None:
        assert ranks.poll() is None and time.monotonic() < deadline, ranks.communicate()[0]
        time.sleep(0.1)
    ranks.send_signal(signal.SIGTERM)
    output, _ = ranks.communicate(timeout=DEADLINE_S)
    saved = run.latest_complete_checkpoint()
    assert f"stopped at step {saved} of 100000" in output
    again = torchrun(tmp_path, "--resume", max_steps=saved + 2, model="tp = 2")
    output, _ = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, output
    assert f"resumed from step {saved}" in output and run.complete_checkpoints()[-1] == saved + 2


def test_a_launchers_children_leave_sigterm_to_it(monkeypatch):
    monkeypatch.delenv(SUPERVISED_VAR, raising=False)
    assert signal.SIGTERM in stop_signals()
    monkeypatch.setenv(SUPERVISED_VAR, "1")
    assert stop_signals() == (signal.SIGINT,)
