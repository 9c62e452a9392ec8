"""Metrics of one run or several over their steps, as a matplotlib figure; one colour per run everywhere."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, reason_of
from stretto.monitors.file import moving_mean

KEYS = {
    "reward/mean": "mean reward of the training batch",
    "completion/mean": "tokens per reply",
    "entropy/mean": "entropy (nats per token)",
    "mismatch_kl/mean": "mismatch KL (nats per token)",
}
SFT_KEYS = {"nll/mean": "loss (nats per token)", "optim/grad_norm": "gradient norm"}
"""Keys that are drawn for an `rl` run or an `sft` run if none is named, each with the label of its axis."""
_COLORS = ("#1f5fa8", "#d1495b", "#2a9d6f", "#c98a1b", "#7b4fa3", "#4f7c8a", "#8a5a44", "#666666")
_DASHES = ("-", "--", ":", "-.")  # after eight runs the colours come again, with other lines


def plot(runs: Mapping[str, Sequence[dict[str, Any]]], keys: Sequence[str] = (), path: Path | str | None = None) -> Any:
    """A panel per key with a line per run: logged values are light, their moving mean is dark.

    runs: by name, the rows of `Run.metrics`. The band around a reward is the standard error of its batch's mean.
    path: where the picture is written too.

    Raises: ConfigError when no run has one of the keys, or matplotlib is not installed.
    """
    try:
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        raise ConfigError("plot: curves are drawn by matplotlib; pip install 'stretto[plot]'") from None

    rows = {name: [row for row in own if row["step"] > 0] for name, own in runs.items()}
    usual = KEYS if any("reward/mean" in row for own in rows.values() for row in own) else SFT_KEYS
    names = list(keys) or [key for key in usual if any(key in row for own in rows.values() for row in own)]
    _check(names, rows)
    columns = min(2, len(names))
    lines = math.ceil(len(names) / columns)
    figure = new_figure(5.2 * columns, 3.2 * lines)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, key in zip(panels, names):
        for number, (name, own) in enumerate(rows.items()):
            _draw(axes, own, key, name, color=_COLORS[number % len(_COLORS)], dash=_DASHES[number // len(_COLORS) % 4])
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel({**KEYS, **SFT_KEYS}.get(key, key))
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if len(rows) > 1:
        lines_of = {line.get_label(): line for axes in panels for line in axes.get_legend_handles_labels()[0]}
        figure.legend(lines_of.values(), lines_of, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    else:
        figure.suptitle(next(iter(rows)), x=0.01, ha="left", fontweight="bold")
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
            raise ConfigError(f"plot: cannot write {path}: {_why(error, Path(path))}") from error
    return figure


def _why(error: Exception, path: Path) -> str:
    """Why a picture cannot be written, and what to do."""
    if isinstance(error, FileNotFoundError):
        return f"there is no directory {path.parent}; make it first"
    if isinstance(error, OSError):
        return reason_of(error, path)
    return f"{path.suffix or path.name!r} is no format of pictures; end the name with .png, .svg or .pdf"


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches, which a notebook shows without a window system."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=80)
            return buffer.getvalue()

    return Shown(figsize=(width, height), dpi=160, layout="constrained")


def _draw(axes: Any, rows: Sequence[dict[str, Any]], key: str, name: str, *, color: str, dash: str) -> None:
    rows = [row for row in rows if math.isfinite(row.get(key, math.nan))]
    if not rows:
        return
    steps, values = [row["step"] for row in rows], [row[key] for row in rows]
    mean = moving_mean(values)
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(steps, mean, color=color, linewidth=2, linestyle=dash, label=name)
    if key == "reward/mean":
        errors = [_standard_error(row) for row in rows]
        low, high = ([m + sign * e for m, e in zip(mean, errors)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _standard_error(row: dict[str, Any]) -> float:
    """The standard error of a batch's mean reward; its rollouts are those of the run so far, divided by the steps."""
    num_rollouts = max(1.0, row.get("progress/rollouts", 1.0) / row["step"])
    return row.get("reward/std", 0.0) / math.sqrt(num_rollouts)


def _check(keys: Sequence[str], rows: dict[str, list[dict[str, Any]]]) -> None:
    known = sorted({key for own in rows.values() for row in own for key in row})
    if not known:
        raise ConfigError(f"plot: {', '.join(rows)}: no step is logged yet.")
    for key in keys:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=3) or [name for name in known if key in name][:5]
            raise ConfigError(
                f"plot: no run has logged {key!r}" + (f"; did you mean {', '.join(near)}?" if near else ".")
            )
