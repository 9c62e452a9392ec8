"""A job of several replicas of inference: which losses it survives, and the job that waits for a lost node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stretto.base.paths import RunDir
from stretto.launch.plan.nodes import FIRST_NODE_VAR, find_node_rank
from stretto.launch.slurm.steps import Job

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=r
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --output=OUT/job.log
#SBATCH --gres=gpu:8
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR2@600
#SBATCH --nodelist=a,b
#SBATCH --constraint=h200
set -eu
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """One node of the trainer, two replicas of two nodes."""
    run = RunDir(tmp_path / "r")
    run.slurm.mkdir(parents=True)
    (run.slurm / "job.sh").write_text(SCRIPT)
    setup = ["bash", "-c", 'echo "it\'s here"; exec "$@"', str(run.slurm / "rl.json")]
    return Job("7", ["a", "b", "c", "d", "e"], 1, 2, setup, ["stretto", "rl"], run)


def test_a_replica_is_there_as_long_as_none_of_its_nodes_is_lost(job: Job) -> None:
    assert job.has_replica
    job.waited_for = {"c"}
    assert job.has_replica, "d and e"
    job.waited_for = {"c", "d"}
    assert not job.has_replica


def test_the_job_that_waits_for_a_node_has_the_options_of_the_first_but_one_node(job: Job) -> None:
    text = job.stand_in("d")
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert [line.removeprefix("#SBATCH --") for line in options] == [
        "ntasks-per-node=1",
        "output=OUT/job.log",
        "gres=gpu:8",
        "constraint=h200",
        "nodes=1",
        "nodelist=d",
        "job-name=node-of-7",
        "no-requeue",
    ]
    assert "export STRETTO_JOB=7 STRETTO_FIRST_NODE=3\n" in text and "--stand-in a srun " in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_node_counts_from_the_first_one_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["a", "b", "c", "d"]
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert find_node_rank(None, hosts, "deployment.node_rank") == 1
    monkeypatch.setenv(FIRST_NODE_VAR, "2")
    assert find_node_rank(None, hosts, "deployment.node_rank") == 3
