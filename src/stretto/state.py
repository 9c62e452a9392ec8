"""How far runs are: one row per run directory, from its files alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, DataError, StrettoError, reason_of
from stretto.base.files import holder
from stretto.base.paths import RunDir
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import newest_row

ROLES = ("orchestrator", "sft")
"""Roles whose metrics say how far a run is; the first one that has metrics is used."""
_RESULT = {"orchestrator": "reward/mean", "sft": "nll/mean"}
_TRAINED = """
    SELECT b.step, b.trained_at AS changed, avg(r.reward) AS reward
    FROM batches b LEFT JOIN batch_rollouts USING (batch) LEFT JOIN rollouts r USING (row)
    WHERE b.state = 'trained' AND b.step = (SELECT max(step) FROM batches WHERE state = 'trained') GROUP BY b.batch
"""
_NUM_NAMED = 8  # runs that a message names
_DEPTH = 3  # directories below a given one in which runs are looked for
_KEPT = ("logs", "tokens", "weights", "checkpoints", "broadcasts", "rollouts", "evals", "configs", "metrics")


def find(places: Sequence[Path]) -> list[RunDir]:
    """The run directories among `places` and below them, in the order of their names.

    Raises: ConfigError for a place that is no directory.
    """
    found: dict[Path, RunDir] = {}
    for place in places:
        if not os.path.isdir(place):
            raise ConfigError(f"{place}: {no_run_text(place)}")
        for path in _runs_below(place, _DEPTH):
            found.setdefault(path.resolve(), RunDir(path))
    return list(found.values())


def no_run_text(path: Path) -> str:
    """Why `path` is no run, and which runs there are instead."""
    import difflib

    where = path if path.is_dir() else path.parent
    if path.exists() and not path.is_dir():
        return f"this is a file; a run is a directory, such as outputs/demo. {_runs_text(where)}"
    if path.is_dir():
        return f"this is no run directory; a run has configs/run.json. {_runs_text(where)}"
    names = [run.path for run in _runs_in(where)]
    near = difflib.get_close_matches(path.name, [each.name for each in names], n=1)
    if near:
        return f"there is no such directory; did you mean {where / near[0]}?"
    return f"there is no such directory. {_runs_text(where)}"


def no_runs_text(places: Sequence[Path]) -> str:
    """The message where runs are wanted and the given directories hold none."""
    shown = ", ".join(map(str, places))
    return f"{shown}: no run there; a run is a directory with configs/run.json. {runs_here()}"


def runs_here() -> str:
    """Which runs the usual places hold: a sentence."""
    here = Path("outputs") if Path("outputs").is_dir() else Path(".")
    return _runs_text(here)


def _runs_text(where: Path) -> str:
    """Which runs a directory holds, or those of ./outputs if it has none."""
    found = _runs_in(where)
    if not found and where != Path("outputs") and (found := _runs_in(Path("outputs"))):
        where = Path("outputs")
    if not found:
        return "No run is near; `rl` and `sft` print the directory of theirs, and `stretto runs DIR` looks in DIR."
    shown = ", ".join(str(run.path) for run in found[:_NUM_NAMED])
    more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return f"Runs in {where}: {shown}{more}."


def _runs_in(where: Path) -> list[RunDir]:
    """The runs of a directory, the newest first."""
    if not where.is_dir():
        return []

    def changed(run: RunDir) -> float:
        with suppress(OSError):
            return run.path.stat().st_mtime
        return 0.0

    return sorted((RunDir(path) for path in _runs_below(where, 1)), key=changed, reverse=True)


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    run = RunDir(path)
    # os.path.exists also works in a directory that cannot be listed.
    if any(map(os.path.exists, (run.config("run"), run.ledger))):
        yield path
    elif depth:
        try:
            below = sorted(child for child in path.iterdir() if child.is_dir() and not child.is_symlink())
        except OSError:  # no permission to list it
            return
        for child in below:
            if child.name not in _KEPT and not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)


def describe(run: RunDir) -> dict[str, Any]:
    """One row: name, path, verb, state, step, max_steps, reward, loss (of sft), host, changed (unix seconds), age_s.

    state: running, done, stopped (by a signal, before its last step), ended (in another way before its last step),
    not started (only the files of a dry run or a submission are there), or damaged. missing: which file was deleted,
    and where `step` comes from instead. Values that are not known are None.
    """
    row: dict[str, Any] = {"name": run.path.resolve().name, "path": str(run.path), "verb": None}
    row |= dict.fromkeys(("state", "step", "max_steps", "reward", "loss", "host", "changed", "missing"))
    try:
        config, summary = _read(run.config("run")), _read(run.summary)
        row |= {"verb": "sft" if "data" in config and "orchestrator" not in config else "rl"}
        last = config.get("max_steps") or summary.get("max_steps")
        if last is not None and not isinstance(last, int):
            raise DataError(f"{run.config('run')}: damaged: max_steps = {last!r} is no number.")
        row["max_steps"] = last
        row |= _from_metrics(run) or _without_metrics(run, row["verb"], summary)
        row["host"] = _read(run.launch).get("host")
        row["state"] = _state(run, row, summary)
    except (OSError, StrettoError) as error:
        row |= {"state": "damaged", "error": str(error)}
    row["age_s"] = None if row["changed"] is None else max(0.0, time.time() - row["changed"])
    return row


def _from_metrics(run: RunDir) -> dict[str, Any]:
    """How far the metrics say that the run is; {} without a metrics file, or if it was emptied."""
    for role in ROLES:
        file = run.metrics(role)
        if file.exists() and (about := file.stat()).st_size:
            newest = newest_row(file, _RESULT[role])
            found = {"step": "step", "reward": "reward/mean", "loss": "nll/mean"}
            numbers = {key: newest.get(name) for key, name in found.items()}
            return {
                **{key: value if isinstance(value, int | float) else None for key, value in numbers.items()},
                "changed": about.st_mtime,
            }
    return {}


def _without_metrics(run: RunDir, verb: str, summary: dict[str, Any]) -> dict[str, Any]:
    """How far the ledger, the summary or a checkpoint say that the run is; {} if none of them knows of a step."""
    found: dict[str, Any] = {}
    if run.ledger.exists():
        with LedgerReader(run) as ledger:
            found = next(iter(ledger.rows(_TRAINED)), {})
        source = "ledger"
    elif summary.get("steps"):
        found, source = {"step": summary["steps"], "changed": run.summary.stat().st_mtime}, "summary"
    elif step := run.latest_complete_checkpoint():
        changed = run.complete_marker(step).stat().st_mtime
        found, source = {"step": step, "changed": changed}, "newest checkpoint"
    if not found:
        return {}
    file = run.metrics("sft" if verb == "sft" else "orchestrator")
    where = file.relative_to(run.path)
    return {**found, "missing": f"{where} is missing: the step is the {source}'s, and there are no curves"}


def _state(run: RunDir, row: dict[str, Any], summary: dict[str, Any]) -> str:
    if holder(run.lock) is not None:
        return "running"
    if not _has_started(run):
        return "not started"
    step, last = row["step"] or summary.get("steps"), row["max_steps"]
    if step and last and step >= last:
        return "done"
    if not run.summary.exists() or step != summary.get("steps", step):  # its summary is older than its last step
        return "ended"
    return "done" if row["verb"] == "sft" and not last else "stopped"


def _has_started(run: RunDir) -> bool:
    written = (run.logs, run.ledger, run.summary, run.checkpoints, run.metrics("").parent)
    return any(map(os.path.exists, written))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {reason_of(error)}") from error
    return found if isinstance(found, dict) else {}
