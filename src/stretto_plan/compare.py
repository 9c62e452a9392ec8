"""`stretto plan --compare RUN`: figures predicted from a run's config beside those of its ledger and metrics."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto_plan.simulation.run import SftTimes, Times, read_ledger
from stretto_python.run import Run

FIRST = 5
"""Steps left out: the pipeline fills, and files are read for the first time."""


@dataclass(frozen=True)
class Line:
    """One figure, predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Relative to what was measured; None where that is 0."""
        return None if not self.measured else self.predicted / self.measured - 1


def compare(times: Times, run: Path) -> list[Line]:
    """Predicted figures beside a run's.

    Raises: ConfigError for a directory that is no run, or a run without enough steps; DataError for a damaged ledger.
    """
    rows = _compared_rows(run, "orchestrator")
    steps = [int(row["step"]) for row in rows]
    found = read_ledger(RunDir(run), steps[0], steps[-1])
    mean = lambda key: statistics.mean(row[key] for row in rows if key in row)
    return [
        Line("step, s", times.step_s, mean("time/step")),
        Line("trainer works, s", times.train_s, mean("trainer/step_s") - mean("trainer/wait_s")),
        Line("trainer waits, s", times.trainer_wait_s, mean("trainer/wait_s")),
        Line("update of the engines, s", times.load_s, mean("time/update_weights")),
        Line("staleness, mean", times.staleness_mean, found.staleness_mean),
        Line("staleness, 95 %", times.staleness_p95, found.staleness_p95),
        Line("sampled tokens per step", times.sampled_tokens, found.sampled_tokens),
        Line("tokens per second", times.tokens_per_s, found.sampled_tokens / mean("time/step")),
    ]


def compare_sft(times: SftTimes, run: Path) -> list[Line]:
    """Predicted figures of `sft` beside a run's.

    Raises: ConfigError for a directory that is no run, or a run without enough steps.
    """
    rows = _compared_rows(run, "sft")
    mean = lambda key: statistics.mean(row[key] for row in rows if key in row)
    return [
        Line("step, s", times.step_s, mean("time/step")),
        Line("passes, s", times.passes_s, mean("time/forward_backward")),
        Line("update, s", times.update_s, mean("time/optim")),
        Line("tokens per step", times.tokens, mean("batch/tokens")),
        Line("rows per step", times.rows, mean("batch/micro_batches")),
        Line("tokens per second", times.tokens_per_s, mean("batch/tokens") / mean("time/step")),
    ]


def _compared_rows(run: Path, process: str) -> list[dict[str, Any]]:
    """Raises: ConfigError if the run has no step after the first ones."""
    if rows := measured_rows(run, process)[FIRST:]:
        return rows
    raise ConfigError(f"--compare {run}: fewer than {FIRST + 1} trained steps; there is nothing to compare with yet")


def measured_rows(run: Path, process: str = "orchestrator") -> list[dict[str, Any]]:
    """The rows of metrics of a run's steps, without those that a resume has undone.

    Raises: ConfigError for a directory that is no run, or has no such metrics.
    """
    found = Run(run)
    path = found.dir.metrics(process)
    if not path.exists():
        verb = "sft" if process == "sft" else "rl"
        raise ConfigError(f"{path} is missing: this is no run of `{verb}`, or the file was deleted")
    return [row for row in found.metrics() if "time/step" in row]
