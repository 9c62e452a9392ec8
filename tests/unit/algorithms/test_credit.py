import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.credit import (
    ADVANTAGE_ESTIMATORS,
    grpo,
    has_distinct_rewards,
    has_group_signal,
    length_penalty,
    max_rl,
    overlong,
    whiten,
    zero,
)

groups = st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=16)


def slow_grpo(rewards, is_counted, normalize_std):
    counted = [r for r, c in zip(rewards, is_counted) if c]
    if len(set(counted)) < 2:
        return [0.0] * len(rewards)
    deviation = statistics.stdev if normalize_std == "unbiased" else statistics.pstdev
    mean, std = statistics.fmean(counted), deviation(counted)
    scale = std + 1e-6 if normalize_std else 1.0
    return [(r - mean) / scale if c else 0.0 for r, c in zip(rewards, is_counted)]


@given(groups, st.sampled_from([False, True, "unbiased"]))
def test_grpo_equals_the_textbook(group, normalize_std):
    rewards, is_counted = np.array([g[0] for g in group]), np.array([g[1] for g in group])
    expected = slow_grpo(rewards.tolist(), is_counted.tolist(), normalize_std)
    assert grpo(rewards, is_counted, normalize_std=normalize_std) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_equal_rewards_give_exactly_zero_and_no_rounding_error():
    rewards = np.full(7, 0.1)
    assert not grpo(rewards, np.ones(7, bool), normalize_std=True).any()
    assert not has_distinct_rewards(rewards, np.ones(7, bool))


def test_failed_members_move_no_baseline_and_get_zero():
    rewards = np.array([1.0, 0.0, -100.0])
    is_counted = np.array([True, True, False])
    assert grpo(rewards, is_counted).tolist() == [0.5, -0.5, 0.0]
    assert not has_distinct_rewards(np.array([1.0, 0.0]), np.array([True, False]))


def test_a_group_that_failed_as_a_whole_gets_zeros():
    assert grpo(np.zeros(4), np.zeros(4, bool)).tolist() == [0.0] * 4


def test_zero_is_the_flat_control():
    assert not zero(np.array([1.0, 0.0]), np.ones(2, bool)).any()


def test_every_configured_algorithm_has_a_function():
    from typing import get_args

    from stretto.config.sections import distill
    from stretto.config.sections.algorithm import Algo

    sections = [cls for cls in get_args(get_args(Algo)[0]) if cls.__module__ != distill.__name__]
    assert {cls.model_fields["type"].default for cls in sections} == {
        *ADVANTAGE_ESTIMATORS,
        "custom",
        "hierarchical_grpo",
        "echo",
    }


def slow_credit(kind, group):
    """Advantages by the papers' formulas, each member against the list of those that count."""
    counted = [r for r, c in group if c]
    mean = statistics.fmean(counted) if counted else 0.0
    result = []
    for reward, is_counted in group:
        others = list(counted)
        if is_counted:
            others.remove(reward)
        if not is_counted:
            result.append(0.0)
        elif kind in ("ppo", "reinforce_plus_plus", "rae"):
            result.append(reward)
        elif len(counted) < 2:
            result.append(0.0)
        elif kind == "rloo":
            result.append(reward - statistics.fmean(others))
        elif kind == "max_rl":
            result.append((reward - mean) / mean if mean > 0 else 0.0)
        else:
            result.append(reward - mean)
    return result


coarse = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), st.booleans()), min_size=1, max_size=9)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", sorted(set(ADVANTAGE_ESTIMATORS) - {"zero"}))
@given(group=coarse)
def test_every_rule_equals_its_formula_on_groups_of_any_size(kind, group):
    rewards, is_counted = np.array([g[0] for g in group]), np.array([g[1] for g in group])
    advantages = ADVANTAGE_ESTIMATORS[kind](rewards, is_counted)
    assert advantages == pytest.approx(slow_credit(kind, group), abs=1e-12)
    assert not advantages[~is_counted].any()


def test_hand_computed_advantages():
    """Rewards 1, 0, 0, 0 and a failed member: mean 1/4."""
    rewards, counted = np.array([1.0, 0, 0, 0, 9]), np.array([1, 1, 1, 1, 0], bool)
    assert ADVANTAGE_ESTIMATORS["dr_grpo"](rewards, counted).tolist() == [0.75, -0.25, -0.25, -0.25, 0]
    assert ADVANTAGE_ESTIMATORS["rloo"](rewards, counted) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0])
    assert ADVANTAGE_ESTIMATORS["max_rl"](rewards, counted).tolist() == [3, -1, -1, -1, 0]
    assert ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](rewards, counted).tolist() == [1, 0, 0, 0, 0]


def test_max_rl_has_nothing_to_say_about_unsolved_or_negative_groups():
    for rewards in ([0.0, 0.0], [-1.0, 0.5], [-1.0, 1.0]):
        assert not max_rl(np.array(rewards), np.ones(2, bool)).any()


def test_the_estimator_decides_whether_a_group_has_signal():
    rewards, counted = np.array([1.0, 1.0]), np.ones(2, bool)
    assert has_group_signal("reinforce_plus_plus", rewards, counted, rewards)
    assert not has_group_signal("reinforce_plus_plus", rewards, ~counted, rewards * 0)
    assert not has_group_signal("grpo", rewards, counted, grpo(rewards, counted))
    # The control's advantages are zero, and yet it must draw the same groups as grpo would.
    assert has_group_signal("zero", np.array([0.0, 1.0]), counted, np.zeros(2))
    assert not has_group_signal("max_rl", np.array([-1.0, 0.5]), counted, np.zeros(2))


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.1, 5.0]), max_size=40))
def test_whitening_gives_mean_zero_and_variance_one(values):
    out = whiten(np.array(values, dtype=np.float32))
    exact = [float(np.float32(v)) for v in values]
    if len(set(values)) < 2:
        assert not out.any()
    else:
        mean, var = statistics.fmean(exact), statistics.variance(exact)
        assert out == pytest.approx([(v - mean) / (var + 1e-8) ** 0.5 for v in exact], abs=1e-9)


def test_ranks_whiten_their_tokens_together():
    whole = np.random.default_rng(0).standard_normal(7)
    joined = {
        "max/high": whole.max(),
        "max/low": -whole.min(),
        "total": whole.sum(),
        "count": 7.0,
        "squares": np.square(whole - whole.mean()).sum(),
    }
    parts = [whiten(part, lambda sums: {name: joined[name] for name in sums}) for part in np.split(whole, [3, 3])]
    assert np.concatenate(parts) == pytest.approx(whiten(whole))


def test_length_penalty_costs_the_longest_most_and_nothing_where_nothing_is_solved():
    counted = np.array([True, True, True, False])
    lengths = {
        "output": np.array([10, 5, 0, 999]),
        "input": np.array([4, 4, 4, 999]),
        "turns": np.array([1, 2, 1, 999]),
    }
    weights = {"output": 0.25, "input": 0.1, "turns": 0.1}
    shaped = length_penalty(np.array([1.0, 1.0, 1.0, 0.0]), counted, lengths, weights)
    assert shaped[:3] == pytest.approx([1 - 0.25 - 0.1 - 0.05, 1 - 0.125 - 0.1 - 0.1, 1 - 0.1 - 0.05])
    assert grpo(shaped, counted)[3] == 0 and grpo(shaped, counted)[2] > 0
    unsolved = length_penalty(np.zeros(4), counted, lengths, weights)
    assert not unsolved.any() and not grpo(unsolved, counted).any()
    assert length_penalty(np.ones(4), ~np.ones(4, bool), lengths, weights).tolist() == [1] * 4


def test_overlong_rises_linearly_over_the_buffer():
    tokens = np.array([0, 80, 90, 95, 100, 150])
    shaped = overlong(np.ones(6), tokens, max_tokens=100, buffer_tokens=20, penalty=2.0)
    assert shaped == pytest.approx([1, 1, 0, -0.5, -1, -1])
