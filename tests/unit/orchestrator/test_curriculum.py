import random
import re
import tomllib
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from fakes import EchoEnv, FakeEngine, FakeTrainer
from orchestrator_runs import ECHO, config, sampled, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError, EngineError
from stretto.config.root import OrchestratorConfig
from stretto.config.sections.curriculum import DifficultySampler
from stretto.config.sections.sft import OnlineEvalSection
from stretto.envs.base import TaskSource
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.state.run_checkpoint import Progress, snapshot
from stretto.orchestrator.tasks.difficulty import Curriculum, DifficultyPools
from stretto.orchestrator.tasks.order import TaskMix
from stretto.records.rollout import Task

POOLS = {"sampler": {"type": "difficulty_pool"}}


def pools(num_tasks=10, **settings):
    return DifficultyPools("echo", EchoEnv(num_tasks=num_tasks).tasks("train"), DifficultySampler(**settings))


def by_number(prompt, rng, version):
    """Tasks differ in how often they are solved: the n-th of 12 with probability n / 12."""
    word = prompt.rsplit("U", 1)[-1].removesuffix(".A")
    return word if rng.random() < int(word.removeprefix("train")) / 12 else "no"


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
    mixes = [TaskMix([EchoEnv(num_tasks=10)], [1.0], 0, each.pools) for each in (curriculum, again)]
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


def test_rejected_groups_are_replaced_and_the_ledger_says_by_what(tmp_path):
    gates = {"hard": {"type": "reward_range"}, "easy": {"type": "reward_range", "reject_min": 1.0, "reject_max": 1.0}}
    env = [{"id": ECHO, "name": "echo", "args": {"num_tasks": 13}, "curriculum": {"gates": gates}}]
    cfg = config(tmp_path, env=env, filter_zero_advantages=False)
    trainer = FakeTrainer(max_steps=5)
    train(cfg, FakeEngine(by_number), trainer)
    with LedgerReader(cfg.run_dir) as ledger:
        rows = ledger.rows("SELECT group_id, reason FROM draws WHERE state = 'dropped' AND reason LIKE 'gate%'")
        assert {row["reason"] for row in rows} == {"gate hard", "gate easy"}
        for step in range(1, 6):
            groups = {}
            for row in ledger.trained_rollouts(step):
                groups.setdefault(row["group_id"], []).append(row["reward"])
            assert len(groups) == 2 and all(0 < mean(rewards) < 1 for rewards in groups.values())
    assert audit(cfg.run_dir) == []


def test_a_gate_that_admits_nothing_stops_the_run_and_says_which(tmp_path):
    gate = {"gates": {"hard": {"type": "reward_range", "reject_min": 0.0, "reject_max": 1.0}}}
    cfg = config(tmp_path, env=[{"id": ECHO, "name": "echo", "curriculum": gate}], max_rejected_batches=3)
    with pytest.raises(ConfigError, match=r"6 groups were rejected.*echo, by gate hard"):
        train(cfg, FakeEngine(lambda *_: "x"), FakeTrainer(max_steps=5))


def test_an_enforced_filter_leaves_rollouts_out_of_batches(tmp_path):
    cfg = config(tmp_path, filters=[{"type": "zero_advantage"}, {"type": "repetition", "window": 2}])

    def answer(prompt, rng, version):
        word = prompt.rsplit("U", 1)[-1].removesuffix(".A")
        return word if rng.random() < 0.5 else "no"

    trainer = FakeTrainer(max_steps=5)
    loop = train(cfg, FakeEngine(answer), trainer)
    assert loop.progress.step == 5 and audit(cfg.run_dir) == []
    for step in trainer.batches:
        for micro in step[0].micro_batches:
            assert (micro.advantages[micro.loss_mask] != 0).all()


# -- length --


def length_of(prompt):
    """Heavy-tailed lengths that depend on the task alone."""
    return min(int(random.Random(prompt).lognormvariate(1.0, 1.0)) + 1, 40)


@pytest.mark.parametrize("factor", [None, 6.0])
def test_batches_hold_the_lengths_that_were_drawn_whoever_finishes_first(tmp_path, factor):
    def run_once(order):
        cfg = config(
            tmp_path / order, batch_order=order, oversampling_factor=factor, filter_zero_advantages=False,
            max_steps=12, max_async_level=2, max_off_policy_steps=8,
        )  # fmt: skip
        engine = FakeEngine(
            lambda prompt, rng, version: "y" * length_of(prompt),
            delay=lambda request: 0.3 * length_of("".join(map(chr, request.prompt_ids))) ** 2,
        )
        train(cfg, engine, FakeTrainer(max_steps=12, step_delay=lambda step: 1.0))
        assert audit(cfg.run_dir) == []
        with LedgerReader(cfg.run_dir) as ledger:
            return [
                [(r["group_id"], r["num_sampled_tokens"]) for r in ledger.trained_rollouts(s)] for s in range(1, 13)
            ]

    by_dispatch, by_finish = run_once("dispatch"), run_once("finished")
    # Batch n is draws 2n-2 and 2n-1: nothing that was drawn is missing, so the distributions are equal.
    assert [sorted({g for g, _ in step}) for step in by_dispatch] == [[2 * n, 2 * n + 1] for n in range(12)]
    early = [mean(length for step in run[:3] for _, length in step) for run in (by_dispatch, by_finish)]
    assert early[1] < early[0]


@needs("prime")
def test_environments_have_their_own_sampling_group_size_and_deadline(tmp_path):
    env = [
        {"id": ECHO, "name": "a", "group_size": 2, "sampling": {"max_tokens": 3, "temperature": 0.5}},
        {"id": ECHO, "name": "b", "rollout_timeout_s": 7.0},
    ]
    cfg = config(tmp_path, env=env, filter_zero_advantages=False, max_steps=2)
    requests = []

    def delay(request):
        requests.append((request.n, request.sampling.temperature, request.sampling.max_tokens > 3))
        return 0.0

    loop = train(cfg, FakeEngine(by_word, delay=delay), FakeTrainer(max_steps=2))
    assert set(requests) == {(2, 0.5, False), (4, 1.0, True)}
    assert loop._pipeline._players["a"].timeout_s == 600.0 and loop._pipeline._players["b"].timeout_s == 7.0
    assert audit(cfg.run_dir) == []


def by_word(prompt, rng, version):
    return "word"


def test_the_settings_in_the_document_are_valid_together(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "orchestrator.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, re.S)
    blocks = [block for block in blocks if not block.startswith(("[ckpt.weights]", "[val]"))]  # other roots' keys
    assert len(blocks) == 8
    # A table's own keys stand before those of the tables in it.
    blocks.sort(key=lambda block: not block.startswith("[orchestrator]"))
    data = tomllib.loads("\n".join(blocks))
    assert OnlineEvalSection.model_validate(data["eval"]).interval == 500
    cfg = OrchestratorConfig.model_validate(data["orchestrator"] | {"output_dir": tmp_path})
    assert cfg.sampling_of("reverse-text").max_completion_tokens == 512
    assert cfg.sampling_of("reverse-text").top_p == cfg.train.sampling.top_p
    assert list(cfg.gates_of("my_envs:Shout")) == ["dynamic", "too_easy"]
    assert [each.enforce for each in cfg.filters] == [True]
    assert cfg.eval.env[0].interval == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"oversampling_factor": 2.0, "max_async_level": 0}, "starts groups early and max_async_level = 0 forbids"),
        ({"oversampling_factor": 16.0, "max_async_level": 1}, "15 steps early and max_off_policy_steps = 8"),
        ({"filters": [{"type": "gibberish"}] * 2}, '"gibberish" is listed twice'),
        ({"client": {"api": "chat"}}, "gives no tokens to train on"),
        (
            {"env": [{"id": ECHO, "curriculum": {"gates": {"a": {"type": "reward_range", "reject_min": 1}}}}]},
            "gates.a.reject_min = 1 is above .* it would reject nothing",
        ),
        (
            {"env": [{"id": ECHO, "curriculum": {"sampler": {"type": "difficulty_pool", "hard_threshold": 0.9}}}]},
            "no task would be normal",
        ),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"pools": {"a": {"threshold": 0.5}, "b": {"threshold": 0.5}}}, "a and b have the same threshold, 0.5"),
        ({"pools": {"unseen": {"threshold": 0.5}}}, "not `unseen`"),
        ({"pools": {"a b": {"threshold": 0.5}}}, "for it names a metric"),
        ({"pools": {"a": {"threshold": 0.5, "weight": 0.0}}}, "no pool has a weight above 0"),
        ({"pools": {"a": {"threshold": 0.5}}, "easy_weight": 0.5}, "easy_weight = 0.5 does nothing"),
        ({"pools": {"a": {"threshold": 0.5, "weight": -1}}}, "weight"),
        ({"pools": {"a": {"weight": 1}}}, "threshold"),
    ],
)
def test_pools_that_would_be_empty_or_have_no_metric_are_refused(tmp_path, sampler, words):
    env = {"id": ECHO, "curriculum": {"sampler": {"type": "difficulty_pool", **sampler}}}
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, env=[env])
