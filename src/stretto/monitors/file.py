"""The metrics file: one JSON object per line, only ever appended; and the function that reads it.

A line is {"step": n, "time": unix seconds, "incarnation": k, name: value, ...}. Every opening of the file starts a new
incarnation with a line {"incarnation": k, "resumed_step": n or null, "time": ...}. A resumed run repeats steps, and
the reader returns the newest rows: rows of older incarnations after the resumed step (or, if that is null, from the
first step that the newer incarnation logged) are superseded. A value that is not finite is written as null and read
as nan.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.base.errors import DataError
from stretto.monitors.monitor import Monitor, TableRow, images_of

_TAIL_BYTES = 1 << 16
_READ_BYTES = 1 << 22
MERGED_TOKENS = "batch/tokens merged"
"""In a row that stands for several: the tokens of the batches of those before it."""
_FRAME = frozenset({"step", "time", "incarnation"})
_KEPT_AS_THEY_ARE = 500  # the newest rows, when older ones are merged
_MAX_ROWS_BACK = 20  # `newest_row` looks at so many rows


class MetricsFile(Monitor):
    """Writes the file. A row is one unbuffered write call, so a killed process loses no row."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._images = path.parent / "images"
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.incarnation = _repair_last_line(self._fd) + 1
        self._write({"incarnation": self.incarnation, "resumed_step": resumed_step, "time": time.time()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, "time": time.time(), "incarnation": self.incarnation, **metrics})

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Write image j of row i to images/<name>-<step>-<i>-<j>.png; other files of the run have the texts."""
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
        os.write(self._fd, msgspec.json.encode(row, enc_hook=_to_json) + b"\n")


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """One merged row per step, in step order, without superseded rows; [] if there is no file.

    Lines that a crash cut off are skipped. Raises: DataError for a file that cannot be read.
    """
    tail = MetricsTail(path)
    tail.refresh()
    return tail.rows()


class MetricsTail:
    """The rows of a metrics file that may still grow.

    With max_rows, its memory does not grow with the run: of more rows, older neighbours are merged. A merged row has
    the step of its last one, and of every metric the value that is farthest from the mean, so that no peak disappears.
    """

    def __init__(self, path: Path | str, *, max_rows: int | None = None) -> None:
        assert max_rows is None or max_rows > 2 * _KEPT_AS_THEY_ARE
        self._path, self._max_rows = Path(path), max_rows
        self._stride = 1  # steps that a merged row stands for
        self._rows: dict[int, dict[str, Any]] = {}
        self._end = 0  # bytes read
        self._is_new = False  # an incarnation without resumed_step has begun; its first row supersedes later steps

    def rows(self) -> list[dict[str, Any]]:
        """One merged row per step, in step order, without superseded rows."""
        return [self._rows[step] for step in sorted(self._rows)]

    def refresh(self) -> bool:
        """Read what was written since the last call; returns whether there was anything.

        A file that became shorter was replaced, so it is read from its beginning.

        Raises: DataError for a file that cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._end:
                    self._rows, self._end, self._is_new, self._stride = {}, 0, False, 1
                file.seek(self._end)
                begin, cut = self._end, b""
                while text := file.read(_READ_BYTES):
                    cut = self._add_lines(cut + text)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        return self._end > begin

    def _add_lines(self, text: bytes) -> bytes:
        """Add the whole lines at the beginning of a text; returns the rest."""
        whole = text.rfind(b"\n") + 1
        for line in text[:whole].splitlines():
            self._add(line)
        self._end += whole
        return text[whole:]

    def _add(self, line: bytes) -> None:
        row = _parse(line)
        if row is None:
            return
        if "step" not in row:
            resumed = row.get("resumed_step")
            self._is_new = resumed is None
            if resumed is not None:
                self._rows = {step: old for step, old in self._rows.items() if step <= resumed}
            return
        step = row["step"]
        if not isinstance(step, int):
            return
        if self._is_new:
            self._rows, self._is_new = {s: old for s, old in self._rows.items() if s < step}, False
        new = row if None not in row.values() else {k: math.nan if v is None else v for k, v in row.items()}
        self._rows[step] = self._rows.get(step, {}) | new  # a row that a caller has does not change
        if self._max_rows is not None and len(self._rows) > self._max_rows:
            self._merge(self._max_rows)

    def _merge(self, max_rows: int) -> None:
        """Merge all but the first row and the newest ones, so that at most half of max_rows remain."""
        steps = sorted(self._rows)
        old, new = steps[1:-_KEPT_AS_THEY_ARE], [steps[0], *steps[-_KEPT_AS_THEY_ARE:]]
        while len({step // self._stride for step in old}) > max_rows // 2 - _KEPT_AS_THEY_ARE:
            self._stride *= 2
        sizes = [len(list(group)) for _, group in itertools.groupby(old, key=lambda step: step // self._stride)]
        merged = _merged([self._rows[step] for step in old], sizes)
        self._rows = {row["step"]: row for row in merged} | {step: self._rows[step] for step in new}


def _merged(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """One row for each group of neighbours, in step order; sizes: of the groups."""
    ends = np.cumsum(sizes)
    starts = ends - np.asarray(sizes)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    merged: list[dict[str, Any]] = [{} for _ in sizes]
    for key, column in _columns(rows).items():
        distance = _distances(column)
        farthest = np.maximum.reduceat(distance, starts)
        hits = np.flatnonzero(distance == farthest[group_of])
        first = hits[np.unique(group_of[hits], return_index=True)[1]].tolist()
        is_last = key in _FRAME or key.startswith("progress/")
        for found, at, end in zip(merged, first, ends.tolist()):
            value = column[end - 1] if is_last and column[end - 1] is not None else column[at]
            if value is not None:
                found[key] = value
    tokens = np.array([row.get("batch/tokens", 0) + row.get(MERGED_TOKENS, 0) for row in rows], np.float64)
    for found, size, total in zip(merged, sizes, np.add.reduceat(tokens, starts).tolist()):
        if size > 1 and total:
            found[MERGED_TOKENS] = total - found.get("batch/tokens", 0)
    return merged


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every name, None where a row has none. Neighbours mostly have the same names, in one order."""
    found: dict[str, list[Any]] = {}
    begin = 0
    for names, group in itertools.groupby(rows, key=tuple):
        values = [tuple(row.values()) for row in group]
        for name, column in zip(names, zip(*values)):
            found.setdefault(name, [None] * len(rows))[begin : begin + len(values)] = column
        begin += len(values)
    return found


def _distances(column: Sequence[Any]) -> np.ndarray:
    """How far each value is from the mean of the finite ones; -1 for what is no number, -2 for what is missing."""
    try:
        numbers = np.array(column, np.float64)  # None becomes nan
    except (TypeError, ValueError):
        numbers = np.array([value if isinstance(value, int | float) else math.nan for value in column], np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        numbers[:] = math.nan
    with np.errstate(invalid="ignore"):
        distance = np.abs(numbers - (numbers[finite].mean() if finite.any() else 0.0))
    distance[np.isnan(distance)] = -1.0
    if None in column:
        distance[[value is None for value in column]] = -2.0
    return distance


def newest_row(path: Path, name: str) -> dict[str, Any]:
    """The newest row that has this name; if none of the last rows has it, the newest row of a step, or {}.

    Several rows are read because an eval of an earlier step may be logged after a later step.
    """
    newest: dict[str, Any] = {}
    with path.open("rb") as file:
        for row in itertools.islice(_rows_from_end(file.fileno()), _MAX_ROWS_BACK):
            if name in row:
                return row
            newest = newest or (row if "step" in row else {})
    return newest


def newest_rows(path: Path, num: int) -> list[dict[str, Any]]:
    """The last `num` of `read_metrics`, without reading what is before them; [] if there is no file.

    Raises: DataError for a file that cannot be read.
    """
    found: dict[int, dict[str, Any]] = {}
    last: float = math.inf  # later steps of what is before here are superseded
    first: int | None = None  # the step of the row behind the one that is looked at, in its incarnation
    try:
        with path.open("rb") as file:
            for row in _rows_from_end(file.fileno()):
                step = row.get("step")
                if "step" not in row:
                    resumed = row.get("resumed_step")
                    before = resumed if resumed is not None else math.inf if first is None else first - 1
                    last, first = min(last, before), None
                elif isinstance(step, int):
                    first = step
                    if step > last:
                        continue
                    if len(found) > num and step < min(found):
                        break
                    found[step] = {k: math.nan if v is None else v for k, v in row.items()} | found.get(step, {})
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return [found[step] for step in sorted(found)][-num:]


def is_number(value: Any) -> bool:
    """Can a row's value be drawn and averaged?"""
    return isinstance(value, int | float) and math.isfinite(value)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a twentieth of the values; shorter at the ends."""
    reach = max(1, len(values) // 40)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _repair_last_line(fd: int) -> int:
    """Add the line end that a crash cut off; returns the last incarnation in the file, or 0."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    if os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")
    numbered = (row["incarnation"] for row in _rows_from_end(fd) if isinstance(row.get("incarnation"), int))
    return int(next(numbered, 0))


def _rows_from_end(fd: int) -> Iterator[dict[str, Any]]:
    """The rows of the file, newest first; reads further back only as far as the caller iterates."""
    end, span, num_seen = os.fstat(fd).st_size, _TAIL_BYTES, 0
    while True:
        start = max(end - span, 0)
        lines = os.pread(fd, end - start, start).splitlines()
        whole = lines[start > 0 :]  # the first may be cut
        for line in reversed(whole[: len(whole) - num_seen]):
            if (row := _parse(line)) is not None:
                yield row
        if start == 0:
            return
        num_seen, span = len(whole), span * 2


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    return row if isinstance(row, dict) else None


def _to_json(value: Any) -> Any:
    """A 0-d array or tensor as a number, any other value as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else str(value)
