"""The Python interface, used as a script does: train, then look at the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import forked
from runs import DEADLINE_S, untrained_model

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
