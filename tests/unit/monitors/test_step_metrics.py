"""The metrics of a trainer's steps."""

from __future__ import annotations

import pytest

from stretto.monitors import steps
from stretto.monitors.steps import NUM_STEPS, StepClock


def test_throughput_is_that_of_the_last_steps_and_tokens_are_summed_from_the_start(monkeypatch):
    now = 0.0
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now)
    clock = StepClock()
    for step in range(NUM_STEPS + 1):
        now += 1.0 if step else 100.0
        metrics = clock.end_step(num_tokens=10 + step, num_micro_batches=2, wait_s=0.25, train_s=0.5)
        assert metrics["time/step"] == (1.0 if step else 100.0)
    last = range(11, 11 + NUM_STEPS)
    assert metrics["perf/throughput"] == pytest.approx(sum(last) / NUM_STEPS)
    assert metrics["progress/total_tokens"] == 10 + sum(last)
    assert (metrics["batch/tokens"], metrics["batch/micro_batches"]) == (20, 2)
    assert (metrics["time/wait_for_batch"], metrics["time/train"]) == (0.25, 0.5)
