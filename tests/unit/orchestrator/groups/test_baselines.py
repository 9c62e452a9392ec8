"""Role-conditioned baselines: by hand, in draw order, and over a restart."""

from __future__ import annotations

import random
import sys

import pytest
from fakes import FakeEngine, FakeTrainer
from group_cases import branch
from orchestrator_runs import config, sampled, train
from processes.add_ons import needs

from stretto.base.errors import EngineError
from stretto.config.root import OrchestratorConfig
from stretto.config.sections.algorithm import LengthPenaltySection, OverlongSection, RaeAlgo
from stretto.envs.base import RolloutResult, TaskSource
from stretto.orchestrator.batch import to_samples
from stretto.orchestrator.groups.advantages import Baselines, assign_advantages
from stretto.orchestrator.state import run_checkpoint
from stretto.records.rollout import Group, Rollout, RolloutStatus, Task


def group(number, *rewards, env="duel", failed=()):
    """Members with one reward each for the agents a and b; the judge is not trained."""
    task = Task(env=env, task_id="t", data={})
    rollouts = tuple(
        Rollout(
            rollout_id=f"g{number}.{member}",
            group_id=number,
            member=member,
            task=task,
            status=RolloutStatus.FAILED if member in failed else RolloutStatus.FINISHED,
            branches=(branch("a"), branch("b"), branch("judge", is_trained=False)),
            agent_rewards={"a": a, "b": b},
        )
        for member, (a, b) in enumerate(rewards)
    )
    scored, has_signal = assign_advantages(Group(group_id=number, task=task, rollouts=rollouts), RaeAlgo())
    assert has_signal
    return scored


def test_each_agent_is_compared_with_its_earlier_rewards():
    baselines = Baselines({"duel": RaeAlgo(decay=0.5)})
    later, first = group(9, (1.0, 0.0)), group(4, (1.0, -1.0), (0.0, 2.0), (50.0, 50.0), failed=(2,))
    first, later = baselines.subtract([later, first])
    # Group 4 against 0 and 0; then a: 0 -> 0.5 -> 0.25 and b: 0 -> -0.5 -> 0.75.
    assert first.agent_advantages == {"a": (1.0, 0.0, 0.0), "b": (-1.0, 2.0, 0.0)}
    assert first.advantages == (1.0, 2.0, 0.0)
    assert later.agent_advantages == {"a": (0.75,), "b": (-0.75,)}
    baselines.commit(1)
    assert baselines.gauges() == {"baseline/duel/a": 0.625, "baseline/duel/b": 0.375}
    assert [s.advantages.tolist() for s in to_samples([later])] == [[0.0, 0.75, 0.75], [0.0, -0.75, -0.75]]


def test_rewards_are_shaped_before_they_are_compared_with_a_baseline():
    overlong = OverlongSection(max_tokens=2, buffer_tokens=1)
    baselines = Baselines({"duel": RaeAlgo(decay=0.5, overlong=overlong)})
    (compared,) = baselines.subtract([group(0, (1.0, 0.0))])  # each agent samples two tokens, which costs 1
    assert compared.agent_advantages == {"a": (0.0,), "b": (-1.0,)}
    baselines.commit(1)
    assert baselines.gauges() == {"baseline/duel/a": 0.0, "baseline/duel/b": -0.5}
    penalty = LengthPenaltySection(output_weight=0.5, input_weight=0, turns_weight=0)
    baselines = Baselines({"duel": RaeAlgo(decay=0.5, length_penalty=penalty)})
    (compared,) = baselines.subtract([group(0, (1.0, 0.0))])
    assert compared.agent_advantages == {"a": (0.5,), "b": (0.0,)}


def test_environments_with_other_estimators_are_unchanged():
    other = group(1, (1.0, 0.0), env="other")
    assert Baselines({"duel": RaeAlgo(decay=0.5)}).subtract([other]) == [other]


def test_a_checkpoint_has_the_state_of_its_step_though_later_batches_were_made():
    baselines = Baselines({"duel": RaeAlgo(decay=0.5)})
    baselines.subtract([group(0, (1.0, 0.0))])
    baselines.commit(1)
    baselines.subtract([group(1, (1.0, 4.0))])
    baselines.commit(2)
    state = baselines.state_at(1)
    assert state == {"duel": {"a": 0.5, "b": 0.0}}
    resumed = Baselines({"duel": RaeAlgo(decay=0.5)})
    resumed.restore(state)
    resumed.subtract([group(1, (1.0, 4.0))])
    resumed.commit(2)
    assert resumed.state_at(2) == baselines.state_at(2) == {"duel": {"a": 0.75, "b": 2.0}}


def test_a_lost_batch_updates_no_baseline():
    baselines = Baselines({"duel": RaeAlgo(decay=0.5)})
    for _ in range(2):
        (lost,) = baselines.subtract([group(0, (1.0, 0.0))])
        assert lost.agent_advantages == {"a": (1.0,), "b": (0.0,)}
        assert baselines.gauges() == {} and baselines.state_at(1) == {}
    baselines.subtract([group(2, (4.0, 0.0))])
    baselines.commit(1)
    assert baselines.state_at(1) == {"duel": {"a": 2.0, "b": 0.0}}


class Duel:
    """Two agents say a digit; the greater one wins."""

    def __init__(self):
        self.name = "duel"

    def tasks(self, split):
        return TaskSource(lambda index: Task(env=self.name, task_id=f"{split}-{index}", data={}))

    async def rollout(self, task, ctx):
        digits = [(await ctx.agent(name).chat([{"role": "user", "content": "go"}])).text for name in ("a", "b")]
        rewards = {"a": float(digits[0] > digits[1]), "b": float(digits[1] > digits[0])}
        return RolloutResult(reward=rewards["a"], agent_rewards=rewards)


def digit(prompt, rng, version):
    return str(rng.randrange(10))


@pytest.mark.heavy
def test_a_resumed_run_has_the_baselines_of_an_unbroken_one(tmp_path):
    settings = {
        "env": [{"id": "test_baselines:Duel", "name": "duel"}],
        "algo": {"type": "rae", "decay": 0.8},
        "max_async_level": 0,
        "max_steps": 6,
    }
    whole = FakeTrainer(max_steps=6, checkpoint_every=1)
    cfg = config(tmp_path / "whole", **settings)
    train(cfg, FakeEngine(digit), whole)
    values = run_checkpoint.load(cfg.run_dir, 6).baselines["duel"]
    assert 0 < values["a"] < 1 and 0 < values["b"] < 1

    cfg = config(tmp_path / "broken", **settings)
    first = FakeTrainer(max_steps=6, checkpoint_every=1, die_after=4)
    rng = random.Random(5)
    with pytest.raises(EngineError):
        train(cfg, FakeEngine(digit, delay=lambda request: rng.random()), first)
    again = OrchestratorConfig.model_validate(cfg.model_dump() | {"resume": {"step": 3}})
    engine = FakeEngine(digit)
    engine.version = 3
    second = FakeTrainer(max_steps=6, start=3, checkpoint_every=1)
    train(again, engine, second)
    assert sampled(first)[:3] + sampled(second) == sampled(whole)
    assert run_checkpoint.load(cfg.run_dir, 6).baselines["duel"] == values


@needs("vime")
def test_groups_that_a_hook_lost_do_not_update_the_baselines_of_those_that_are_trained(tmp_path, monkeypatch):
    (tmp_path / "hooks_of_baselines.py").write_text(
        "calls, rewards = iter(range(9)), {}\n"
        "def process(args, samples):\n"
        "    assert next(calls) > 1, 'not yet'\n"
        "    rewards.update({sample.rollout_id: sample.reward for sample in samples})\n"
        "    return [sample.reward for sample in samples], [1.0 for sample in samples]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = config(
        tmp_path / "run",
        env=[{"id": "test_baselines:Duel", "name": "duel"}],
        algo={"type": "rae", "decay": 0.8},
        hooks={"reward_post_process": "hooks_of_baselines:process"},
        max_async_level=0,
        max_steps=1,
    )
    train(cfg, FakeEngine(digit), FakeTrainer(max_steps=1, checkpoint_every=1))
    baseline = 0.0
    for reward in sys.modules["hooks_of_baselines"].rewards.values():
        baseline = 0.8 * baseline + 0.2 * reward
    assert run_checkpoint.load(cfg.run_dir, 1).baselines["duel"]["a"] == pytest.approx(baseline)
