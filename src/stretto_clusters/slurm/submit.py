"""A command with a [slurm] section: writes the job into the run directory, submits it, prints how to follow it."""

from __future__ import annotations

import itertools
import socket
import sys
import textwrap
from collections.abc import Callable

from stretto.base.errors import ConfigError
from stretto.base.files import read_json, write_atomic
from stretto.base.paths import RunDir
from stretto.config.load import write_json
from stretto.launch.launchers import JobConfig
from stretto.launch.plan.nodes import IDLE
from stretto_clusters.job import check_run, write_config
from stretto_clusters.slurm.commands import find_job, is_live, submit
from stretto_clusters.slurm.script import Job, plan_job, unused_gpus

WIDTH = 116
"""Width of the lines that a dry run shows, characters."""


def main(cfg: JobConfig, *, check: Callable[[], None] = lambda: None) -> int:
    """Submit the job; the exit status. check: what else may refuse it, called before it is submitted."""
    job = plan_job(cfg)
    refuse_second(job.run)
    check_run(cfg)
    check()
    write(job, cfg)
    number = submit(str(job.script_file), sys.argv[1:])
    record = {"by": "slurm", "verb": job.verb, "job": number, "host": socket.gethostname()}
    write_json(job.run.launch, record)
    assert cfg.slurm is not None
    note = unused_gpus(cfg.slurm, job.num_gpus)
    if job.num_idle and note is None:
        note = f"{job.num_idle} of {job.num_nodes * job.num_gpus} {IDLE}; a --dry-run says on which"
    sys.stdout.write(submitted(job, number) + (f"\n  note    {note}" if note else "") + "\n")
    return 0


def refuse_second(run: RunDir) -> None:
    """Raises: ConfigError if a job of this run waits or runs already."""
    record = read_json(run.launch)
    if record.get("by") == "slurm" and is_live(queued := find_job(record["job"])):
        assert queued is not None
        raise ConfigError(
            f"run {run.path.name!r} in {run} is job {record['job']} already, which is {queued.state}; follow it with "
            f"`stretto status {run}`, end it with `stretto stop {run}`, or give this run another name with --run.name."
        )


def write(job: Job, cfg: JobConfig, directory: RunDir | None = None) -> None:
    """Write script and config; directory: for a dry run, another directory than the run's."""
    target = job.run if directory is None else directory
    write_config(cfg, job.run, target.slurm / job.config_file.name)
    write_atomic(target.slurm / job.script_file.name, job.script.encode())


def submitted(job: Job, number: str) -> str:
    """What is printed after the submission."""
    size = f"{job.num_nodes} node{'s' * (job.num_nodes != 1)}"
    gpus = f" with {job.num_gpus} GPU{'s' * (job.num_gpus != 1)} each" if job.num_gpus else ""
    rows = {
        "script": str(job.script_file),
        "log": str(job.log),
        "status": f"stretto status {job.run}",
        "follow": f"stretto logs {job.run} --follow",
        "stop": f"stretto stop {job.run}",
    }
    lines = [f"job {number} is submitted: {job.verb} on {size}{gpus}"]
    return "\n".join([*lines, *(f"  {name:<7} {text}" for name, text in rows.items())])


def screen(cfg: JobConfig) -> str:
    """What a dry run shows of the job: sbatch's options, and where the script was written."""
    job = plan_job(cfg)
    write(job, cfg, RunDir(job.run.path / "dry_run"))
    options = [line.split()[1:] for line in job.script.splitlines() if line.startswith("#SBATCH ")]
    lines = textwrap.wrap(" ".join(itertools.chain(*options)), WIDTH, break_long_words=False, break_on_hyphens=False)
    note = ""
    if not job.num_gpus and job.num_nodes == 1 and (cfg.slurm is None or cfg.slurm.gres is None):
        note = "\nnote: no GPUs are named or counted, so the job asks for none; give slurm.gres or a count"
    if cfg.slurm is not None and (unused := unused_gpus(cfg.slurm, job.num_gpus)):
        note = f"\nnote: {unused}"
    where = cfg.run_path / "dry_run" / "slurm"
    return "\n  ".join([f"sbatch would get {job.script_file.name}, which is in {where}, with", *lines]) + note
