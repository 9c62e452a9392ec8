"""The logs of all processes as one, by time.

A line of text has the time of day only, in the time zone of its machine. The day comes from the file: its last line was
written when the file was last changed. Going back from there, a time later than that of the following line belongs to
the day before.
"""

from __future__ import annotations

import glob
import heapq
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from stretto.base.paths import RunDir

LEVELS = ("debug", "info", "warning", "error", "critical")
TAIL_BYTES = 4 << 20
"""Bytes that are read of each file, from its end; fewer if there are very many files."""
_ALL_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
_WARNINGS_BYTES = 1 << 20
_LINE = re.compile(r"(\d\d):(\d\d):(\d\d)\.(\d{3}) (\w+) +([^|]*?) \| (.*)", re.DOTALL)
_DAY_BACK = timedelta(hours=1)  # clocks and threads differ by less
_MOST_WARNINGS = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One entry; lines without a time, such as those of a traceback, belong to the one before them."""

    at: float  # unix seconds
    process: str
    level: str
    text: str


def files(run: RunDir) -> dict[str, Path]:
    """Logs by process, those of other nodes included."""
    place = run.path.resolve()
    nodes = sorted(place.parent.glob(f"{glob.escape(place.name)}-node-*/logs/*.log"))
    own = {path.stem: path for path in sorted(run.logs.glob("*.log"))}
    return {path.stem if path.stem not in own else f"{path.stem} {_node(path)}": path for path in nodes} | own


def merged(
    run: RunDir,
    *,
    processes: Sequence[str] = (),
    level: str = "debug",
    text: str = "",
    before: float | None = None,
    limit: int = 500,
) -> dict[str, Any]:
    """The newest entries that meet the conditions, oldest first; `next`, given as `before`, leads to older ones.

    processes: (): all. level: this one or worse. text: must be contained, in any case. before: unix seconds.
    """
    own = {name: path for name, path in files(run).items() if not processes or name in processes}
    num_bytes = max(_LEAST_BYTES, min(TAIL_BYTES, _ALL_BYTES // max(1, len(own))))
    least, text = LEVELS.index(level), text.casefold()
    newest_first = heapq.merge(
        *(reversed(read(name, path, num_bytes)) for name, path in own.items()), key=lambda line: -line.at
    )
    found: list[Line] = []
    is_more = False
    for line in newest_first:
        if (before is not None and line.at >= before) or _rank(line.level) < least:
            continue
        if text and text not in line.text.casefold():
            continue
        if len(found) >= limit and line.at < found[-1].at:  # the next page begins before a time
            is_more = True
            break
        found.append(line)
    return {"lines": [asdict(line) for line in reversed(found)], "next": found[-1].at if is_more else None}


def warnings(run: RunDir) -> list[dict[str, Any]]:
    """Warnings and errors of all processes, newest first; equal ones (but for numbers) are one row with a count."""
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for name, path in files(run).items():
        for line in _warned(name, path, _stamp(path)):
            kind = (name, re.sub(r"\d+", "#", line.text.partition("\n")[0])[:200])
            kinds.setdefault(kind, {"count": 0}).update(asdict(line))
            kinds[kind]["count"] += 1
    return sorted(kinds.values(), key=lambda row: -row["at"])[:_MOST_WARNINGS]


@lru_cache(maxsize=1024)
def _warned(process: str, path: Path, stamp: tuple[int, int]) -> tuple[Line, ...]:
    """Warnings and errors at the end of a log; read again only when it has changed."""
    lines = read(process, path, _WARNINGS_BYTES)
    return tuple(deque((line for line in lines if _rank(line.level) >= LEVELS.index("warning")), 1000))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        return path.stat().st_size, path.stat().st_mtime_ns
    except OSError:
        return 0, 0


def _node(path: Path) -> str:
    """node-3 of RUN-node-3/logs/trainer.log."""
    return "node-" + path.parent.parent.name.rpartition("-node-")[2]


def read(process: str, path: Path, num_bytes: int = TAIL_BYTES) -> list[Line]:
    """The entries at the end of a log, in order; [] if it cannot be read."""
    try:
        with path.open("rb") as file:
            size, changed = path.stat().st_size, path.stat().st_mtime
            file.seek(max(0, size - num_bytes))
            text = file.read(num_bytes).decode(errors="replace")
    except OSError:
        return []
    if size > num_bytes:
        text = text.partition("\n")[2]
    return list(_dated(process, list(_entries(text)), changed))


def _entries(text: str) -> Iterator[str]:
    """Entries with the lines that belong to them."""
    held: list[str] = []
    for line in text.splitlines():
        if held and (_LINE.match(line) or line.startswith("{")):
            yield "\n".join(held)
            held = []
        held.append(line)
    if held:
        yield "\n".join(held)


def _dated(process: str, entries: list[str], changed: float) -> Iterator[Line]:
    parsed: list[Line] = []
    at = datetime.fromtimestamp(changed)
    for entry in reversed(entries):
        if (match := _LINE.match(entry)) is not None and (then := _at_time(at, match)) is not None:
            level, _, text = match.groups()[4:]
            at = then - timedelta(days=1) if then > at + _DAY_BACK else then
            parsed.append(Line(at.timestamp(), process, level.lower(), text))
        elif (row := _json_entry(entry)) is not None:
            at = datetime.fromisoformat(row["time"]).astimezone().replace(tzinfo=None)
            text = row["message"] + (f"\n{row['traceback']}" if row.get("traceback") else "")
            parsed.append(Line(at.timestamp(), process, row["level"], text))
        else:  # written by a library, or before the log was set up
            parsed.append(Line(at.timestamp(), process, "info", entry))
    yield from reversed(parsed)


def _at_time(day: datetime, match: re.Match[str]) -> datetime | None:
    """This time of this day; None if it is not a valid time, as in a line that only looks like an entry."""
    hour, minute, second, milli = map(int, match.groups()[:4])
    try:
        return day.replace(hour=hour, minute=minute, second=second, microsecond=milli * 1000)
    except ValueError:
        return None


def _json_entry(entry: str) -> dict[str, Any] | None:
    """A line of a log in JSON; None for any other."""
    try:
        row = json.loads(entry) if entry.startswith("{") else None
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _JSON_KEYS):
            return None
        datetime.fromisoformat(row["time"])
    except (ValueError, RecursionError):
        return None
    return row


_JSON_KEYS = ("time", "message", "level")


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")
