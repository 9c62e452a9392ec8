"""Runs that are submitted to a Slurm of slurm_cluster.py: `rl` on three nodes, `sft` on two."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cluster_runs import STRETTO, ClusterRun, rl_settings, sft_settings
from slurm_cluster import Cluster

from stretto.base.paths import RunDir

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Submitted(ClusterRun):
    """A run of some nodes: of `rl`, orchestrator and trainer, and two engines."""

    section = "slurm"

    def __init__(
        self, cluster: Cluster, directory: Path, max_steps: int, *words: str, verb: str = "rl", **slurm: str
    ) -> None:
        """slurm: further keys of [slurm]."""
        settings = rl_settings if verb == "rl" else sft_settings
        super().__init__(directory, verb, settings(directory, max_steps), {"finish_within_s": 120, **slurm})
        self.cluster = cluster
        self.submit(*words)

    def submit(self, *words: str) -> None:
        self.answer = self.stretto(self.verb, "@", "run.toml", *words)
        found = re.search(r"job (\d+) is submitted", self.answer)
        assert found, self.answer
        self.job = found[1]

    def stretto(self, *words: str) -> str:
        return self.cluster.login(*STRETTO, *words, cwd=self.directory)

    def said(self) -> str:
        path = self.dir.slurm / "job.log"
        return path.read_text() if path.exists() else "the job wrote no log"

    def until(self, condition: Callable[[], object], what: str) -> None:
        def is_over() -> bool:
            return bool(condition()) or self.has_ended()

        self.cluster.until(is_over, what)
        assert condition(), f"{what}: the job has ended\n{self.said()}"

    # -- the job --

    def job_fields(self) -> dict[str, str]:
        return self.cluster.job(self.job)

    def nodes(self) -> list[str]:
        return self.cluster.login("scontrol", "show", "hostnames", self.job_fields()["NodeList"]).split()

    def has_ended(self) -> bool:
        return self.job_fields()["JobState"] in ENDED

    def signal_early_end(self) -> None:
        """What Slurm sends ahead of the end."""
        self.cluster.login("scancel", "--batch", "--signal=USR2", self.job)

    def until_restarted(self) -> None:
        """Until the job runs for the second time."""

        def is_restarted() -> bool:
            job = self.job_fields()
            return job["Restarts"] == "1" and job["JobState"] == "RUNNING"

        self.until(is_restarted, "the job is started again")

    def num_let_in(self, host: str) -> int:
        """How often the orchestrator has let the engine of a host in again."""
        return len(re.findall(rf"engine http://{host}:\d+ is back", self.dir.log("orchestrator").read_text()))

    def is_in(self, host: str) -> bool:
        """Whether the last that the orchestrator said of the engine of a host is that it is back."""
        said = re.findall(rf"engine http://{host}:\d+ is (back|down)", self.dir.log("orchestrator").read_text())
        return bool(said) and said[-1] == "back"

    def until_back(self, host: str, times: int, let_in: int) -> None:
        """Until a lost node has come back this many times, and its engine is in.

        let_in: how often the engine had been let in before the link went down; it may be let in again before this
        is called. An engine whose node was cut off may also be let in before Slurm ends it; it is then out again.
        """
        self.until(lambda: self.said().count(f"job | {host} is back") >= times, f"{host} is back")
        is_let_in = lambda: self.num_let_in(host) > let_in and self.is_in(host)
        self.until(is_let_in, f"the engine of {host} is let in")

    def stop(self) -> None:
        assert "finishes its step" in self.stretto("stop", str(self.dir))
        assert self.end()["JobState"] == "COMPLETED", self.said()

    def end(self) -> dict[str, str]:
        self.cluster.until(self.has_ended, "the end of the job")
        return self.job_fields()

    def node_log(self, node: int, name: str) -> str:
        path = RunDir(self.directory / f"run-node-{node}").log(name)
        return path.read_text() if path.exists() else ""
