import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.credit import CREDIT, grpo, has_signal, zero

groups = st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=16)


def slow_grpo(rewards, is_counted, normalize_std):
    counted = [r for r, c in zip(rewards, is_counted) if c]
    if len(set(counted)) < 2:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(counted), statistics.pstdev(counted)
    scale = std + 1e-6 if normalize_std else 1.0
    return [(r - mean) / scale if c else 0.0 for r, c in zip(rewards, is_counted)]


@given(groups, st.booleans())
def test_grpo_equals_the_textbook(group, normalize_std):
    rewards, is_counted = np.array([g[0] for g in group]), np.array([g[1] for g in group])
    expected = slow_grpo(rewards.tolist(), is_counted.tolist(), normalize_std)
    assert grpo(rewards, is_counted, normalize_std=normalize_std) == pytest.approx(
        expected, rel=1e-6, abs=1e-8
    )


def test_equal_rewards_give_exactly_zero_and_no_rounding_error():
    rewards = np.full(7, 0.1)
    assert not grpo(rewards, np.ones(7, bool), normalize_std=True).any()
    assert not has_signal(rewards, np.ones(7, bool))


def test_failed_members_move_no_baseline_and_get_zero():
    rewards = np.array([1.0, 0.0, -100.0])
    is_counted = np.array([True, True, False])
    assert grpo(rewards, is_counted).tolist() == [0.5, -0.5, 0.0]
    assert not has_signal(np.array([1.0, 0.0]), np.array([True, False]))


def test_a_group_that_failed_as_a_whole_gets_zeros():
    assert grpo(np.zeros(4), np.zeros(4, bool)).tolist() == [0.0] * 4


def test_zero_is_the_flat_control():
    assert not zero(np.array([1.0, 0.0]), np.ones(2, bool)).any()


def test_every_configured_algorithm_has_a_function():
    from typing import get_args

    from stretto.config.orchestrator import Algo

    union = get_args(Algo)[0]
    assert {cls.model_fields["type"].default for cls in get_args(union)} == set(CREDIT)
