"""[orchestrator.steering] finds a level that is nearly the best fixed one, and says in the ledger what it decides."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
from fakes import AgingTrainer, FakeEngine, parrot
from orchestrator_runs import config, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.orchestrator import SteeringSection
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import Ledger
from stretto.monitors.file import read_metrics
from stretto_steering.controller import Steering, ladder


def run(path, seed, level, steering=None, *, median, sigma, train_s, decay, steps=200, **settings):
    """A run whose rollouts take log-normal times; its trainer and loop."""
    rng = random.Random(seed)
    engine = FakeEngine(parrot(0.5), delay=lambda _: median * rng.lognormvariate(0.0, sigma))
    trainer = AgingTrainer(
        decay, SteeringSection().ess_power, max_steps=steps, step_delay=lambda _: train_s * rng.lognormvariate(0.0, 0.2)
    )
    shape = {"batch_size": 32, "group_size": 4, "filter_zero_advantages": False}
    given = {} if steering is None else {"steering": steering}
    cfg = config(path, max_steps=steps, max_async_level=level, **shape, **given, **settings)
    return trainer, train(cfg, engine, trainer)


def time_to(worth, goal):
    """Seconds until so many effective tokens are trained."""
    totals = accumulate(tokens for _, tokens in worth)
    return next(at for (at, _), total in zip(worth, totals, strict=True) if total >= goal)


def decisions(loop):
    with LedgerReader(loop.parts.run_dir) as reader:
        return [event["data"] for event in reader.events("steering")]


TASKS = {
    "slow rollouts": {"median": 30, "sigma": 1.0, "train_s": 8, "decay": 0.02},
    "slow rollouts that age": {"median": 30, "sigma": 1.0, "train_s": 8, "decay": 0.15},
    "fast rollouts": {"median": 3, "sigma": 0.5, "train_s": 10, "decay": 0.05},
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (not name.endswith("age"))) for name in TASKS]
)
def test_a_steered_run_is_nearly_as_fast_as_the_best_level_and_no_slower_than_the_lowest(tmp_path, name):
    seed = 1000 + list(TASKS).index(name)
    fixed = {level: run(tmp_path / str(level), seed, level, **TASKS[name])[0].worth for level in (1, 2, 4, 8)}
    goal = 0.9 * min(sum(tokens for _, tokens in worth) for worth in fixed.values())
    times = {level: time_to(worth, goal) for level, worth in fixed.items()}
    trainer, loop = run(tmp_path / "steered", seed, 1, {}, **TASKS[name])
    took = time_to(trainer.worth, goal)
    assert took <= 1.1 * min(times.values()) and took <= 1.05 * times[1]
    assert decisions(loop) and not audit(loop.parts.run_dir)


@pytest.mark.heavy
def test_each_decision_is_a_row_and_the_level_of_the_steps_after_it(tmp_path):
    _, loop = run(tmp_path, 7, 1, {"max_level": 6, "interval": 4}, **TASKS["slow rollouts"], steps=60)
    rows = decisions(loop)
    assert rows[0]["level_before"] == 1 and all(a["level"] == b["level_before"] for a, b in pairwise(rows))
    assert max(row["level"] for row in rows) == 6 and all(row["reason"] for row in rows)
    steps = {row["step"]: row for row in read_metrics(loop.parts.run_dir.metrics("orchestrator"))}
    for row in rows[:-1]:
        assert steps[row["step"] + 1]["steering/level"] == row["level"]
        assert steps[row["step"]]["steering/effective_tokens_per_s"] == row["effective_tokens_per_s"]


@pytest.mark.heavy
def test_a_resumed_run_goes_on_at_the_level_of_its_step(tmp_path):
    task = TASKS["slow rollouts"]
    _, first = run(tmp_path, 7, 1, {"interval": 4}, **task, steps=30)
    level = decisions(first)[-1]["level"]
    assert level > 1
    cfg = config(tmp_path, max_steps=60, steering={"interval": 4}, batch_size=32, group_size=4)
    from stretto.orchestrator.main import build_bounds

    assert build_bounds(cfg, 30).max_async_level == level
    for row in decisions(first):
        assert build_bounds(cfg, row["step"]).max_async_level == row["level"]
        assert build_bounds(cfg, row["step"] - 1).max_async_level == row["level_before"]
    ledger = Ledger(cfg.run_dir)  # a start from an earlier step undoes what was decided after it
    ledger.run_started({}, resumed_step=decisions(first)[0]["step"] - 1)
    ledger.close()
    assert build_bounds(cfg, 30).max_async_level == decisions(first)[0]["level_before"]


def steer(steering, waited, *, speed=lambda level: 100.0, ess=1.0, steps=400):
    """Feed steps of 1 s whose tokens are `speed(level)`; the levels over time."""
    levels = []
    for step in range(1, steps + 1):
        level = steering.level
        steering.add_step(step, float(step), speed(level), {"ess/tokens": ess}, waited(level))
        levels.append(steering.level)
    return levels


def test_a_trainer_that_never_waits_keeps_the_lowest_level():
    assert set(steer(Steering(SteeringSection(), 1), lambda level: 0.0)) == {1}


def test_levels_above_the_lowest_must_earn_their_gain():
    levels = steer(Steering(SteeringSection(), 8), lambda level: 0.2)  # all are equally fast
    assert levels[-1] == 1 and levels.count(1) > 150
    earned = steer(Steering(SteeringSection(), 1), lambda level: 0.5 / level, speed=lambda level: 100.0 * level)
    assert earned[-1] == 8 and earned.count(8) > 300  # from time to time it looks whether 6 is as good


def test_waits_say_how_far_to_go():
    levels = steer(Steering(SteeringSection(), 1), lambda level: 1 - (level + 1) / 6 if level < 5 else 0.0, steps=9)
    assert levels[-1] == 4  # (1 + 1) / (1 - 2/3) - 1 = 5, and 4 is the rung below it


def first_round(steering, *, play_s, train_s, ess=lambda age: 1.0):
    """The steps of a first round, of which the first batch was waited for; the decision at its end."""
    steering.start(0.0)
    num = steering.level + 1
    for step in range(1, num + 1):
        metrics = {"ess/tokens": ess(step - 1), "off_policy/mean": step - 1.0}
        decision = steering.add_step(step, play_s + step * train_s, 100.0, metrics, play_s if step == 1 else 0.0)
        assert decision is None or step == num
    return decision


def test_a_first_round_that_plays_for_long_is_enough():
    steering = Steering(SteeringSection(), 1)
    decision = first_round(steering, play_s=20.0, train_s=1.0)
    assert decision is not None and decision.step == 2 and steering.level == 4, "four times the level at most"
    assert decision.effective_tokens_per_s == pytest.approx(200 / 22) and decision.reason == "the trainer waits"
    steering = Steering(SteeringSection(), 1)
    first_round(steering, play_s=4.0, train_s=1.0)
    assert steering.level == 3, "where it would not wait: (1 + 1) / (1 - 1/2) - 1"


def test_a_first_round_that_is_not_plain_decides_nothing():
    steering = Steering(SteeringSection(), 1)
    assert first_round(steering, play_s=2.9, train_s=1.0) is None and steering.level == 1
    assert first_round(Steering(SteeringSection(), 8), play_s=90.0, train_s=1.0) is None, "there is no higher one"


def test_a_first_round_reaches_no_level_whose_tokens_should_be_too_old():
    steering = Steering(SteeringSection(ess_power=1, min_ess=0.5), 1)
    first_round(steering, play_s=90.0, train_s=1.0, ess=lambda age: 0.8**age)
    assert steering.level == 3  # 0.51 at age 3


def test_a_raise_that_has_not_helped_is_looked_at_again_though_the_trainer_waits():
    """Engines are what it waits for: a round of n batches takes n times as long."""
    levels = {"helped": set(), "not helped": set()}
    for name, round_s in (("helped", lambda num: 60.0), ("not helped", lambda num: 30.0 * num)):
        steering = Steering(SteeringSection(interval=9), 1)
        first_round(steering, play_s=60.0, train_s=1.0)
        now, next_round = 62.0, 3
        for step in range(3, 160):
            waited = 0.0
            if step == next_round:
                waited, next_round = round_s(steering.level + 1), step + steering.level + 1
            now += 1.0 + waited
            steering.add_step(step, now, 100.0, {"ess/tokens": 1.0, "off_policy/mean": steering.level}, waited)
            levels[name].add(steering.level)
    assert levels == {"helped": {4, 8}, "not helped": {4, 6, 8}}


def test_tokens_that_are_worth_too_little_are_seen_in_four_steps():
    for is_first in (True, False):
        steering, levels = Steering(SteeringSection(), 4), []
        if is_first:
            steering.start(0.0)
        for step in range(1, 10):
            steering.add_step(step, float(step), 100.0, {"ess/tokens": 0.55}, 0.0)
            levels.append(steering.level)
        changed = 4 if is_first else 9  # five steps are left out before
        assert levels[: changed - 1] == [4] * (changed - 1)
        assert levels[changed - 1] == 2  # half, though 0.55 ** (2 / 4) is below 0.8


def test_one_token_with_a_large_ratio_lowers_no_level():
    """It takes most of a step's effective sample size, here of every third step."""
    steering = Steering(SteeringSection(), 4)
    decisions = []
    for step in range(1, 60):
        ess = 0.05 if step % 3 == 0 else 0.95
        decisions.append(steering.add_step(step, float(step), 100.0 * steering.level, {"ess/tokens": ess}, 0.3))
    assert steering.level >= 4 and {each.ess for each in decisions if each is not None} == {0.95}


def test_what_a_token_is_worth_follows_from_the_power():
    """From 1 to 2 the rate grows by half, and the effective sample size falls from 0.9 to 0.75."""

    def chosen(power):
        steering = Steering(SteeringSection(max_level=2, ess_power=power, min_ess=0.7), 2)
        speed = {1: 100.0, 2: 150.0}
        metrics = {1: {"ess/tokens": 0.9}, 2: {"ess/tokens": 0.75}}
        for step in range(1, 200):
            steering.add_step(step, float(step), speed[steering.level], metrics[steering.level], 0.3)
        return steering.level

    assert chosen(1) == 2 and chosen(3) == 1


def test_a_low_effective_sample_size_lowers_the_level_whatever_the_speed():
    levels = steer(Steering(SteeringSection(), 8), lambda level: 0.9, speed=lambda level: 100.0 * level, ess=0.3)
    assert set(levels[120:]) == {1}


def test_levels_that_should_be_below_the_least_effective_sample_size_are_passed_over():
    section = SteeringSection(ess_power=1, min_ess=0.5)
    up, down = Steering(section, 1), Steering(section, 8)
    for step in range(1, 31):
        for steering in (up, down):
            aged = {"ess/tokens": 0.86**steering.level}  # 0.5 at level 4.6
            steering.add_step(step, float(step), 100.0 * steering.level, aged, 0.9)
        assert up.level in (1, 4), "neither 6 nor 8 is tried"
    assert down.level == 4, "6 is passed over"


def test_unequal_steps_condemn_hardly_ever_a_level_that_is_faster():
    """Level 4 is 2.5 times as fast as level 1, of which only four steps were measured, by chance short ones."""
    num_condemned = 0
    for seed in range(200):
        steering, rng, now = Steering(SteeringSection(max_level=4), 1), random.Random(seed), 0.0
        for step in range(1, 120):
            took = rng.lognormvariate(0.0, 1.0) * 2 / (steering.level + 1)
            now += took
            decision = steering.add_step(step, now, 100.0, {"ess/tokens": 1.0}, 0.9 * took)
            if decision is not None and "must give" in decision.reason:
                num_condemned += 1
                break
    assert num_condemned <= 2


def test_the_ladder_has_both_bounds_and_the_start():
    assert ladder(1, 8, 1) == [1, 2, 3, 4, 6, 8] and ladder(2, 5, 3) == [2, 3, 4, 5] and ladder(1, 1, 1) == [1]
    assert ladder(1, 8, 5) == [1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("level", range(1, 13))
def test_a_run_is_steered_from_the_level_at_which_it_starts(level):
    """Else a decision that nothing changes would leave the run at another level than the one that it names."""
    steering = Steering(SteeringSection(max_level=12, max_update_interval=3), level)
    assert steering.level == level and Steering(SteeringSection(max_level=12), min(level + 2, 12), 3).level == min(
        level + 2, 12
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deterministic"], r"orchestrator.steering follows measured times, and deterministic = true allows none"),
        (["--orchestrator.steering.max_level", "12"], r"max_level = 12 is above .*max_off_policy_steps = 8"),
        (["--orchestrator.steering.min_level", "4"], r"max_async_level = 1 is where steering starts, and not between"),
        (["--orchestrator.max_async_level", "0"], r"max_async_level = 0 is synchronous, and .*starts there"),
        (["--orchestrator.oversampling_factor", "2"], r"fixes the rollouts in flight that steering sets"),
        (["--colocate", "{}"], r"orchestrator.steering does nothing with colocate, whose steps are synchronous"),
        (
            ["--weight_broadcast.interval", "2", "--orchestrator.steering.max_update_interval", "1"],
            "is below .*interval",
        ),
        (["--orchestrator.steering.max_update_interval", "9"], r"needs orchestrator.steering.max_level = 9 or more"),
        pytest.param(
            ["--orchestrator.steering.max_update_interval", "2", "--service", "http://127.0.0.1:1"],
            r"max_update_interval = 2 with \[service\]: the service samples with every version",
            marks=needs("service"),
        ),
    ],
)
def test_what_steering_cannot_do_is_refused(words, message):
    given = ["--orchestrator.env", '[{"id": "sort-letters"}]', "--orchestrator.steering", "{}"]
    with pytest.raises(ConfigError, match=message):
        load(RLConfig, [*given, *words])
