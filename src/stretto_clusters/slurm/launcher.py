"""Slurm as a launcher: jobs that sbatch queues."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.launch.launchers import FINISHES, JobConfig, Launcher
from stretto_clusters.slurm import commands, submit

JOB_VAR = "SLURM_JOB_ID"


class Slurm(Launcher):
    def main(self, cfg: JobConfig, *, check: Callable[[], None] = lambda: None) -> int:
        return submit.main(cfg, check=check)

    def screen(self, cfg: JobConfig) -> str:
        return submit.screen(cfg)

    def status(self, run: RunDir, record: Mapping[str, Any], state: str) -> dict[str, str]:
        return {"job": _job_text(record["job"]), "state": state}

    def stop(self, run: RunDir, record: Mapping[str, Any], *, now: bool) -> str:
        job = record["job"]
        queued = commands.find_job(job)
        if not commands.is_live(queued):
            return f"job {job} has ended already"
        assert queued is not None
        if now or not queued.is_running or record.get("verb") == "inference":
            commands.cancel(job)
            return f"job {job}, which was {queued.state}, is cancelled"
        write_atomic(run.finish_marker, b"")
        commands.ask_to_finish(job)
        return f"job {job} {FINISHES}"

    def job_hosts(self) -> list[str] | None:
        job = os.environ.get(JOB_VAR)
        return None if job is None else commands.nodes_of(job)

    def end_other_nodes(self) -> None:
        commands.end_other_nodes()

    def requeue(self) -> None:
        commands.requeue_this()


def _job_text(job: str) -> str:
    queued = commands.find_job(job)
    if queued is None:
        return f"{job} on Slurm: no longer in the queue"
    if queued.is_running:
        return f"{job} on Slurm: {queued.state} for {queued.elapsed} on {queued.nodes}, {queued.left} left"
    why = f" ({queued.reason})" if queued.reason not in ("", "None") else ""
    return f"{job} on Slurm: {queued.state}{why}"


SLURM = Slurm()
