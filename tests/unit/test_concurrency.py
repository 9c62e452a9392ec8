"""The limit on rollouts in flight follows the engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.concurrency import AdaptiveConcurrency
from stretto.orchestrator.concurrency import Aimd, Look

ROOM = Look(0.3, 0.0, 0.0)
FULL = Look(0.99, 0.0, 0.0)


def machine(most: int = 1000, **settings) -> Aimd:
    return Aimd(
        AdaptiveConcurrency(**{"min_rollouts": 16, "increase": 10, "cooldown_s": 5.0} | settings), most
    )


def test_room_adds_step_by_step_up_to_the_most():
    aimd = machine(most=40)
    assert [aimd.update(ROOM, 100, float(t)) for t in range(4)] == [26, 36, 40, 40]


def test_a_crowd_takes_a_share_once_and_then_waits():
    aimd = machine(initial_rollouts=100)
    assert aimd.update(FULL, 100, 0.0) == 80
    assert aimd.update(FULL, 100, 3.0) == 80  # still cooling
    assert aimd.update(FULL, 100, 5.0) == 64
    assert aimd.update(ROOM, 100, 8.0) == 64
    assert aimd.update(ROOM, 100, 10.0) == 74


@pytest.mark.parametrize("crowd", [Look(0.96, 0, 0), Look(0.2, 9.0, 0)], ids=["cache", "queue"])
def test_what_a_crowd_is(crowd):
    assert machine(initial_rollouts=100).update(crowd, 100, 0.0) == 80


def test_a_preemption_is_a_crowd_and_a_counter_that_starts_over_is_none():
    aimd = machine(initial_rollouts=100)
    assert aimd.update(Look(0.85, 0, 7), 100, 0.0) == 100
    assert aimd.update(Look(0.85, 0, 8), 100, 1.0) == 80
    assert aimd.update(Look(0.85, 0, 0), 100, 9.0) == 80


def test_between_low_and_high_nothing_changes():
    assert machine(initial_rollouts=50).update(Look(0.85, 0, 0), 100, 0.0) == 50
    assert machine(initial_rollouts=50).update(Look(0.2, 1.0, 0), 100, 0.0) == 50


def test_a_limit_that_nobody_reaches_does_not_grow():
    assert machine(initial_rollouts=50).update(ROOM, 30, 0.0) == 50
    assert machine(initial_rollouts=50).update(ROOM, 40, 0.0) == 60


def test_engines_that_say_nothing_are_no_look():
    assert Look.of({}, 1) is None
    metrics = {
        "vllm:kv_cache_usage_perc": 1.0,
        "vllm:num_requests_waiting": 6.0,
        "vllm:num_preemptions_total": 3.0,
    }
    assert Look.of(metrics, 2) == Look(0.5, 3.0, 3.0)
    assert Look.of(metrics, 0) is None


looks = st.builds(Look, st.floats(0, 1), st.floats(0, 50), st.floats(0, 5))


@given(st.lists(looks, max_size=60), st.integers(1, 300))
def test_the_limit_stays_between_its_ends(seen, most):
    aimd = machine(most=most)
    for t, look in enumerate(seen):
        assert min(16, most) <= aimd.update(look, 1000, float(t)) <= most
