"""The logs of all processes as one, by time.

Lines of text say the time of day only, in the zone of the machine that wrote them. The day comes from the file: its
last line was written when it was last changed, and going back, a time that is later than the one after it is of the day
before.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from stretto.base.paths import RunDir

LEVELS = ("debug", "info", "warning", "error", "critical")
TAIL_BYTES = 4 << 20
"""Read of each file, from its end."""
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
    nodes = sorted(run.path.parent.glob(f"{run.path.name}-node-*/logs/*.log"))
    return {path.stem: path for path in [*nodes, *sorted(run.logs.glob("*.log"))]}


def merged(
    run: RunDir,
    *,
    processes: Sequence[str] = (),
    level: str = "debug",
    text: str = "",
    before: float | None = None,
    limit: int = 500,
) -> dict[str, Any]:
    """The newest entries that are wanted, oldest first; `next` is the time to ask before for older ones.

    processes: of these alone, () of all. level: this one or worse. text: which they contain, whatever the case.
    """
    own = {name: path for name, path in files(run).items() if not processes or name in processes}
    least, wanted = LEVELS.index(level), text.casefold()
    newest_first = heapq.merge(
        *(reversed(read(name, path)) for name, path in own.items()), key=lambda line: -line.at
    )
    found: list[Line] = []
    for line in newest_first:
        if (before is not None and line.at >= before) or _rank(line.level) < least:
            continue
        if wanted and wanted not in line.text.casefold():
            continue
        found.append(line)
        if len(found) == limit:
            break
    is_more = len(found) == limit
    return {"lines": [asdict(line) for line in reversed(found)], "next": found[-1].at if is_more else None}


def warnings(run: RunDir) -> list[dict[str, Any]]:
    """Warnings and errors of all processes, each kind once with how often it came, the newest first."""
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for name, path in files(run).items():
        for line in read(name, path):
            if _rank(line.level) >= LEVELS.index("warning"):
                kind = (name, re.sub(r"\d+", "#", line.text.partition("\n")[0])[:200])
                kinds.setdefault(kind, {"count": 0}).update(asdict(line))
                kinds[kind]["count"] += 1
    return sorted(kinds.values(), key=lambda row: -row["at"])[:_MOST_WARNINGS]


def read(process: str, path: Path) -> list[Line]:
    """The entries at the end of a log, in order; [] if it cannot be read."""
    try:
        with path.open("rb") as file:
            size, changed = path.stat().st_size, path.stat().st_mtime
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    if size > TAIL_BYTES:
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
        if (match := _LINE.match(entry)) is not None:
            hour, minute, second, milli, level, _, text = match.groups()
            then = at.replace(
                hour=int(hour), minute=int(minute), second=int(second), microsecond=int(milli) * 1000
            )
            at = then - timedelta(days=1) if then > at + _DAY_BACK else then
            parsed.append(Line(at.timestamp(), process, level.lower(), text))
        elif (row := _json_entry(entry)) is not None:
            at = datetime.fromisoformat(row["time"]).astimezone().replace(tzinfo=None)
            text = row["message"] + ("\n" + row["traceback"] if row.get("traceback") else "")
            parsed.append(Line(at.timestamp(), process, row["level"], text))
        else:  # of a library, or before the log was set up
            parsed.append(Line(at.timestamp(), process, "info", entry))
    yield from reversed(parsed)


def _json_entry(entry: str) -> dict[str, Any] | None:
    try:
        row = json.loads(entry)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"time", "message", "level"} <= set(row) else None


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")
