"""`stretto status|logs|stop RUN`: shows how far a run is, and ends it, wherever it was started.

RUN/launch.json says who runs it: a launcher on some host (base/rundir.py writes it), or that of a cluster, such as a
Slurm job or a command on Ray (launchers.py).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import holder, read_json
from stretto.base.paths import RunDir
from stretto.base.status import duration, quantity
from stretto.config.reading.plain import PlainParser
from stretto.launch.launchers import FINISHES, launcher_of_run
from stretto.launch.queues import queue_text
from stretto.monitors.file import newest_row, read_metrics
from stretto.state import describe, no_run_text, runs_here

FOLLOW_S = 0.5
DEFAULT_LOGS = ("job", "orchestrator", "sft", "inference")
"""If no log is named, the first of these that exists is shown."""


def status(words: list[str]) -> int:
    """`stretto status RUN`: who runs it, how far it is, what its engines' queues hold, and where its logs are."""
    parser = PlainParser("status", "how far a run is, and who runs it", missing=runs_here)
    parser.add_argument("run", type=Path, help="the run's directory")
    run = find_run(parser.parse_args(words).run)
    rows = {"run": str(run), **_launcher(run), **_progress(run)}
    if not _has_ended(run) and (queues := queue_text(run)) is not None:
        rows["queues"] = queues
    rows["logs"] = ", ".join(_logs(run)) or "none yet"
    sys.stdout.write("".join(f"{name:<6} {text}\n" for name, text in rows.items()))
    return 0


def _has_ended(run: RunDir) -> bool:
    """Whether no process of a run of this machine lives; its ports may be those of another run by now."""
    launched = read_json(run.launch)
    is_here = launched.get("by") == "local" and launched.get("host") == socket.gethostname()
    return is_here and not any(holder(lock) for lock in (run.lock, *run.path.glob("run.*.lock")))


def logs(words: list[str]) -> int:
    """`stretto logs RUN [NAME] [--follow]`: the end of a process's log."""
    parser = PlainParser("logs", "the end of a log of a run", missing=runs_here)
    parser.add_argument("run", type=Path, help="the run's directory")
    default = "default: the job's, else that of the orchestrator, of sft or of inference"
    parser.add_argument("name", nargs="?", help=f"a process, such as trainer_1, or job; {default}")
    parser.add_argument("-n", "--lines", type=int, default=20, help="lines to begin with (20)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    options = parser.parse_args(words)
    run = find_run(options.run)
    paths = _logs(run)
    name = options.name or next((name for name in (*DEFAULT_LOGS, *paths) if name in paths), None)
    if name not in paths:
        have = ", ".join(paths) or "none yet"
        raise ConfigError(f"{run} has no log {name or ''!r}; there are: {have}.")
    _show(paths[name], max(0, options.lines), follow=options.follow)
    return 0


def stop(words: list[str]) -> int:
    """`stretto stop RUN`: finish the step, save a checkpoint, end."""
    parser = PlainParser("stop", "let a run finish its step, save a checkpoint and end", missing=runs_here)
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--now", action="store_true", help="end at once; finished steps and rollouts are kept")
    options = parser.parse_args(words)
    run = find_run(options.run)
    record = read_json(run.launch)
    launcher = launcher_of_run(run, record)
    message = _stop_local(run, now=options.now) if launcher is None else launcher.stop(run, record, now=options.now)
    sys.stdout.write(message + "\n")
    return 0


def find_run(path: Path) -> RunDir:
    """The run in a directory.

    Raises: ConfigError if there is none.
    """
    run = RunDir(path.expanduser())
    if not run.launch.exists() and not run.configs.is_dir():
        raise ConfigError(f"{path}: {no_run_text(run.path)}")
    return run


def launcher_pid(run: RunDir, verb: str) -> int | None:
    """The process of this host that holds a run; None if the run is not running.

    verb: what the user typed, for messages.

    Raises: ConfigError if the process is on another host.
    """
    if (pid := holder(run.lock)) is None:
        return None
    host = read_json(run.launch).get("host")
    if host not in (None, socket.gethostname()):
        raise ConfigError(f"{run} runs on {host}; run `stretto {verb} {run}` there.")
    if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
        raise ConfigError(
            f"{run} is held by process {pid}, which is not on this host; run `stretto {verb} {run}` where it was "
            "started."
        )
    return int(pid)


# -- who runs it --


def _launcher(run: RunDir) -> dict[str, str]:
    record = read_json(run.launch)
    if (launcher := launcher_of_run(run, record)) is not None:
        return launcher.status(run, record, describe(run)["state"])
    if (pid := holder(run.lock)) is None:
        return {"state": describe(run)["state"]}
    return {"state": f"running: process {pid} on {record.get('host', 'this host')}"}


# -- how far it is --


def _progress(run: RunDir) -> dict[str, str]:
    rows: dict[str, str] = {}
    for role in ("orchestrator", "sft"):
        path = run.metrics(role)
        steps = [row["step"] for row in read_metrics(path) if row.get("step")] if path.exists() else []
        if steps:
            age = duration(max(0.0, time.time() - path.stat().st_mtime))
            rows["step"] = f"{max(steps):.0f}{_of_max_steps(run)}, {age} ago"
            rows |= _used(newest_row(path, "budget/hours"), read_json(run.summary).get("used", {}))
    if (saved := run.latest_complete_checkpoint()) is not None:
        rows["saved"] = f"step {saved}"
    return rows


def _used(row: Mapping[str, Any], ended: Mapping[str, Any]) -> dict[str, str]:
    """What the run has used by its newest row of metrics, and where its budget would end.

    ended: what it had used when it last ended, which a start without a step adds to.
    """
    if "budget/hours" not in row:
        return {}
    if ended.get("hours", 0.0) > row["budget/hours"]:
        row = {**row, **{f"budget/{name}": value for name, value in ended.items()}}
    text = f"{row['budget/hours']:.4g} h, {quantity(row['budget/tokens'])} trained tokens"
    text += f", cost {row['budget/cost']:.4g}" if "budget/cost" in row else ""
    if "budget/share" in row:
        text += f"; {row['budget/share']:.0%} of the budget"
    if "budget/last_step" in row:
        text += f", which would end with step {row['budget/last_step']:.0f}"
    return {"used": text}


def _of_max_steps(run: RunDir) -> str:
    max_steps = read_json(run.config("run")).get("max_steps")
    return f" of {max_steps}" if max_steps else ""


# -- logs --


def _logs(run: RunDir) -> dict[str, Path]:
    """Logs by name: that of the job, and those of the processes on every node."""
    nodes = sorted(run.path.parent.glob(f"{run.path.name}-node-*/logs/*.log"))
    paths = {path.stem: path for path in [*nodes, *sorted(run.logs.glob("*.log"))] if path.stem != "launcher"}
    jobs = [path for path in (run.slurm / "job.log", run.ray / "job.log") if path.exists()]
    newest = max(jobs, key=lambda path: path.stat().st_mtime, default=None)
    return ({} if newest is None else {"job": newest}) | paths


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


def _stop_local(run: RunDir, *, now: bool) -> str:
    """Raises: ConfigError if the launcher is on another host."""
    if (pid := launcher_pid(run, "stop")) is None:
        return f"{run} is not running"
    os.kill(pid, signal.SIGINT)
    if now:
        os.kill(pid, signal.SIGTERM)
        return f"process {pid} ends at once"
    return f"process {pid} {FINISHES}"
