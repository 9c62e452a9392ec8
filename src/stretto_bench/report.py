"""The result of a bench as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, smallest and largest seconds of each `time/...` key of rows that have it."""
    found = {}
    names = sorted({key for row in rows for key in row if key.startswith(("time/", "trainer/time/"))})
    for name in names:
        values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
        if values:
            found[name] = {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
    return found


def as_table(result: Mapping[str, Any]) -> str:
    """The result in aligned lines: shape, rates, seconds by phase, memory."""
    lines = [f"{key:<28} {value}" for key, value in result["shape"].items()]
    lines.append("")
    for key, value in result["rates"].items():
        lines.append(f"{key:<28} {'unknown' if value is None else f'{value:,.4g}'}")
    if notes := result.get("notes"):
        lines += ["", *notes]
    lines += ["", f"{'seconds per step':<28} {'mean':>10} {'min':>10} {'max':>10}"]
    for name, values in result["phases"].items():
        lines.append(f"{name:<28} {values['mean']:>10.4f} {values['min']:>10.4f} {values['max']:>10.4f}")
    lines += ["", f"{'peak memory':<28} {'MiB':>10}"]
    lines += [f"{name:<28} {mib:>10,.0f}" for name, mib in result["peak_memory_mib"].items()]
    return "\n".join(lines)
