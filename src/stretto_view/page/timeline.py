"""Lanes of spans of time: rollouts, batches, the trainer's work, loading of weights, checkpoints.

All times come from the ledger and the trainer's metrics.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.ledger.reader import LedgerReader
from stretto.ledger.schema import SHOWN_STATUS
from stretto_view.page.library import OpenRun

WINDOW_S = 60.0
MOST_LANES = 40
MOST_SPANS = 3000
_SPREAD = 1000  # rows are in order of their starts; among so many before a time, some may still run at it
_TRAINER = (  # phases of a step and their metrics, in order of time; a step's row is written at its end
    ("wait", ("time/wait_for_batch",)),
    ("train", ("time/train",)),
    ("publish", ("time/publish",)),
    ("save", ("time/save_ckpt",)),
)

Span = dict[str, Any]
Lane = dict[str, Any]


def timeline(run: OpenRun, *, start: float | None = None, end: float | None = None) -> dict[str, Any]:
    """Lanes of spans between two times (unix seconds), by default of the last minute.

    first, last: times of the run's first rollout and its last event. one_of: one of so many rollouts is shown.
    """
    rows = run.rows()
    own = rows.get("trainer") or rows.get("sft") or rows.get("orchestrator") or []
    first = own[0]["time"] - own[0].get("time/step", 0.0) if own else 0.0
    last = own[-1]["time"] if own else 0.0
    if not run.dir.ledger.exists():
        end = last if end is None else end
        start = max(first, end - WINDOW_S) if start is None else start
        return _answer(first, last, start, end, [_trainer_lane(own, start, end)], 1)
    with LedgerReader(run.dir) as ledger:
        began = ledger.rows("SELECT started_at AS at FROM rollouts WHERE started_at > 0 ORDER BY row LIMIT 1")
        [newest] = ledger.rows(_NEWEST)
        first, last = began[0]["at"] if began else first, max(last, newest["at"] or last)
        end = last if end is None else end
        start = max(first, end - WINDOW_S) if start is None else start
        rollouts, one_of = _rollout_lanes(ledger, start, end)
        lanes = [
            _trainer_lane(own, start, end),
            _lane("weights", _versions(ledger, start, end)),
            _lane("batches", _batches(ledger, start, end)),
            _lane("checkpoints", _checkpoints(ledger, start, end)),
            *engine_lanes(ledger, start, end),
            *rollouts,
        ]
    return _answer(first, last, start, end, lanes, one_of)


_NEWEST = "SELECT max(finished_at) AS at FROM (SELECT finished_at FROM rollouts ORDER BY row DESC LIMIT 2000)"


def _answer(first: float, last: float, start: float, end: float, lanes: list[Lane], one_of: int) -> dict[str, Any]:
    shown = [lane for lane in lanes if lane["spans"]]
    return {"first": first, "last": last, "start": start, "end": end, "lanes": shown, "one_of": one_of}


def _trainer_lane(rows: Sequence[Mapping[str, Any]], start: float, end: float) -> Lane:
    seen = (row for row in rows if row["time"] >= start and row["time"] - row.get("time/step", 0.0) <= end)
    return _lane("trainer", [span for row in seen for span in trainer_spans(row)][-MOST_SPANS:])


def trainer_spans(row: Mapping[str, Any]) -> list[Span]:
    """The phases of one step of the trainer; the last one ends at the time of its row."""
    known = [(kind, sum(row.get(key) or 0.0 for key in keys)) for kind, keys in _TRAINER]
    if not any(seconds for _, seconds in known):  # of sft
        known = [("train", row.get("time/step") or 0.0)]
    spans, at = [], row["time"]
    for kind, seconds in reversed(known):
        if seconds > 0:
            spans.append({"start": at - seconds, "end": at, "kind": kind, "text": f"step {row['step']}: {kind}"})
            at -= seconds
    return spans[::-1]


def _lane(name: str, spans: Sequence[Span]) -> Lane:
    return {"name": name, "spans": list(spans)}


def engine_lanes(ledger: LedgerReader, start: float, end: float) -> list[Lane]:
    """A lane per engine, by what it was seen to do: idle, busy, or full (requests wait in it)."""
    lanes: dict[str, list[Span]] = {}
    for row in seen_engines(ledger, start, end):
        for name, load in row["data"].items():
            kind, text = engine_state(load)
            own = lanes.setdefault(name, [])
            if own and own[-1]["kind"] == kind and row["at"] - own[-1]["end"] < _UNSEEN_S:
                own[-1] |= {"end": row["at"], "text": f"{name}: {text}"}
                continue
            if own and row["at"] - own[-1]["end"] < _UNSEEN_S:
                own[-1]["end"] = row["at"]  # what was seen lasts until it is seen again
            own.append({"start": row["at"], "end": row["at"], "kind": kind, "text": f"{name}: {text}"})
    return [_lane(f"engine {name}", lanes[name][-MOST_SPANS:]) for name in sorted(lanes)[:_MOST_ENGINES]]


def engine_state(load: Sequence[float | None]) -> tuple[str, str]:
    """What an engine does, and the same in words; load: as the orchestrator's `engine_loads` writes it."""
    running, waiting, cache, version = load
    kind = "full" if waiting else "busy" if running else "idle"
    words = [f"{kind}, computes {running or 0:g} requests, {waiting or 0:g} wait"]
    words += [] if cache is None else [f"cache {cache:.0%}"]
    words += [] if version is None else [f"version {version:g}"]
    return kind, ", ".join(words)


def seen_engines(ledger: LedgerReader, start: float, end: float) -> list[dict[str, Any]]:
    """The loads of all engines between two times, at most _MOST_SEEN of them, evenly spread."""
    [found] = ledger.rows(_NUM_SEEN, start - _UNSEEN_S, end)
    every = max(1, math.ceil(found["n"] / _MOST_SEEN))
    return ledger.rows(_SEEN, start - _UNSEEN_S, end, every)


_UNSEEN_S = 120.0
"""Nobody looked at the engines for longer: the run did not go on meanwhile."""
_MOST_SEEN = 3000
_MOST_ENGINES = 64
_NUM_SEEN = "SELECT count(*) AS n FROM events WHERE kind = 'engines' AND at BETWEEN ? AND ?"
_SEEN = """
    SELECT at, data FROM (SELECT at, data, row_number() OVER (ORDER BY id) AS number FROM events
                          WHERE kind = 'engines' AND at BETWEEN ? AND ?) WHERE number % ? = 0
"""


def _rollout_lanes(ledger: LedgerReader, start: float, end: float) -> tuple[list[Lane], int]:
    """Rollouts in lanes without overlaps, and one_of: if there are too many, only one of every one_of is shown."""
    low, high = max(0, _row_at(ledger, start) - _SPREAD), _row_at(ledger, end)
    one_of = max(1, math.ceil((high - low) / MOST_SPANS))
    rows = ledger.rows(
        f"""SELECT group_id, member, {SHOWN_STATUS} AS status, reward, first_version, num_sampled_tokens, started_at,
           finished_at FROM rollouts r WHERE row BETWEEN ? AND ? AND row % ? = 0 AND started_at <= ?
           AND coalesce(finished_at, ?) >= ? AND status != 'lost' ORDER BY started_at""",
        low, high, one_of, end, end, start,
    )  # fmt: skip
    spans = [
        {
            "start": row["started_at"],
            "end": row["finished_at"] or end,
            "kind": row["status"],
            "text": f"g{row['group_id']}.{row['member']}: {row['status']}, {row['num_sampled_tokens'] or 0} tokens, "
            f"version {row['first_version']}" + ("" if row["reward"] is None else f", reward {row['reward']:.3g}"),
            "rollout": f"{row['group_id']}.{row['member']}",
        }
        for row in rows
    ]
    lanes = packed(spans)[:MOST_LANES]
    return [_lane(f"rollouts {number}", lane) for number, lane in enumerate(lanes, 1)], one_of


def packed(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans, in the order of their starts, in as few lanes without overlaps as possible."""
    lanes: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # end of a lane's last span, and the lane
    for span in spans:
        if free and free[0][0] <= span["start"]:
            number = heapq.heappop(free)[1]
            lanes[number].append(span)
        else:
            number = len(lanes)
            lanes.append([span])
        heapq.heappush(free, (span["end"], number))
    return lanes


def _row_at(ledger: LedgerReader, start: float) -> int:
    """The first row that started at `start` or later, by bisection: there is no index by time."""
    [ends] = ledger.rows("SELECT min(row) AS low, max(row) AS high FROM rollouts")
    low, high = ends["low"] or 0, ends["high"] or 0
    while low < high:
        middle = (low + high) // 2
        [row] = ledger.rows("SELECT started_at AS at FROM rollouts WHERE row >= ? ORDER BY row LIMIT 1", middle)
        low, high = (middle + 1, high) if (row["at"] or 0.0) < start else (low, middle)
    return low


def _batches(ledger: LedgerReader, start: float, end: float) -> list[Span]:
    query = """SELECT step AS number, shipped_at AS began, trained_at AS ended FROM batches
               WHERE state != 'undone' AND shipped_at <= ? ORDER BY step DESC LIMIT ?"""
    return _open_spans(ledger, query, start, end, "batch", "batch of step {}")


def _versions(ledger: LedgerReader, start: float, end: float) -> list[Span]:
    query = """SELECT version AS number, published_at AS began, loaded_at AS ended FROM versions
               WHERE state != 'undone' AND published_at <= ? ORDER BY id DESC LIMIT ?"""
    return _open_spans(ledger, query, start, end, "weights", "version {} on its way")


def _open_spans(ledger: LedgerReader, query: str, start: float, end: float, kind: str, text: str) -> list[Span]:
    """Spans of the rows of a query, newest first in it; a row that has not ended lasts until `end`."""
    return [
        {"start": row["began"], "end": row["ended"] or end, "kind": kind, "text": text.format(row["number"])}
        for row in reversed(ledger.rows(query, end, MOST_SPANS))
        if (row["ended"] or end) >= start
    ]


def _checkpoints(ledger: LedgerReader, start: float, end: float) -> list[Span]:
    rows = ledger.rows(
        "SELECT step, saved_at FROM checkpoints WHERE state != 'undone' AND saved_at BETWEEN ? AND ?", start, end
    )
    return [
        {"start": row["saved_at"], "end": row["saved_at"], "kind": "save", "text": f"checkpoint {row['step']}"}
        for row in rows
    ]
