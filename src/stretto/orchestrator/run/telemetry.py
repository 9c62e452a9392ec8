"""Reports about a step: one row of metrics, one status line.

A row is built when the batch is shipped (rewards, staleness, counts). It is logged when the step is trained,
together with the trainer's metrics, so that metrics/orchestrator.jsonl alone has every curve.
Names follow prime-rl's. What they mean is in monitors/catalog.py, from which the page metrics.md is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from stretto.base.status import report
from stretto.orchestrator.beside import EVENT
from stretto.orchestrator.eval_scores import EvalScore, mean_over_envs
from stretto.orchestrator.run.parts import Measured, RunParts, StepRow, build_diagnosis
from stretto.records.control import StepDone

logger = logging.getLogger(__name__)

STATUS_METRICS = {
    "time_s": "time/step",
    "reward": "reward/mean",
    "loss": "loss/mean",
    "mismatch_kl": "mismatch_kl/mean",
    "entropy": "entropy/mean",
    "length": "completion/mean",
    "truncated": "completion/truncated_share",
    "staleness": "off_policy/mean",
    "staleness_max": "off_policy/max",
    "tokens_per_s": "tokens_per_s",
    "budget": "budget/share",
    "budget_step": "budget/last_step",
}
"""The metric of each field of a step's status."""


def merge_metrics(row: dict[str, float], trainer: Mapping[str, float]) -> dict[str, float]:
    """The row and the trainer's metrics together.

    If both have a name, the orchestrator's keeps it and the trainer's becomes `trainer/<name>`.
    """
    return {(f"trainer/{name}" if name in row else name): value for name, value in trainer.items()} | row


def report_step(step: int, max_steps: int | None, row: Mapping[str, float], waits: dict[str, float]) -> None:
    """Print the step's line on the console."""
    values = {field: row.get(name) for field, name in STATUS_METRICS.items()}
    report("step", step=step, max_steps=max_steps, **values, waits=waits)


def report_eval(version: int, scores: Sequence[EvalScore]) -> None:
    """Print the eval's line: means over environments."""
    names = {score.env for score in scores}
    env = names.pop() if len(names) == 1 else None
    report(
        "eval",
        step=version,
        env=env,
        sampled=mean_over_envs(scores, "sampled"),
        greedy=mean_over_envs(scores, "greedy"),
    )


def _warn(texts: Sequence[str]) -> None:
    for text in texts:
        logger.warning(text)


class StepReports:
    """Reports trained steps: progress, metrics, the line on the console, and warnings."""

    def __init__(self, run: RunParts, measured: Sequence[Measured]) -> None:
        """measured: what also has a part in the row of a step."""
        self._diagnosis = build_diagnosis(run)
        self._parts, self._measured = run, measured
        now = time.perf_counter()
        # As if earlier incarnations had ended just before this one.
        self._wall_from = now - run.progress.wall_s
        self._train_from = self._step_done_at = now

    def begin(self) -> None:
        """Count the time of training from now on: the first task is drawn."""
        self._parts.purse.begin(self._parts.progress.step)
        self._step_done_at = time.perf_counter()
        self._train_from = self._step_done_at - self._parts.progress.train_s

    def count_so_far(self) -> None:
        """Store the time since the run began, without that between its starts, and what was asked beside the policy."""
        self._parts.progress.wall_s = time.perf_counter() - self._wall_from
        if counts := {each.name: dict(each.counts) for each in self._parts.beside.spendings if each.counts}:
            self._parts.ledger.event(EVENT, counts)

    def report(self, done: StepDone, row: StepRow) -> None:
        """Count and report a trained step."""
        run, step = self._parts, done.step
        self._count(done, row)
        metrics, waits = self._metrics_of(done, row)
        report_step(step, run.cfg.max_steps, metrics, waits)
        run.monitors.log(step, metrics)
        if row.examples:
            run.monitors.log_table(step, "train/samples", row.examples)
        if row.distributions:
            run.monitors.log_histograms(step, row.distributions)
        if self._diagnosis is not None:
            _warn(self._diagnosis.add(metrics))
        run.watch.progress(f"step {step} trained")

    def report_eval(self, version: int, scores: Sequence[EvalScore]) -> None:
        """Report an eval of the held-out tasks."""
        report_eval(version, scores)
        if self._diagnosis is not None:
            _warn(self._diagnosis.add_eval({each.env: each.mean for each in scores if each.mode == "sampled"}))

    def verdict(self) -> str | None:
        """One line about whether this start learned; None after too few steps."""
        return None if self._diagnosis is None else self._diagnosis.verdict()

    def _count(self, done: StepDone, row: StepRow) -> None:
        progress = self._parts.progress
        progress.step = done.step
        progress.num_rollouts += row.num_rollouts
        progress.num_tokens += row.num_tokens
        progress.train_s = time.perf_counter() - self._train_from
        self.count_so_far()
        mismatch = done.metrics.get("mismatch_kl/mean")
        if mismatch is not None:
            progress.mismatch_kl_max = max(mismatch, progress.mismatch_kl_max or mismatch)

    def _metrics_of(self, done: StepDone, row: StepRow) -> tuple[dict[str, float], dict[str, float]]:
        """The step's row of metrics, and the share of the step that each process waited."""
        run, now = self._parts, time.perf_counter()
        step_s, self._step_done_at = now - self._step_done_at, now
        metrics = row.metrics | {
            "time/step": step_s,
            "time/wait_for_trainer": row.idle_s,
            "time/wait_for_rollouts": done.wait_s,
            "time/update_weights": run.versions.load_s,
            "canary/error": run.versions.canary_error,
            "canary/groups": float(run.versions.num_compared),
            # A user's function that plays need not say which version has sampled what it returns.
            "canary/tolerance": run.versions.canary_tolerance if run.rollout_function is None else 0.0,
            **({} if (error := run.versions.rollout_error) is None else {"canary/rollout_error": error}),
            **{name: value for each in self._measured for name, value in each.gauges().items()},
            # The ends of two steps may arrive together: then only the trainer knows how long the second one took.
            "tokens_per_s": row.num_tokens / max(step_s, done.time_s),
            "trainer/step_s": done.time_s,
            "trainer/wait_s": done.wait_s,
            **({} if run.curriculum is None else run.curriculum.gauges()),
            **(run.baselines.gauges() if run.baselines.algos else {}),
            **{name: value for each in run.beside.spendings for name, value in each.gauges().items()},
            "progress/rollouts": float(run.progress.num_rollouts),
            "progress/tokens": float(run.progress.num_tokens),
        }
        waits = {"engine": min(row.idle_s / step_s, 1.0), "trainer": min(done.wait_s / max(done.time_s, 1e-9), 1.0)}
        return merge_metrics(metrics, done.metrics), waits
