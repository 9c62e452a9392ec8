"""How far runs are: one row per run directory, from its files alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, StrettoError
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
_DEPTH = 3  # directories below a given one in which runs are looked for
_KEPT = ("logs", "tokens", "weights", "checkpoints", "broadcasts", "rollouts", "evals", "configs", "metrics")


def find(places: Sequence[Path]) -> list[RunDir]:
    """The run directories among `places` and below them, in the order of their names.

    Raises: ConfigError for a place that is no directory.
    """
    found: dict[Path, RunDir] = {}
    for place in places:
        if not os.path.isdir(place):
            raise ConfigError(
                f"{place}: there is no such directory; give runs, or directories that hold runs."
            )
        for path in _runs_below(place, _DEPTH):
            found.setdefault(path.resolve(), RunDir(path))
    return list(found.values())


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
        row["max_steps"] = config.get("max_steps") or summary.get("max_steps")
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
            return {
                "step": newest.get("step"),
                "reward": newest.get("reward/mean"),
                "loss": newest.get("nll/mean"),
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
    if not run.summary.exists() or step != summary.get(
        "steps", step
    ):  # its summary is older than its last step
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
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
