"""Metrics as curves, smoothed and thinned on the server: 10,000 steps cost a browser no more than 1000."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stretto.monitors.catalog import find_metric
from stretto.monitors.file import MERGED_TOKENS

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

MOST_POINTS = 1000
"""Points per curve, at most, unless a request has another number."""
AXES = ("step", "time", "tokens")
FIRST = ("reward/mean", "nll/mean", "entropy/mean", "completion/mean", "mismatch_kl/mean", "tokens_per_s", "loss/mean")
"""Shown first, where a run has them."""
_FRAME = frozenset({"step", "time", "incarnation", "resumed_step", MERGED_TOKENS})


def names(rows: Rows) -> list[dict[str, str]]:
    """Every metric of a run with its unit and meaning, those of FIRST first."""
    found = {key for own in rows.values() for row in own for key in row} - _FRAME
    order = sorted(found, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key))
    return [{"name": key, **_about(key)} for key in order]


def _about(key: str) -> dict[str, str]:
    metric = find_metric(key)
    if metric is None:
        return {"unit": "", "meaning": "", "reading": ""}
    return {"unit": metric.unit, "meaning": metric.meaning, "reading": metric.reading}


def curve(
    rows: Rows, key: str, *, axis: str = "step", smooth: float = 0.0, points: int = MOST_POINTS
) -> dict[str, Any]:
    """One metric: x, y and smoothed y as lists of equal lengths, at most about `points` long.

    axis: "step", "time" (hours since the run's first row) or "tokens" (trained since the run began: sampled ones of rl,
    all of sft). smooth: share of the rows over which the moving mean goes, 0 for none. Where rows are left out, the
    largest and the smallest stay. Values that are not finite are None.
    """
    x, y = _columns(rows, key, axis)
    smoothed = _moving_mean(y, smooth) if smooth > 0 and len(y) > 2 else y
    kept = _kept(y, points)
    return {
        "x": x[kept].tolist(),
        "y": _json(y[kept]),
        "smooth": _json(smoothed[kept]),
        "num_rows": len(y),
        "last": _json(y[-1:])[0] if len(y) else None,
    }


def _columns(rows: Rows, key: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    own = next((own for own in rows.values() if any(key in row for row in own)), [])
    chosen = [row for row in own if key in row and isinstance(row[key], int | float)]
    y = np.array([row[key] for row in chosen], np.float64)
    if axis == "time":
        began = min((row["time"] for own in rows.values() for row in own[:1]), default=0.0)
        return np.array([(row["time"] - began) / 3600 for row in chosen], np.float64), y
    if axis == "tokens":
        tokens = _tokens(rows)
        x = np.array([tokens.get(row["step"], math.nan) for row in chosen], np.float64)
        has = np.isfinite(x)
        return x[has], y[has]
    return np.array([row["step"] for row in chosen], np.float64), y


def _tokens(rows: Rows) -> dict[int, float]:
    """Tokens by step. What one process counted starts anew when it is resumed, so sft's batches are added up."""
    counted = {row["step"]: row[_TOKENS] for own in rows.values() for row in own if _TOKENS in row}
    if counted:
        return counted
    batches = [row for row in rows.get("sft", ()) if "batch/tokens" in row]
    sums = np.cumsum([row["batch/tokens"] + row.get(MERGED_TOKENS, 0) for row in batches]).tolist()
    return {row["step"]: tokens for row, tokens in zip(batches, sums)}


_TOKENS = "progress/tokens"


def _moving_mean(y: np.ndarray, share: float) -> np.ndarray:
    """The centred moving mean of finite values; its window is shorter at both ends."""
    reach = max(1, int(len(y) * share / 2))
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(y))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(y))
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


def _kept(y: np.ndarray, points: int) -> np.ndarray:
    """Indices of the smallest and the largest value of each of points / 2 stretches, and of both ends."""
    if len(y) <= points:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), max(points // 2, 1) + 1).astype(int)
    low, high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    chosen = [0, len(y) - 1]
    for start, end in itertools.pairwise(edges):
        chosen += [start + int(low[start:end].argmin()), start + int(high[start:end].argmax())]
    return np.unique(chosen)


def _json(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
