"""The metrics file: one JSON object per line, only ever appended; and the function that reads it.

A line is {"step": n, "time": unix seconds, "incarnation": k, name: value, ...}. Every opening of the file starts a new
incarnation with a line {"incarnation": k, "resumed_step": n or null, "time": ...}. A resumed run repeats steps, and
the reader returns the newest rows: rows of older incarnations after the resumed step (or, if that is null, from the
first step that the newer incarnation logged) are superseded. A value that is not finite is written as null and read
as nan.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from stretto.base.errors import DataError
from stretto.monitors.tables import images_of

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_TAIL_BYTES = 1 << 16


class MetricsFile:
    """Writes the file. A row is one unbuffered write call, so a killed process loses no row."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._images = path.parent / "images"
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.incarnation = _repair_last_line(self._fd) + 1
        self._write({"incarnation": self.incarnation, "resumed_step": resumed_step, "time": time.time()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, "time": time.time(), "incarnation": self.incarnation, **metrics})

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Images of row i as images/<name>-<step>-<i>-<j>.png; texts are in files of their own, such as RUN/evals."""
        for i, row in enumerate(rows):
            for j, png in enumerate(images_of(row)):
                self._images.mkdir(exist_ok=True)
                (self._images / f"{name.replace('/', '-')}-{step}-{i}-{j}.png").write_bytes(png)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, row: dict[str, Any]) -> None:
        if self._fd is None:
            raise ValueError("the metrics file is closed")
        os.write(self._fd, orjson.dumps(row, default=_to_json, option=_OPTIONS))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """One merged row per step, in step order, without superseded rows; [] if there is no file.

    Lines that a crash cut off are skipped. Raises: DataError for a file that cannot be read.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    rows: dict[int, dict[str, Any]] = {}
    resumed: int | None = None
    is_new = False  # an incarnation without resumed_step has begun: its first row says where
    for line in lines:
        row = _parse(line)
        if row is None:
            continue
        if "step" not in row:
            resumed, is_new = row.get("resumed_step"), row.get("resumed_step") is None
            if resumed is not None:
                rows = {step: old for step, old in rows.items() if step <= resumed}
            continue
        step = row["step"]
        if not isinstance(step, int):
            continue
        if is_new:
            rows, is_new = {s: old for s, old in rows.items() if s < step}, False
        rows.setdefault(step, {}).update((k, math.nan if v is None else v) for k, v in row.items())
    return [rows[step] for step in sorted(rows)]


def moving_mean(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a twentieth of the values; shorter at the ends."""
    reach = max(1, len(values) // 40)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _repair_last_line(fd: int) -> int:
    """End a line that a crash cut off; returns the last incarnation in the file, 0 if there is none."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    if os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")
    end = os.fstat(fd).st_size
    span = _TAIL_BYTES
    while True:
        start = max(end - span, 0)
        for line in reversed(os.pread(fd, end - start, start).splitlines()):
            row = _parse(line)
            if row is not None and isinstance(row.get("incarnation"), int):
                return int(row["incarnation"])
        if start == 0:
            return 0
        span *= 2


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _to_json(value: Any) -> Any:
    """A 0-d array or tensor as a number, any other value as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else str(value)
