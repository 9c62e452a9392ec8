"""A command with a [slurm] section: writes the job into the run directory, submits it, and says how to follow it."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import textwrap

from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.launch.job import JobConfig, check_run, write_config
from stretto.launch.slurm.commands import find_job, is_live, submit
from stretto.launch.slurm.script import Job, plan_job, surplus

WIDTH = 116
"""Width of the lines that a dry run shows, characters."""


def main(cfg: JobConfig) -> int:
    """Submit the job; the exit status."""
    job = plan_job(cfg)
    refuse_second(job.run)
    check_run(cfg)
    write(job, cfg)
    number = submit(str(job.script_file))
    record = {"by": "slurm", "verb": job.verb, "job": number, "host": socket.gethostname()}
    write_atomic(job.run.launch, json.dumps(record).encode() + b"\n")
    assert cfg.slurm is not None
    note = surplus(cfg.slurm, job.num_gpus)
    sys.stdout.write(submitted(job, number) + (f"\n  note    {note}" if note else "") + "\n")
    return 0


def refuse_second(run: RunDir) -> None:
    """Raises: ConfigError if a job of this run waits or runs already."""
    try:
        record = json.loads(run.launch.read_text())
    except (OSError, ValueError):
        return
    if record.get("by") == "slurm" and is_live(queued := find_job(record["job"])):
        assert queued is not None
        raise ConfigError(
            f"run {run.path.name!r} in {run} is job {record['job']} already, which is {queued.state}; follow it with "
            f"`stretto status {run}`, end it with `stretto stop {run}`, or give this run another name with --run.name."
        )


def write(job: Job, cfg: JobConfig, directory: RunDir | None = None) -> None:
    """Write script and config; directory: another than the run's, for a dry run."""
    target = job.run if directory is None else directory
    write_config(cfg, job.run, target.slurm / job.config_file.name)
    write_atomic(target.slurm / job.script_file.name, job.script.encode())


def submitted(job: Job, number: str) -> str:
    """The lines after the submission."""
    size = f"{job.num_nodes} node{'s' * (job.num_nodes != 1)}"
    gpus = f" with {job.num_gpus} GPU{'s' * (job.num_gpus != 1)} each" if job.num_gpus else ""
    rows = {
        "script": str(job.script_file),
        "log": str(job.log),
        "status": f"stretto status {job.run}",
        "follow": f"stretto logs {job.run} --follow",
        "stop": f"stretto stop {job.run}",
    }
    return "\n".join(
        [
            f"job {number} is submitted: {job.verb} on {size}{gpus}",
            *(f"  {name:<7} {text}" for name, text in rows.items()),
        ]
    )


def screen(cfg: JobConfig) -> str:
    """What a dry run shows of the job: sbatch's options, and where it has written the script."""
    job = plan_job(cfg)
    shown = RunDir(job.run.path / "dry_run")
    write(job, cfg, shown)
    options = [line.split()[1:] for line in job.script.splitlines() if line.startswith("#SBATCH ")]
    lines = textwrap.wrap(
        " ".join(itertools.chain(*options)), WIDTH, break_long_words=False, break_on_hyphens=False
    )
    note = ""
    if not job.num_gpus and job.num_nodes == 1 and (cfg.slurm is None or cfg.slurm.gres is None):
        note = "\nnote: no GPUs are named or counted, so the job asks for none; give slurm.gres or a count"
    if cfg.slurm is not None and (too_many := surplus(cfg.slurm, job.num_gpus)):
        note = f"\nnote: {too_many}"
    where = cfg.run_path / "dry_run" / "slurm"
    return "\n  ".join([f"sbatch would get {job.script_file.name}, which is in {where}, with", *lines]) + note
