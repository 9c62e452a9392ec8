"""hierarchical_grpo compares solvers within their episode and proposers within the group."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from group_cases import branch
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.credit import hierarchical_grpo
from stretto.base.errors import ConfigError
from stretto.config.sections.algorithm import HierarchicalGrpoAlgo
from stretto.orchestrator.batch import to_samples
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.records.rollout import Group, Rollout, RolloutStatus, Task

ALGO = HierarchicalGrpoAlgo(episode_agents=("solver",))


def group(*episodes, failed=()):
    """A group from the rewards of each episode's agents."""
    task = Task(env="proposer", task_id="t", data={})
    rollouts = tuple(
        Rollout(
            rollout_id=f"g0.{member}",
            group_id=0,
            member=member,
            task=task,
            status=RolloutStatus.FAILED if member in failed else RolloutStatus.FINISHED,
            branches=tuple(branch(player) for player in rewards),
            agent_rewards=rewards,
        )
        for member, rewards in enumerate(episodes)
    )
    return Group(group_id=0, task=task, rollouts=rollouts)


def test_each_role_is_compared_within_itself():
    scored, has_signal = assign_advantages(
        group(
            {"proposer": 0.25, "solver/0": 1.0, "solver/1": 0.0},
            {"proposer": 0.75, "solver/0": 1.0, "solver/1": 1.0},
            {"proposer": 9.0, "solver/0": 9.0, "solver/1": -9.0},
            failed=(2,),
        ),
        ALGO,
    )
    assert has_signal
    assert scored.agent_advantages == {
        "proposer": (-0.25, 0.25, 0.0),
        "solver/0": (0.5, 0.0, 0.0),
        "solver/1": (-0.5, 0.0, 0.0),
    }
    assert [s.advantages.tolist() for s in to_samples([scored])][:3] == [
        [0.0, -0.25, -0.25],
        [0.0, 0.5, 0.5],
        [0.0, -0.5, -0.5],
    ]


def test_an_agent_without_another_to_compare_with_gets_0():
    scored, has_signal = assign_advantages(
        group({"proposer": 1.0, "solver/0": 3.0}, {"proposer": 1.0, "solver/1": 0.0}), ALGO
    )
    assert not has_signal
    assert not any(any(values) for values in scored.agent_advantages.values())


def test_a_role_without_an_agent_is_an_error():
    with pytest.raises(ConfigError, match="'proposer' are \\['a', 'b'\\]"):
        assign_advantages(group({"a": 1.0, "b": 0.0}), ALGO)
    with pytest.raises(ConfigError, match=r"^orchestrator\.env\.1\.algo\.episode_agents = "):
        assign_advantages(group({"a": 1.0, "b": 0.0}), ALGO, "orchestrator.env.1.algo")


table = st.lists(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans()), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)


@pytest.mark.heavy
@given(table, st.booleans())
def test_the_rule_equals_its_formula(rows, is_within_episode):
    rewards = np.array([[r for r, _ in row] for row in rows])
    is_counted = np.array([[c for _, c in row] for row in rows])
    whole_group = [r for row in rows for r, c in row if c]
    expected = []
    for row in rows:
        peers = [r for r, c in row if c] if is_within_episode else whole_group
        expected.append([r - statistics.fmean(peers) if c and len(peers) > 1 else 0.0 for r, c in row])
    got = hierarchical_grpo(rewards, is_counted, is_within_episode=is_within_episode)
    np.testing.assert_allclose(got, expected, atol=1e-12)
