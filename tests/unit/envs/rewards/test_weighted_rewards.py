"""Several rewards of one reply: each is computed, the weighted sum is trained, and each is a metric."""

from __future__ import annotations

import json

import pytest
from cases.dataset import RUN, play

from stretto.base.errors import ConfigError, DataError
from stretto.envs.base import SingleTurnEnv, load_environment
from stretto.records.rollout import RolloutStatus

MODULE = """
async def is_short(args, sample):
    return 1.0 - 0.1 * sample.response_length

def length(args, sample):
    return {"score": len(sample.response), "other": 7}

def broken(args, sample):
    return "much"

def exact(args, sample):
    return 0.0
"""


@pytest.fixture
def rows(tmp_path, monkeypatch):
    (tmp_path / "my_weighted.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "label": str(i), "metadata": {}}) + "\n" for i in range(4)))
    return str(path)


def rollouts(rows, rewards, **args):
    env = load_environment("dataset", {"path": rows, "rewards": rewards} | args, run=RUN)
    group, _ = play(env, answer=lambda prompt, rng, version: prompt.rsplit("U", 1)[-1].removesuffix(".A"))
    return env, group.rollouts


def test_the_reward_is_the_weighted_sum_and_each_part_is_a_metric(rows):
    env, played = rollouts(rows, {"exact": 1.0, "f1": 0.5, "my_weighted:is_short": 0.25, "my_weighted.length": -2})
    assert not isinstance(env, SingleTurnEnv)
    for rollout in played:
        parts = rollout.metrics
        assert (parts["reward_exact"], parts["reward_f1"], parts["reward_length"]) == (1.0, 1.0, 1.0)
        short = parts["reward_is_short"]
        assert rollout.reward == pytest.approx(1.0 + 0.5 + 0.25 * short - 2.0)


def test_built_in_rewards_alone_leave_a_group_one_request(rows):
    env, played = rollouts(rows, {"exact": 2.0, "math": 1.0})
    assert isinstance(env, SingleTurnEnv)
    assert {rollout.reward for rollout in played} == {3.0}
    assert set(played[0].metrics) == {"reward_exact", "reward_math"}


def test_a_record_cannot_choose_another_reward_than_the_one_that_is_weighted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "5", "label": "5", "metadata": {"rm_type": "random"}}) + "\n")
    _, played = rollouts(str(path), {"f1": 1.0})
    assert {rollout.metrics["reward_f1"] for rollout in played} == {1.0}


def test_a_reward_that_is_no_number_fails_the_rollout_and_names_the_function(rows):
    _, played = rollouts(rows, {"exact": 1.0, "my_weighted:broken": 1.0})
    assert played[0].status is RolloutStatus.FAILED and "my_weighted.py" in played[0].error


@pytest.mark.parametrize(
    ("rewards", "args", "message"),
    [
        ({}, {}, "empty"),
        ({"exact": 0.0}, {}, "weight of 'exact' is 0"),
        ({"given": 1.0}, {}, "not one of several"),
        ({"exat": 1.0}, {}, "did you mean 'exact'"),
        ({"my_weighted:nothing": 1.0}, {}, "nothing"),
        ({"exact": 1.0}, {"reward": "math"}, 'reward = "math" does nothing beside rewards'),
        ({"exact": 1.0, "my_weighted:exact": 1.0}, {}, "called the same"),
        ({"exact": "much"}, {}, "table of weights"),
    ],
)
def test_weights_that_mean_nothing_are_refused(rows, rewards, args, message):
    with pytest.raises(ConfigError, match=message):
        load_environment("dataset", {"path": rows, "rewards": rewards} | args, run=RUN)


def test_a_record_without_the_label_that_one_of_them_compares_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "5"}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1.*label.*math"):
        load_environment("dataset", {"path": str(path), "rewards": {"math": 1.0}}, run=RUN)
