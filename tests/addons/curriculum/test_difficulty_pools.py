"""Tasks in pools by their rewards so far: what is drawn, what a checkpoint has, and what is refused."""

import random

import numpy as np
import pytest
from fakes import EchoEnv, FakeEngine, FakeTrainer
from orchestrator_runs import ECHO, by_number, config, sampled, train

from stretto.base.errors import ConfigError, EngineError
from stretto.config.sections.curriculum import DifficultySampler
from stretto.envs.base import TaskSource
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.state.run_checkpoint import Progress, snapshot
from stretto.orchestrator.tasks.order import TaskMix
from stretto.records.rollout import Task
from stretto_curriculum.pools import Curriculum, DifficultyPools

POOLS = {"sampler": {"type": "difficulty_pool"}}


def pools(num_tasks=10, **settings):
    return DifficultyPools("echo", EchoEnv(num_tasks=num_tasks).tasks("train"), DifficultySampler(**settings))


def drawn(cfg):
    with LedgerReader(cfg.run_dir) as ledger:
        return [row["task_id"] for row in ledger.rows("SELECT task_id FROM draws ORDER BY group_id")]


# -- pools --


def test_a_task_is_drawn_by_the_weight_of_its_pool():
    mine = pools(hard_weight=0.5, normal_weight=2.0, easy_weight=0.0)
    mine.observe([("train-0", 0.25), ("train-1", 0.5), ("train-2", 1.0)])
    assert mine.sizes() == {"unseen": 7, "hard": 1, "normal": 1, "easy": 1}
    rng, count = np.random.default_rng(0), dict.fromkeys(range(10), 0)
    for _ in range(19_000):
        count[int(mine.draw(rng).task_id.removeprefix("train-"))] += 1
    expected = [0.5, 2.0, 0.0, *[1.0] * 7]
    for index, weight in enumerate(expected):
        assert count[index] == pytest.approx(19_000 * weight / sum(expected), abs=150)


NAMED = {"mastered": {"threshold": 1.0, "weight": 0.0}, "never": {"threshold": 0.0, "weight": 3.0},
         "sometimes": {"threshold": 0.9}}  # fmt: skip


def test_named_pools_are_those_whose_threshold_a_reward_does_not_exceed_and_the_last_has_the_rest():
    mine = pools(pools=NAMED)
    rewards = {"train-0": -1.0, "train-1": 0.0, "train-2": 0.01, "train-3": 0.9, "train-4": 0.91, "train-5": 7.0}
    mine.observe(rewards.items())
    assert mine.sizes() == {"unseen": 4, "never": 2, "sometimes": 2, "mastered": 2}
    rng, count = np.random.default_rng(0), dict.fromkeys(range(10), 0)
    for _ in range(24_000):
        count[int(mine.draw(rng).task_id.removeprefix("train-"))] += 1
    expected = [3.0, 3.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    for index, weight in enumerate(expected):
        assert count[index] == pytest.approx(24_000 * weight / sum(expected), abs=180)


def test_the_three_pools_without_names_are_named_pools_too():
    rewards = [(f"train-{i}", i / 8) for i in range(9)]
    plain, named = pools(), pools(pools={"hard": {"threshold": 0.25, "weight": 0.2}, "normal": {"threshold": 0.75},
                                         "easy": {"threshold": 1.0, "weight": 0.2}})  # fmt: skip
    for each in (plain, named):
        each.observe(rewards)
    assert plain.sizes() == named.sizes()
    draws = [[each.draw(np.random.default_rng(i)).task_id for i in range(200)] for each in (plain, named)]
    assert draws[0] == draws[1]


def test_tasks_of_one_id_are_refused_before_anything_is_played():
    source = TaskSource(lambda i: Task(env="echo", task_id=f"{i % 7}", data={}), 10)
    with pytest.raises(ConfigError, match=r"'echo' gives tasks 0 and 7 .*task_id"):
        DifficultyPools("echo", source, DifficultySampler())


def test_the_running_reward_follows_the_latest_groups():
    mine = pools(momentum=0.5)
    mine.observe([("train-3", 1.0), ("train-3", 0.0), ("train-3", 0.0)])
    assert mine.rewards == {"train-3": 0.25} and mine.sizes()["hard"] == 1
    latest = pools()
    latest.observe([("train-3", 1.0), ("train-3", 0.5)])
    assert latest.rewards == {"train-3": 0.5} and latest.sizes()["normal"] == 1


def test_where_every_weight_is_zero_all_tasks_are_as_likely():
    mine = pools(num_tasks=2, hard_weight=0.0)
    mine.observe([("train-0", 0.0), ("train-1", 0.0)])
    assert {mine.draw(np.random.default_rng(i)).task_id for i in range(20)} == {"train-0", "train-1"}


def test_the_state_of_a_step_holds_its_groups_before_and_after_they_are_taken_in():
    curriculum = Curriculum({"echo": pools(momentum=0.5)})
    curriculum.observe(1, [("echo", "train-0", 1.0), ("other", "train-0", 0.0)])
    curriculum.observe(2, [("echo", "train-0", 0.0), ("echo", "train-1", 0.5)])
    early = [curriculum.state_at(step) for step in (0, 1, 2)]
    assert early == [{"echo": {}}, {"echo": {"train-0": 1.0}}, {"echo": {"train-0": 0.5, "train-1": 0.5}}]
    curriculum.advance(1)
    assert [curriculum.state_at(step) for step in (1, 2)] == early[1:]
    again = Curriculum({"echo": pools(momentum=0.5)})
    again.restore(early[2])
    curriculum.advance(2)
    mixes = [TaskMix([EchoEnv(num_tasks=10)], [1.0], 0, each) for each in (curriculum, again)]
    assert [mixes[0].draw(k) for k in range(50)] == [mixes[1].draw(k) for k in range(50)]


def test_a_version_takes_in_the_groups_of_an_environment_at_once_and_leaves_others_alone():
    class Watched(DifficultyPools):
        calls = 0

        def observe(self, rewards):
            self.calls += 1
            super().observe(rewards)

    source = EchoEnv(num_tasks=4).tasks("train")
    many = {f"env-{n}": Watched(f"env-{n}", source, DifficultySampler()) for n in range(100)}
    curriculum = Curriculum(many)
    curriculum.observe(1, [("env-7", "train-0", 1.0), ("env-9", "train-1", 0.5), ("env-7", "train-0", 0.0)])
    curriculum.advance(1)
    assert {name: each.calls for name, each in many.items() if each.calls} == {"env-7": 1, "env-9": 1}
    assert many["env-7"].rewards == {"train-0": 0.0} and many["env-9"].rewards == {"train-1": 0.5}


def test_what_a_checkpoint_puts_aside_is_not_copied_and_not_changed_by_what_follows():
    curriculum = Curriculum({"echo": pools()})
    curriculum.observe(1, [("echo", "train-0", 1.0)])
    progress = Progress(step=1, curriculum=curriculum.state_at(1), sampled={0: 0.1})
    aside = snapshot(progress)
    assert aside.curriculum is progress.curriculum, "a million tasks were copied on the event loop"
    progress.step, progress.sampled[1] = 2, 0.5
    curriculum.observe(2, [("echo", "train-0", 0.0)])
    curriculum.advance(2)
    progress.curriculum = curriculum.state_at(2)
    assert (aside.step, aside.sampled, aside.curriculum) == (1, {0: 0.1}, {"echo": {"train-0": 1.0}})


def test_pools_of_an_endless_environment_are_refused():
    with pytest.raises(ConfigError, match=r"'echo' has infinitely many tasks.*standard"):
        pools(num_tasks=None)


# -- in a run --


def pooled(path, **settings):
    env = [{"id": ECHO, "name": "echo", "args": {"num_tasks": 13}, "curriculum": POOLS}]
    settings = {"max_async_level": 0, "max_steps": 6, "batch_size": 16} | settings
    return config(path, env=env, **settings)


def test_pools_are_the_same_whoever_finishes_first(tmp_path):
    def run_once(name, delay):
        cfg, trainer = pooled(tmp_path / name), FakeTrainer(max_steps=6)
        loop = train(cfg, FakeEngine(by_number, delay=delay), trainer)
        assert audit(cfg.run_dir) == []
        return sampled(trainer), drawn(cfg), loop.parts.curriculum.state_at(6)

    rng = random.Random(0)
    assert run_once("a", None) == run_once("b", lambda request: rng.random())


@pytest.mark.heavy
def test_a_resumed_run_draws_as_one_that_was_never_interrupted(tmp_path):
    whole, trainer = pooled(tmp_path / "a"), FakeTrainer(max_steps=6)
    loop = train(whole, FakeEngine(by_number), trainer)
    cut = pooled(tmp_path / "b")
    with pytest.raises(EngineError, match="killed"):
        train(cut, FakeEngine(by_number), FakeTrainer(max_steps=6, checkpoint_every=2, die_after=5))
    again, engine = FakeTrainer(max_steps=6, start=4), FakeEngine(by_number)
    engine.version = 4
    resumed = train(pooled(tmp_path / "b", resume={"step": 4}), engine, again)
    assert sampled(again) == sampled(trainer)[4:]
    assert resumed.parts.curriculum.state_at(6) == loop.parts.curriculum.state_at(6)
    assert audit(cut.run_dir) == []
