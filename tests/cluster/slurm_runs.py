"""Runs that are submitted to a Slurm of slurm_cluster.py: `rl` on three nodes, `sft` on two."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster

from stretto.base.paths import RunDir
from stretto.monitors.file import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from runs import toml, untrained_model

STRETTO = (sys.executable, "-m", "stretto")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Submitted:
    """A run of some nodes: of `rl`, orchestrator and trainer, and two engines."""

    verb = "rl"
    lead = "orchestrator"

    def __init__(self, cluster: Cluster, directory: Path, max_steps: int, *words: str, **slurm: str) -> None:
        """slurm: further keys of [slurm]."""
        self.cluster = cluster
        self.directory = directory
        self.dir = RunDir(directory / "run")
        found = self.settings(max_steps)
        (directory / "run.toml").write_text(toml(found | {"slurm": found["slurm"] | slurm}))
        self.submit(*words)

    def settings(self, max_steps: int) -> dict[str, Any]:
        return settings(self.directory, untrained_model(self.directory / "model"), max_steps)

    def submit(self, *words: str) -> None:
        self.said = self.stretto(self.verb, "@", "run.toml", *words)
        found = re.search(r"job (\d+) is submitted", self.said)
        assert found, self.said
        self.job = found[1]

    def stretto(self, *words: str) -> str:
        return self.cluster.login(*STRETTO, *words, cwd=self.directory)

    def job_fields(self) -> dict[str, str]:
        return self.cluster.job(self.job)

    def nodes(self) -> list[str]:
        return self.cluster.login("scontrol", "show", "hostnames", self.job_fields()["NodeList"]).split()

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.dir.metrics(self.lead)) if row["step"] > 0]

    def until_saved(self, step: int) -> None:
        self.cluster.until(lambda: self.saved() >= step or self.has_ended(), f"a checkpoint of step {step}")
        assert self.saved() >= step, self.log()

    def until_back(self, host: str) -> None:
        """Until the orchestrator lets the engine of a host in again."""
        log = self.dir.log("orchestrator")
        self.cluster.until(
            lambda: re.search(rf"engine http://{host}:\d+ is back", log.read_text()) or self.has_ended(),
            f"the engine of {host} is back",
        )
        assert not self.has_ended(), self.log()

    def until_restarted(self) -> None:
        """Until the job runs for the second time."""
        self.cluster.until(
            lambda: (job := self.job_fields())["Restarts"] == "1" and job["JobState"] in ("RUNNING", *ENDED),
            "the job is started again",
        )
        assert not self.has_ended(), self.log()

    def stop(self) -> None:
        assert "finishes its step" in self.stretto("stop", str(self.dir))
        assert self.end()["JobState"] == "COMPLETED", self.log()

    def saved(self) -> int:
        return self.dir.latest_complete_checkpoint() or 0

    def has_ended(self) -> bool:
        return self.job_fields()["JobState"] in ENDED

    def end(self) -> dict[str, str]:
        self.cluster.until(self.has_ended, "the end of the job")
        return self.job_fields()

    def node_log(self, node: int, name: str) -> str:
        path = RunDir(self.directory / f"run-node-{node}").log(name)
        return path.read_text() if path.exists() else ""

    def log(self) -> str:
        path = self.dir.slurm / "job.log"
        return path.read_text() if path.exists() else "the job wrote no log"


class SubmittedSft(Submitted):
    """`sft` on two nodes, one rank on the CPU of each."""

    verb = lead = "sft"

    def settings(self, max_steps: int) -> dict[str, Any]:
        return sft_settings(self.directory, max_steps)


def settings(directory: Path, model: Path, max_steps: int) -> dict[str, Any]:
    """A run that takes a few seconds to begin and some milliseconds per step."""
    return {
        "output_dir": str(directory),
        "run": {"name": "run"},
        "max_steps": max_steps,
        "seq_len": 256,
        "model": {"name": str(model)},
        "ckpt": {"interval": 2},
        "deployment": {"type": "multi_node", "num_infer_replicas": 2, "gpus_per_node": 0},
        "inference": {"device": "cpu"},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
        "slurm": {"finish_within_s": 120},
    }


def sft_settings(directory: Path, max_steps: int) -> dict[str, Any]:
    """Ranks on two nodes."""
    return {
        "output_dir": str(directory),
        "run": {"name": "run"},
        "max_steps": max_steps,
        "batch_size": 8,
        "seq_len": 128,
        "num_threads": 1,
        "model": {"scratch": {"hidden_size": 16, "num_layers": 1}},
        "data": {"type": "environment", "id": "sort-letters", "num_rows": 64},
        "ckpt": {"interval": 20},
        "deployment": {"type": "multi_node", "num_train_nodes": 2, "gpus_per_node": 0},
        "slurm": {"finish_within_s": 120},
    }
