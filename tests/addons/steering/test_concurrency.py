"""The limit on rollouts in flight follows the engines' load."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from hypothesis import given
from hypothesis import strategies as st
from orchestrator_runs import config, train

from stretto.config.sections.orchestrator import AdaptiveConcurrency
from stretto.monitors.file import read_metrics
from stretto_steering.concurrency import AdaptiveLimit, EngineLoad

ROOM = EngineLoad(0.3, 0.0, 0.0)
FULL = EngineLoad(0.99, 0.0, 0.0)


def build_limit(upper_bound: int = 1000, **settings) -> AdaptiveLimit:
    return AdaptiveLimit(
        AdaptiveConcurrency(**{"min_rollouts": 16, "increase": 10, "cooldown_s": 5.0} | settings), upper_bound
    )


def test_a_low_load_adds_step_by_step_up_to_the_bound():
    limit = build_limit(upper_bound=40)
    assert [limit.update(ROOM, 100, float(t)) for t in range(4)] == [26, 36, 40, 40]


def test_a_high_load_decreases_the_limit_once_and_then_waits():
    limit = build_limit(initial_rollouts=100)
    assert limit.update(FULL, 100, 0.0) == 80
    assert limit.update(FULL, 100, 3.0) == 80  # still cooling down
    assert limit.update(FULL, 100, 5.0) == 64
    assert limit.update(ROOM, 100, 8.0) == 64
    assert limit.update(ROOM, 100, 10.0) == 74


@pytest.mark.parametrize("high", [EngineLoad(0.96, 0, 0), EngineLoad(0.2, 9.0, 0)], ids=["cache", "queue"])
def test_a_full_cache_and_a_long_queue_are_a_high_load(high):
    assert build_limit(initial_rollouts=100).update(high, 100, 0.0) == 80


def test_a_preemption_is_a_high_load_and_a_counter_that_restarts_is_not():
    limit = build_limit(initial_rollouts=100)
    assert limit.update(EngineLoad(0.85, 0, 7), 100, 0.0) == 100
    assert limit.update(EngineLoad(0.85, 0, 8), 100, 1.0) == 80
    assert limit.update(EngineLoad(0.85, 0, 0), 100, 9.0) == 80


def test_between_low_and_high_nothing_changes():
    assert build_limit(initial_rollouts=50).update(EngineLoad(0.85, 0, 0), 100, 0.0) == 50
    assert build_limit(initial_rollouts=50).update(EngineLoad(0.2, 1.0, 0), 100, 0.0) == 50


def test_a_limit_that_is_not_reached_does_not_grow():
    assert build_limit(initial_rollouts=50).update(ROOM, 30, 0.0) == 50
    assert build_limit(initial_rollouts=50).update(ROOM, 40, 0.0) == 60


def test_missing_metrics_give_no_load():
    assert EngineLoad.of({}, 1) is None
    metrics = {"vllm:kv_cache_usage_perc": 1.0, "vllm:num_requests_waiting": 6.0, "vllm:num_preemptions_total": 3.0}
    assert EngineLoad.of(metrics, 2) == EngineLoad(0.5, 3.0, 3.0)
    assert EngineLoad.of(metrics, 0) is None


loads = st.builds(EngineLoad, st.floats(0, 1), st.floats(0, 50), st.floats(0, 5))


@pytest.mark.heavy
@given(st.lists(loads, max_size=60), st.integers(1, 300))
def test_the_limit_stays_between_its_bounds(seen, upper_bound):
    limit = build_limit(upper_bound=upper_bound)
    for t, load in enumerate(seen):
        assert min(16, upper_bound) <= limit.update(load, 1000, float(t)) <= upper_bound


class IdleEngine(FakeEngine):
    """It has room for more requests, whatever runs."""

    async def metrics(self):
        return {**ROOM_METRICS, **await super().metrics()}


ROOM_METRICS = {"vllm:kv_cache_usage_perc": 0.1, "vllm:num_requests_waiting": 0.0, "vllm:num_preemptions_total": 0.0}


def test_a_run_plays_as_many_as_its_engines_take(tmp_path):
    adaptive = {"type": "adaptive", "min_rollouts": 8, "increase": 4, "interval_s": 1.0}
    cfg = config(tmp_path, max_steps=8, batch_size=32, group_size=4, max_async_level=1, concurrency=adaptive)
    engine = IdleEngine(parrot(0.5), delay=lambda _: 3.0)
    loop = train(cfg, engine, FakeTrainer(max_steps=8))
    limits = [row["concurrency/limit"] for row in read_metrics(cfg.run_dir.metrics("orchestrator"))]
    assert limits == sorted(limits) and 8 < limits[0] < limits[-1] <= 64
    assert loop.buffer.max_running == limits[-1] // 4
