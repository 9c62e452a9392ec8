"""`stretto status|logs|stop RUN`: looks at a run that was started somewhere, and ends it.

RUN/launch.json says who runs it: a launcher on some host (base/rundir.py writes it), a job of Slurm (slurm/submit.py),
or a command that has machines of a Ray cluster (ray/run.py). That one says in RUN/ray/state.json how far it is, and
looks for RUN/ray/stop.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import holder, write_atomic
from stretto.base.paths import RunDir
from stretto.base.status import duration
from stretto.launch.slurm import commands as slurm
from stretto.monitors.file import read_metrics
from stretto.view.state import describe

FOLLOW_S = 0.5
LEADS = ("orchestrator", "sft", "inference")
"""Whose log is shown if none is named, the first that there is."""


def status(words: list[str]) -> int:
    """`stretto status RUN`: who runs it, how far it is, and where its logs are."""
    parser = ArgumentParser("stretto status", description="how far a run is, and who runs it")
    parser.add_argument("run", type=Path, help="the run's directory")
    run = _run(parser.parse_args(words).run)
    rows = {"run": str(run), **_launcher(run), **_progress(run), "logs": ", ".join(_logs(run)) or "none yet"}
    sys.stdout.write("".join(f"{name:<6} {text}\n" for name, text in rows.items()))
    return 0


def logs(words: list[str]) -> int:
    """`stretto logs RUN [NAME] [--follow]`: the end of a process's log."""
    parser = ArgumentParser("stretto logs", description="the end of a log of a run")
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument(
        "name", nargs="?", help="a process, such as trainer_1, or job; default: the one that leads"
    )
    parser.add_argument("-n", "--lines", type=int, default=20, help="lines to begin with (20)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    given = parser.parse_args(words)
    run = _run(given.run)
    found = _logs(run)
    name = given.name or next((name for name in ("job", *LEADS, *found) if name in found), None)
    if name not in found:
        have = ", ".join(found) or "none yet"
        raise ConfigError(f"{run} has no log {name or ''!r}; there are: {have}.")
    _show(found[name], max(0, given.lines), follow=given.follow)
    return 0


def stop(words: list[str]) -> int:
    """`stretto stop RUN`: finish the step, save a checkpoint, end."""
    parser = ArgumentParser(
        "stretto stop", description="let a run finish its step, save a checkpoint and end"
    )
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument(
        "--now", action="store_true", help="end at once; finished steps and rollouts are kept"
    )
    given = parser.parse_args(words)
    run = _run(given.run)
    record = _record(run)
    match record.get("by"):
        case "slurm":
            done = _stop_job(run, record, now=given.now)
        case "ray":
            done = _stop_on_ray(run, now=given.now)
        case _:
            done = _stop_local(run, record, now=given.now)
    sys.stdout.write(done + "\n")
    return 0


def _run(path: Path) -> RunDir:
    """Raises: ConfigError if there is no run in the directory."""
    run = RunDir(path.expanduser())
    if not run.launch.exists() and not run.configs.is_dir():
        raise ConfigError(
            f"{run} is no run directory; give <output_dir>/<run.name>, which the command printed."
        )
    return run


def _record(run: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(run.launch.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# -- who runs it --


def _launcher(run: RunDir) -> dict[str, str]:
    record = _record(run)
    if record.get("by") == "slurm":
        return {"job": _job_text(record["job"]), "state": describe(run)["state"]}
    if record.get("by") == "ray":
        text = _ray_text(run, record)
        return {"state": describe(run)["state"], "ray": text} if text.startswith("ended") else {"state": text}
    if (pid := holder(run.lock)) is None:
        return {"state": describe(run)["state"]}
    return {"state": f"running: process {pid} on {record.get('host', 'this host')}"}


def _job_text(job: str) -> str:
    queued = slurm.find_job(job)
    if queued is None:
        return f"{job} on Slurm: no longer in the queue"
    if queued.is_running:
        return f"{job} on Slurm: {queued.state} for {queued.elapsed} on {queued.nodes}, {queued.left} left"
    why = f" ({queued.reason})" if queued.reason not in ("", "None") else ""
    return f"{job} on Slurm: {queued.state}{why}"


def _ray_text(run: RunDir, record: dict[str, Any]) -> str:
    try:
        found = json.loads((run.ray / "state.json").read_text())
    except (OSError, ValueError):
        found = {"state": "starting", "text": "", "restarts": 0}
    about = f"{found['state']} on Ray{': ' if found['text'] else ''}{found['text']}"
    if found["restarts"]:
        about += f"; started again {found['restarts']} times"
    who = f"job {record['job']}" if "job" in record else f"process {record['pid']}"
    if holder(run.ray / "lock") is None and found["state"] != "ended":
        return f"ended: {who} on {record['host']}, which waited for it, is gone; it was {about}"
    return about if found["state"] == "ended" else f"{about}; {who} on {record['host']} waits for it"


# -- how far it is --


def _progress(run: RunDir) -> dict[str, str]:
    rows: dict[str, str] = {}
    for role in ("orchestrator", "sft"):
        path = run.metrics(role)
        steps = [row["step"] for row in read_metrics(path) if row.get("step")] if path.exists() else []
        if steps:
            age = duration(max(0.0, time.time() - path.stat().st_mtime))
            rows["step"] = f"{max(steps):.0f}{_of_max_steps(run)}, {age} ago"
    if (saved := run.latest_complete_checkpoint()) is not None:
        rows["saved"] = f"step {saved}"
    return rows


def _of_max_steps(run: RunDir) -> str:
    try:
        most = json.loads(run.config("run").read_text()).get("max_steps")
    except (OSError, ValueError):
        return ""
    return f" of {most}" if most else ""


# -- logs --


def _logs(run: RunDir) -> dict[str, Path]:
    """Logs by name: those of processes on every node, and that of the job."""
    nodes = sorted(run.path.parent.glob(f"{run.path.name}-node-*/logs/*.log"))
    found = {path.stem: path for path in [*nodes, *sorted(run.logs.glob("*.log"))] if path.stem != "launcher"}
    jobs = [path for path in (run.slurm / "job.log", run.ray / "job.log") if path.exists()]
    newest = max(jobs, key=lambda path: path.stat().st_mtime, default=None)
    return ({} if newest is None else {"job": newest}) | found


def _show(path: Path, num_lines: int, *, follow: bool) -> None:
    with path.open("rb") as file:
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
        sys.stdout.write("".join(lines[-num_lines:] if num_lines else []))
        sys.stdout.flush()
        while follow:
            if more := file.read():
                sys.stdout.write(more.decode(errors="replace"))
                sys.stdout.flush()
            time.sleep(FOLLOW_S)


# -- stop --


def _stop_job(run: RunDir, record: dict[str, Any], *, now: bool) -> str:
    job = record["job"]
    queued = slurm.find_job(job)
    if not slurm.is_live(queued):
        return f"job {job} has ended already"
    assert queued is not None
    if now or not queued.is_running or record.get("verb") == "inference":
        slurm.cancel(job)
        return f"job {job}, which was {queued.state}, is cancelled"
    write_atomic(run.finish_marker, b"")
    slurm.ask_to_finish(job)
    return f"job {job} finishes its step, saves a checkpoint and ends; --now ends it at once"


def _stop_on_ray(run: RunDir, *, now: bool) -> str:
    if holder(run.ray / "lock") is None:
        return f"{run} is not running"
    write_atomic(run.ray / "stop", b"now\n" if now else b"finish\n")
    how = "ends at once" if now else "finishes its step, saves a checkpoint and ends; --now ends it at once"
    return f"{run}, on Ray, {how}"


def _stop_local(run: RunDir, record: dict[str, Any], *, now: bool) -> str:
    """Raises: ConfigError if the launcher is on another host."""
    if (pid := holder(run.lock)) is None:
        return f"{run} is not running"
    host = record.get("host")
    if host not in (None, socket.gethostname()):
        raise ConfigError(f"{run} runs on {host}; run `stretto stop {run}` there.")
    if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
        raise ConfigError(
            f"{run} is held by process {pid}, which is not on this host; stop it where it was started."
        )
    os.kill(int(pid), signal.SIGINT)
    if now:
        os.kill(int(pid), signal.SIGTERM)
        return f"process {pid} ends at once"
    return f"process {pid} finishes its step, saves a checkpoint and ends; --now ends it at once"
