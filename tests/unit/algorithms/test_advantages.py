"""Advantages of tokens against the papers' sums written out, sample by sample."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.advantages import discounted_returns, gae, token_rewards
from stretto.algorithms.credit import whiten

numbers = st.floats(-3, 3).map(lambda x: round(x, 3))
samples = st.lists(st.lists(st.tuples(numbers, numbers), max_size=6), min_size=1, max_size=5)
rates = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def flat(ragged, part):
    values = np.array([token[part] for sample in ragged for token in sample], dtype=np.float64)
    return values, np.array([len(sample) for sample in ragged])


@pytest.mark.heavy
@given(samples, rates)
def test_returns_are_sums_of_later_rewards(ragged, gamma):
    rewards, lengths = flat(ragged, 0)
    expected = [
        sum(gamma ** (later - t) * sample[later][0] for later in range(t, len(sample)))
        for sample in ragged
        for t in range(len(sample))
    ]
    assert discounted_returns(rewards, lengths, gamma) == pytest.approx(expected, abs=1e-9)


@pytest.mark.heavy
@given(samples, rates, rates)
def test_gae_is_the_weighted_sum_of_later_errors_of_the_value(ragged, gamma, lambd):
    (rewards, lengths), (values, _) = flat(ragged, 0), flat(ragged, 1)
    expected = []
    for sample in ragged:
        after = [value for _, value in sample[1:]] + [0.0]
        errors = [r + gamma * following - v for (r, v), following in zip(sample, after)]
        expected += [
            sum((gamma * lambd) ** (k - t) * errors[k] for k in range(t, len(sample))) for t in range(len(sample))
        ]
    advantages, returns = gae(rewards, values, lengths, gamma=gamma, lambd=lambd)
    assert advantages == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx(advantages + values, abs=1e-12)


def test_gae_by_hand():
    # Two tokens, then an empty sample, then one token: delta = (0.9*2 - 1, 5 - 2, -1 - 4).
    advantages, returns = gae(
        np.array([0.0, 5.0, -1.0]), np.array([1.0, 2.0, 4.0]), np.array([2, 0, 1]), gamma=0.9, lambd=0.5
    )
    assert advantages == pytest.approx([0.8 + 0.45 * 3.0, 3.0, -5.0])
    assert returns == pytest.approx([1.8 + 1.35, 5.0, -1.0])


def test_lambda_one_gives_returns_less_values_and_zero_the_error_of_one_step():
    rng = np.random.default_rng(0)
    rewards, values, lengths = rng.standard_normal(9), rng.standard_normal(9), np.array([4, 5])
    full, _ = gae(rewards, values, lengths, gamma=0.9, lambd=1.0)
    assert full == pytest.approx(discounted_returns(rewards, lengths, 0.9) - values)
    one, _ = gae(rewards, values, lengths, gamma=0.9, lambd=0.0)
    assert one[3] == pytest.approx(rewards[3] - values[3])
    assert one[4] == pytest.approx(rewards[4] + 0.9 * values[5] - values[4])


def test_the_score_lands_on_the_last_token_and_every_token_pays_its_divergence():
    rewards = token_rewards(np.array([1.0, 7.0, -2.0]), np.array([0.1, 0.2, 0.3], np.float32), np.array([2, 0, 1]), 0.5)
    assert rewards == pytest.approx([-0.05, 0.9, -2.15])
    assert token_rewards(np.array([1.0]), None, np.array([3]), 0.0).tolist() == [0.0, 0.0, 1.0]


@given(st.lists(numbers, min_size=2, max_size=30))
def test_whitening_gives_mean_zero_and_deviation_one(values):
    array = np.array(values)
    white = whiten(array)
    deviation = statistics.stdev(values)
    expected = [(v - statistics.fmean(values)) / math.sqrt(deviation**2 + 1e-8) for v in values]
    assert white == pytest.approx(expected, abs=1e-6)
