"""How far runs are: one row per run directory, from its files alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.locked import holder
from stretto.base.paths import RunDir
from stretto.monitors.file import newest_values

ROLES = ("orchestrator", "sft")
"""Roles whose metrics say how far a run is; the first one that has some counts."""
_RESULT = {"orchestrator": "reward/mean", "sft": "nll/mean"}
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
    if any(
        map(os.path.exists, (run.config("run"), run.ledger))
    ):  # also in a directory that is not ours to read
        yield path
    elif depth:
        try:
            below = sorted(child for child in path.iterdir() if child.is_dir() and not child.is_symlink())
        except OSError:  # not ours to read
            return
        for child in below:
            if child.name not in _KEPT and not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)


def describe(run: RunDir) -> dict[str, Any]:
    """One row: name, path, verb, state, step, max_steps, reward, loss (of sft), host, changed (unix seconds), age_s.

    state: running, done, ended (before its last step), or damaged. What is not known is None.
    """
    row: dict[str, Any] = {"name": run.path.resolve().name, "path": str(run.path), "verb": None}
    row |= dict.fromkeys(("state", "step", "max_steps", "reward", "loss", "host", "changed"))
    try:
        config = _read(run.config("run"))
        row |= {"verb": "sft" if "data" in config and "orchestrator" not in config else "rl"}
        row["max_steps"] = config.get("max_steps")
        for role in ROLES:
            if run.metrics(role).exists():
                newest = newest_values(run.metrics(role), "step", _RESULT[role])
                row |= {
                    "step": newest.get("step"),
                    "reward": newest.get("reward/mean"),
                    "loss": newest.get("nll/mean"),
                }
                row["changed"] = run.metrics(role).stat().st_mtime
                break
        row["host"] = _read(run.launch).get("host")
        row["state"] = _state(run, row)
    except (OSError, StrettoError) as error:
        row |= {"state": "damaged", "error": str(error)}
    row["age_s"] = None if row["changed"] is None else max(0.0, time.time() - row["changed"])
    return row


def _state(run: RunDir, row: dict[str, Any]) -> str:
    if holder(run.lock) is not None:
        return "running"
    if run.summary.exists() or (row["step"] and row["step"] == row["max_steps"]):
        return "done"
    return "ended"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
