"""What the page can be asked about a run, as JSON: the page's own views use it, and scripts may.

`GET /api/view` lists every address with its parameters (`described`); docs/seeing.md shows a few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import read_json
from stretto.ledger.reader import LedgerReader
from stretto_view.page import conversation, curves, export, logs, now, rollouts, texts, timeline
from stretto_view.page.library import OpenRun
from stretto_view.page.query import CURVE, FILTERS, ROLLOUT, filters_of, number, rollout_of

_MOST_REPLIES = 500


@dataclass(frozen=True)
class Route:
    """One question about a run: `/api/run/{run}/NAME`."""

    answer: Callable[[OpenRun, Any], Any]
    about: str
    parameters: Mapping[str, str] = field(default_factory=dict)


def described() -> list[dict[str, Any]]:
    """Every address that answers with data, what it answers, and its parameters."""
    own = [
        {"address": "/api/runs", "about": "the runs: id, state, step, reward, age", "parameters": {}},
        {"address": "/api/view", "about": "this list", "parameters": {}},
        {"address": "/api/run/{run}/image/{hash}", "about": "an image of a rollout, as PNG", "parameters": {}},
    ]
    per_run: dict[str, Route | export.File] = {**PER_RUN, **export.FILES}
    return own + [
        {"address": f"/api/run/{{run}}/{name}", "about": each.about, "parameters": dict(each.parameters)}
        for name, each in per_run.items()
    ]


def _curve(run: OpenRun, query: Any) -> Any:
    if (axis := query.get("axis", "step")) not in curves.AXES:
        raise ConfigError(f"axis {axis!r}: the axes are {', '.join(curves.AXES)}.")
    smooth, points = (number(query, "smooth", float) or 0.0, number(query, "points", int) or curves.MOST_POINTS)
    rows = run.rows()
    if not 0 <= smooth <= 1 or points < 1:
        raise ConfigError(
            f"smooth = {smooth:g}, points = {points}: smooth is a share from 0 to 1, points are 1 or more."
        )
    keys = query.getall("key", [])
    return {key: curves.curve(rows, key, axis=axis, smooth=smooth, points=max(10, points)) for key in keys}


def _rollouts(run: OpenRun, query: Any) -> Any:
    filters = filters_of(query)
    if not run.dir.ledger.exists():
        return {"rows": [], "next": None, "searched": 0, "choices": None}
    place, text = query.get("place") or "anywhere", query.get("text") or ""
    with LedgerReader(run.dir) as ledger:
        before = number(query, "before", int)
        found = texts.page(ledger, run, filters, text=text, place=place, before=before)
        return {**found, **({} if "before" in query else {"choices": rollouts.choices(ledger)})}


def _evals(run: OpenRun, query: Any) -> Any:
    if (version := number(query, "version", int)) is not None:
        return [texts.with_turns(row) for row in run.eval_samples(version, _MOST_REPLIES)]
    return run.evals()


def _scores(run: OpenRun, query: Any) -> Any:
    """What other rewards say of the rollouts, each as `stretto rescore --write NAME` has left it, with its name."""
    found = []
    for file in sorted((run.path / "scores").glob("*.json")):
        about = read_json(file)
        rows = [row for row in about.get("disagreements") or () if isinstance(row, dict)]
        spoken = [row | {"branches": [{"prompt": row.get("prompt"), "reply": row.get("reply")}]} for row in rows]
        found.append({**about, "name": file.stem, "disagreements": [texts.with_turns(row) for row in spoken]})
    return found


def _logs(run: OpenRun, query: Any) -> Any:
    if (level := query.get("level") or "debug") not in logs.LEVELS:
        raise ConfigError(f"level {level!r}: the levels are {', '.join(logs.LEVELS)}.")
    found = logs.merged(
        run.dir,
        processes=query.getall("process", []),
        level=level,
        text=query.get("text", ""),
        before=number(query, "before", float),
    )
    return {**found, "processes": list(logs.files(run.dir))}


PER_RUN: dict[str, Route] = {
    "now": Route(
        lambda run, query: now.now(run), "state, latest metrics, who waits, queues, engines, machine, warnings"
    ),
    "metrics": Route(lambda run, query: curves.names(run.rows()), "every metric with its unit and meaning"),
    "curve": Route(_curve, "metrics as x, y and smoothed y", {**CURVE, "points": "at most so many"}),
    "rollouts": Route(_rollouts, "rollouts with the beginnings of their texts, newest first, in pages", FILTERS),
    "rollout": Route(
        lambda run, query: conversation.conversation(run, *rollout_of(query)), "one, token by token", ROLLOUT
    ),
    "timeline": Route(
        lambda run, query: timeline.timeline(run, start=number(query, "start", float), end=number(query, "end", float)),
        "spans of time: rollouts, batches, weights, the trainer",
        {"start": "unix seconds", "end": "unix seconds; without both the last minute"},
    ),
    "evals": Route(
        _evals,
        f"scores of every version; with a version its first {_MOST_REPLIES} replies",
        {"version": "of these replies"},
    ),
    "eval_task": Route(
        lambda run, query: texts.over_versions(run, query.get("task", ""), query.get("env") or None),
        "the replies to one held-out task, of every evaluated version",
        {"task": "its id", "env": "its environment"},
    ),
    "scores": Route(_scores, "what other rewards say of its rollouts: `stretto rescore RUN --reward fn --write NAME`"),
    "config": Route(lambda run, query: flat(run.config), "every value of the config by its dotted key"),
    "logs": Route(
        _logs,
        "lines of all processes by time",
        {"process": "may be repeated", "level": "debug to critical", "text": "", "before": "unix seconds"},
    ),
}


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Every value of a config by its dotted key; sections of a list by their name, id or number.

    A list of plain values stays one value.
    """
    if isinstance(config, dict) and (config or not path):
        found: dict[str, Any] = {}
        for key, value in config.items():
            found |= flat(value, f"{path}.{key}" if path else key)
        return found
    if isinstance(config, list) and config and all(isinstance(each, dict) for each in config):
        found = {}
        for at, value in enumerate(config):
            name = value.get("name") or value.get("id") or at
            key = f"{path}[{name}]"
            found |= flat(value, f"{key}#{at}" if any(old.startswith(f"{key}.") for old in found) else key)
        return found
    return {path: config}
