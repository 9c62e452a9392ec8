"""The Python interface, used as a script does: train, look at the run, be killed, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import forked
from runs import DEADLINE_S, start, untrained_model, wait

from stretto.base.files import holder
from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto_python.run import Run

SCRIPT = """
import sys
from pathlib import Path

import stretto
from stretto.base.errors import ConfigError

config = {
    "max_steps": 2,
    "seq_len": 128,
    "run": {"name": "run"},
    "model": {"name": Path(sys.argv[1])},
    "orchestrator": {
        "batch_size": 8,
        "group_size": 4,
        "filter_zero_advantages": False,
        "train": {"sampling": {"max_completion_tokens": 6}},
        "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
    },
}
try:
    stretto.rl({**config, "orchestrator": {"groop_size": 3}})
except ConfigError as error:
    assert "orchestrator.groop_size" in str(error), error
else:
    raise AssertionError("groop_size")
run = stretto.rl(config, "--output-dir", "out")
assert run.path.resolve() == Path("out/run").resolve(), run.path
rows = run.rollouts(step=2)
assert len(rows) == 8
for row in rows:
    asked = row["task_id"] and row["prompt"]
    assert "user" in asked and row["num_sampled_tokens"] <= 6
assert run.config["seq_len"] == 128 and [row["step"] for row in run.metrics()][-1] == 2
print("looked at")
"""


OWN = """
import os
import signal
import sys
import time

import stretto
from stretto.envs.base import SingleTurnEnv, TaskSource
from stretto.records.rollout import Task

WORDS = ["ab", "cd", "ef", "gh"]


class Echo(SingleTurnEnv):
    def __init__(self, bonus=0.0):
        self.name, self.bonus = "echo", bonus

    def tasks(self, split):
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": WORDS[i % 4]}))

    def prompt(self, task):
        return task.data["word"]

    def score(self, task, text):
        return len(set(text) & set(task.data["word"])) + len(text) / 64 + self.bonus


run = stretto.rl(
    {"orchestrator.filter_zero_advantages": False, "ckpt.interval": 1, "output_dir": "out"},
    model=sys.argv[1], env=Echo(bonus=0.5), steps=500, lr=1e-4, batch_size=8, group_size=4, max_completion_tokens=6,
    seq_len=128, name="mine", wait=False,
)
while not any(row["step"] >= 2 for row in run.metrics()):
    time.sleep(0.1)
assert run.is_running and "running" == run.state
assert min(row["reward"] for row in run.rollouts(limit=4)) >= 0.5
print("killed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_ends_with_its_script_and_goes_on_from_a_shell_with_what_the_script_defined(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN)
    words = [sys.executable, "script.py", str(untrained_model(tmp_path / "model"))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL and done.stdout.endswith("killed\n"), done.stdout + done.stderr
    run = RunDir(tmp_path / "out" / "mine")
    deadline = time.monotonic() + DEADLINE_S
    while holder(run.lock) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    step = run.latest_complete_checkpoint()
    assert holder(run.lock) is None and step is not None and step < 500
    assert "pickle" in (run.given / "code.py").read_text()
    words = ["@", "out/mine/given/config.json", "--resume", "--max-steps", str(step + 1)]
    code, output = wait(start("rl", words, tmp_path))
    assert code == 0 and "resumed from step" in output, output
    assert audit(run) == [] and {row["env"] for row in Run(run.path).rollouts()} == {"echo"}


def test_a_script_trains_and_reads_its_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    popen = forked.Popen(
        [sys.executable, "script.py", str(untrained_model(tmp_path / "model"))],
        cwd=tmp_path,
        env=os.environ | {forked.NUM_SPARES_VAR: "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = popen.communicate(timeout=DEADLINE_S)
    assert popen.returncode == 0, output
    assert "step 2/2" in output and output.endswith("looked at\n"), output
