"""[orchestrator.steering] with max_update_interval: engines get new weights as often as they are worth it."""

from __future__ import annotations

import asyncio
import math
import random
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
from fakes import AgingTrainer, CharRenderer, FakeEngine, parrot
from orchestrator_runs import config, run_once, train

from stretto.config.sections.orchestrator import SteeringSection
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import Ledger
from stretto.monitors.file import read_metrics
from stretto.orchestrator.main import build_bounds
from stretto.orchestrator.versions.loader import VersionLoader
from stretto_steering.concurrency import build_limit
from stretto_steering.controller import Speed, Steering, within

STEPS = 200


class StandingEngine(FakeEngine):
    """An engine that computes nothing while it loads a version: running requests end so much later."""

    def __init__(self, *settings, **more) -> None:
        super().__init__(*settings, **more)
        self.stood_s, self._is_running = 0.0, asyncio.Event()
        self._is_running.set()

    async def _wait(self, request_id: str, delay_s: float) -> float:
        now = asyncio.get_running_loop().time
        end = now() + delay_s
        while now() < end - 1e-9 or not self._is_running.is_set():
            before = self.stood_s
            await self._is_running.wait()
            await asyncio.sleep(max(end - now(), 0.0))
            await self._is_running.wait()
            end += self.stood_s - before
        return 1.0

    async def update_weights(self, manifest) -> None:
        if manifest.version and self.load_delay:
            self._is_running.clear()
            await super().update_weights(manifest)
            self.stood_s += self.load_delay
            self._is_running.set()
        else:
            self.version = manifest.version


def ends(path, seed, level, interval=1, steering=None, *, play_s, train_s, publish_s, load_s, decay, start=0, **more):
    """The config, engine and trainer of a run whose rollouts take log-normal times."""
    rng, steps = random.Random(seed), more.pop("steps", STEPS)
    engine = StandingEngine(parrot(0.5), delay=lambda _: play_s * rng.lognormvariate(0.0, 0.5), load_delay=load_s)
    trainer = AgingTrainer(
        decay, max_steps=steps, start=start, publish_s=publish_s, checkpoint_every=more.pop("checkpoint_every", None),
        step_delay=lambda _: train_s * rng.lognormvariate(0.0, 0.2),
    )  # fmt: skip
    given = {} if steering is None else {"steering": steering}
    cfg = config(
        path, max_steps=steps, max_async_level=level, batch_size=32, group_size=4, filter_zero_advantages=False,
        weight_broadcast={"interval": interval}, **given, **more,
    )  # fmt: skip
    return cfg, engine, trainer


def run(*given, **more):
    """Such a run; its trainer and loop."""
    cfg, engine, trainer = ends(*given, **more)
    return trainer, train(cfg, engine, trainer)


def time_to(worth, goal):
    """Seconds until so many effective tokens are trained."""
    totals = accumulate(tokens for _, tokens in worth)
    return next(at for (at, _), total in zip(worth, totals, strict=True) if total >= goal)


def decisions(run_dir):
    with LedgerReader(run_dir) as reader:
        return [event["data"] for event in reader.events("steering")]


def sent(run_dir):
    with LedgerReader(run_dir) as reader:
        rows = reader.rows("SELECT DISTINCT version FROM versions WHERE state = 'loaded' ORDER BY version")
    return [row["version"] for row in rows]


TASKS = {
    "engines stand still": {"play_s": 6, "train_s": 6, "publish_s": 0, "load_s": 10, "decay": 0.01},
    "publishing is slow": {"play_s": 2, "train_s": 6, "publish_s": 8, "load_s": 0.1, "decay": 0.01},
    "slow, but tokens age": {"play_s": 6, "train_s": 6, "publish_s": 1, "load_s": 1.5, "decay": 0.3},
    "updates cost nothing": {"play_s": 6, "train_s": 6, "publish_s": 0.01, "load_s": 0.01, "decay": 0.02},
}
FIXED = ((1, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 4))
"""Levels, and steps between two versions."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("seed", [2001, 2002])
def test_a_steered_run_is_nearly_as_fast_as_the_best_setting_and_no_slower_than_with_every_version(
    tmp_path, name, seed
):
    fixed = {at: run(tmp_path / "{}-{}".format(*at), seed, *at, **TASKS[name])[0].worth for at in FIXED}
    goal = 0.9 * min(sum(tokens for _, tokens in worth) for worth in fixed.values())
    times = {at: time_to(worth, goal) for at, worth in fixed.items()}
    trainer, loop = run(
        tmp_path / "steered", seed, 1, steering={"max_update_interval": 4, "ess_power": 2}, **TASKS[name]
    )
    took = time_to(trainer.worth, goal)
    assert took <= 1.1 * min(times.values())
    assert took <= 1.05 * min(each for (_, interval), each in times.items() if interval == 1)
    assert decisions(loop.parts.run_dir) and not audit(loop.parts.run_dir)


@pytest.mark.heavy
def test_each_decision_is_a_row_and_the_versions_that_engines_get_follow_it(tmp_path):
    evals = {"interval": 7, "num_examples": 4, "env": [{"id": "fakes:EchoEnv"}]}
    steering = {"max_update_interval": 3, "interval": 4, "max_level": 6}
    task = TASKS["engines stand still"]
    _, loop = run(tmp_path, 7, 1, steering=steering, eval=evals, **task, steps=40)
    run_dir, rows = loop.parts.run_dir, decisions(loop.parts.run_dir)
    assert all(a["update_interval"] == b["update_interval_before"] for a, b in pairwise(rows))
    assert rows[0]["update_interval_before"] == 1 and rows[-1]["update_interval"] == 3
    assert any(row["pause_s"] == task["load_s"] for row in rows), "measured, not given"
    steps = {row["step"]: row for row in read_metrics(run_dir.metrics("orchestrator")) if "time/step" in row}
    for row in rows[:-1]:
        assert steps[row["step"] + 1]["steering/update_interval"] == row["update_interval"]
    versions, raised = sent(run_dir), next(row["step"] for row in rows if row["update_interval"] == 3)
    shipped = raised + 7  # batches that were under way then
    assert versions[: raised + 1] == [*range(raised + 1)]
    expected = [v for v in range(shipped, 41) if v % 3 == 0 or v % 7 == 0 or v == 40]
    assert [v for v in versions if v >= shipped] == expected
    scored = [row["step"] for row in read_metrics(run_dir.metrics("orchestrator")) if any("eval/" in k for k in row)]
    assert scored == [0, 7, 14, 21, 28, 35, 40] and not audit(run_dir)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("kill_at", 100.0), ("kill_at", 260.0), ("stop_at", 260.0)]
    + [pytest.param(kind, s, marks=pytest.mark.slow) for kind in ("kill_at", "stop_at") for s in (180.0, 290.0, 320.0)],
)
def test_a_steered_run_goes_on_from_any_phase_with_its_interval(tmp_path, kind, seconds):
    settings = TASKS["engines stand still"] | {
        "steering": {"max_update_interval": 4, "interval": 3}, "steps": 60, "checkpoint_every": 2,
    }  # fmt: skip
    cfg, engine, trainer = ends(tmp_path, 5, 1, **settings)
    run_once(cfg, engine, trainer, CharRenderer(), **{kind: seconds})
    step = cfg.run_dir.latest_complete_checkpoint()
    assert step is not None and 0 < step < 60
    before = decisions(cfg.run_dir)
    rows = [row for row in before if row["step"] <= step]  # what was decided later is taken back
    if kind == "stop_at":
        assert trainer.published == trainer.step == step, "the last version is sent"
    resumed, engine, trainer = ends(tmp_path, 6, 1, **settings, start=step, resume={})
    hold = []
    loop = train(resumed, engine, trainer, hold=hold)
    assert loop.progress.step == 60 and sent(cfg.run_dir)[-1] == 60
    if rows:
        [after, *_] = decisions(cfg.run_dir)[len(before) :]
        assert after["update_interval_before"] == rows[-1]["update_interval"]
        assert after["level_before"] == rows[-1]["level"]
    assert decisions(cfg.run_dir)[-1]["update_interval"] > 1
    assert audit(cfg.run_dir) == []


@pytest.mark.heavy
def test_a_level_that_falls_below_what_is_not_sent_yet_blocks_no_batch(tmp_path):
    """From level 8 and every eighth version to level 1 and each, while seven versions in a row are not sent."""
    for at in (9, 12, 15):
        task = TASKS["publishing is slow"] | {"load_s": 0.5}
        cfg, engine, trainer = ends(tmp_path / str(at), at, 8, 8, **task, steps=30)

        async def lower(loop, at=at):
            while loop.progress.step < at:
                await asyncio.sleep(0.5)
            loop.parts.versions.interval = 1
            loop.buffer.set_async_level(1)

        loop = train(cfg, engine, trainer, meanwhile=lower)
        assert loop.progress.step == 30 and sent(cfg.run_dir)[-8:] == [*range(23, 31)]
        assert not audit(cfg.run_dir)
        rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
        assert not sum(row.get("off_policy/dropped", 0) for row in rows)


@pytest.mark.heavy
@pytest.mark.parametrize(("before", "after"), [(6, 8), (5, 4)])
def test_an_interval_that_changes_between_two_versions_lets_no_group_become_too_old(tmp_path, before, after):
    """Multiples of 6 and of 8 are up to ten steps apart, of 5 and of 4 up to seven: more than may be ahead."""
    level = max(before, after)
    task = TASKS["publishing is slow"] | {"load_s": 0.5}
    steering = {"max_level": level, "max_update_interval": level, "interval": 99}  # which decides nothing so early
    cfg, engine, trainer = ends(tmp_path, 1, level, **task, steps=18, max_off_policy_steps=level, steering=steering)
    at = before + 2  # decided, but that of `before`, not sent

    async def change(loop):
        loop.parts.versions.interval = before
        while loop.buffer.next_step <= at:
            await asyncio.sleep(0.1)
        loop.parts.versions.interval = after

    loop = train(cfg, engine, trainer, meanwhile=change)
    versions = sent(cfg.run_dir)
    assert loop.progress.step == 18 and versions[:2] == [0, before]
    assert max(b - a for a, b in pairwise(versions)) <= level and not audit(cfg.run_dir)
    assert not sum(row.get("off_policy/dropped", 0) for row in read_metrics(cfg.run_dir.metrics("orchestrator")))


def test_no_more_steps_are_without_a_version_than_the_interval_of_the_moment_has():
    rng = random.Random(1)
    for _ in range(200):
        loader, last = VersionLoader(None, None, start=(start := rng.randint(0, 9)), timeout_s=1.0), start
        for step in range(start + 1, start + 60):
            loader.interval = rng.randint(1, 8) if rng.random() < 0.2 else loader.interval
            is_sent = loader.decide(step)
            assert is_sent or (step % loader.interval and step - last < loader.interval)
            last = step if is_sent else last


def test_adaptive_concurrency_may_grow_as_far_as_the_level_that_steering_may_reach(tmp_path):
    def most(**more):
        cfg = config(tmp_path, concurrency={"type": "adaptive"}, batch_size=32, **more)
        Ledger(cfg.run_dir).close()
        limit = build_limit(cfg, SimpleNamespace(bounds=build_bounds(cfg)))
        return limit.upper_bound

    assert most() == 64
    assert most(steering={"max_level": 4}) == 160
    assert most(steering={"max_level": 4}, max_inflight_rollouts=96) == 96


# -- decisions, from steps of a simple model --


def steer(steering, *, train_s=1.0, play_s=0.0, publish_s=0.0, pause_s=0.0, decay=0.0, steps=150, now=0.0):
    """Feed steps; the settings over time. costs may follow the step."""
    found = []
    for step in range(1, steps + 1):
        level, interval = steering.level, steering.update_interval
        publish, pause = (each(step) if callable(each) else each for each in (publish_s, pause_s))
        busy_s = train_s + publish / interval
        step_s = max(busy_s, play_s + pause / interval)
        if step % interval == 0:
            steering.costs.publish.append(publish)
            steering.costs.pause.append(pause)
        now, age = now + step_s, level - (interval - 1) / 2
        metrics = {"ess/tokens": math.exp(-decay * age), "off_policy/mean": age}
        steering.add_step(step, now, 100.0, metrics, step_s - busy_s)
        found.append((steering.level, steering.update_interval))
    return found


def steering(most=4, **more):
    return Steering(SteeringSection(max_update_interval=most, **more), 1)


def test_updates_that_cost_nothing_are_made_each_step():
    assert set(steer(steering(), publish_s=0.01, pause_s=0.01)) == {(1, 1)}


def test_a_first_round_sees_that_updates_are_what_the_trainer_waits_for():
    chosen = steering()
    chosen.start(0.0)
    chosen.costs.pause.append(10.0)
    chosen.add_step(1, 24.0, 100.0, {"ess/tokens": 1.0, "off_policy/mean": 0.0}, 18.0)
    decision = chosen.add_step(2, 30.0, 100.0, {"ess/tokens": 1.0, "off_policy/mean": 1.0}, 0.0)
    assert decision is not None and "updates cost" in decision.reason and chosen.update_interval > 1


def test_a_level_is_told_and_weighed_as_it_is_and_not_as_its_rung():
    """With every fourth version the rungs 4 and 6 are the levels 7 and 8: one step apart."""
    chosen = Steering(SteeringSection(max_update_interval=4), 7, 4)
    found, reasons = [], []
    for step in range(1, 120):
        speed = 100.0 if chosen.level == 7 else 95.0
        decision = chosen.add_step(step, float(step), speed, {"ess/tokens": 1.0, "off_policy/mean": 5.0}, 0.3)
        chosen.costs.pause.append(1.2)
        found.append(chosen.level)
        reasons.append("" if decision is None else decision.reason)
    assert 8 in found and "level 8 gives -5% over level 7 and must give +4%" in reasons


@pytest.mark.parametrize(("gain", "is_doubted"), [(1.11, False), (1.05, True)])
def test_a_level_earns_its_gain_over_a_level_and_not_over_a_rung(gain, is_doubted):
    """With every fourth version the rungs 2 and 4 are the levels 5 and 7, so 1.08 is enough, and not 1 + 0.04 * 5."""
    chosen = Steering(SteeringSection(max_update_interval=4, max_level=16), 7, 4)
    chosen._speeds[2, 4] = Speed(effective=1000.0, seconds=10.0, steps=10.0, num=1)
    chosen._speeds[4, 4] = Speed(effective=1000.0 * gain, seconds=10.0, steps=10.0, num=2)
    assert chosen._may_be_as_good(waited=0.5) == is_doubted


def test_updates_that_cost_the_slower_side_much_are_made_rarely():
    assert steer(steering(), publish_s=2.0)[-1] == (4, 4), "the level rises with the interval"
    assert steer(steering(), play_s=1.0, pause_s=2.0)[-1][1] == 4
    assert steer(steering(), play_s=0.2, publish_s=0.2)[-1] == (2, 2), "a tenth of the time, each further one less"
    assert steer(Steering(SteeringSection(), 1), publish_s=2.0)[-1] == (1, 1), "not without max_update_interval"


def test_pauses_of_engines_that_wait_for_the_trainer_are_free():
    assert set(steer(steering(), train_s=3.0, pause_s=1.0)) <= {(1, 1), (2, 2)}
    assert steer(steering(), train_s=3.0, pause_s=1.0)[-1] == (1, 1)


def test_tokens_that_age_are_worth_updates():
    assert steer(steering(), publish_s=0.5)[-1][1] > 1
    assert steer(steering(), publish_s=0.5, decay=0.3)[-1] == (1, 1)


def test_an_interval_that_lowers_the_effective_sample_size_too_far_is_left():
    assert steer(steering(min_ess=0.5, ess_power=2), publish_s=20.0, decay=0.3)[-1] == (3, 3), (
        "0.55 there, 0.47 at the next"
    )


def test_tokens_that_would_be_worth_nothing_are_a_loss_like_any_other():
    """Without min_ess, and with whole replies: ten versions older, their worth is less than numbers can tell from 0."""
    chosen = Steering(SteeringSection(max_update_interval=4, min_ess=0, effective="rollouts"), 1)
    for step in range(1, 40):
        chosen.costs.publish.append(2.0)
        chosen.add_step(step, 3.0 * step, 100.0, {"ess/rollouts": 0.005, "off_policy/mean": 0.1}, 0.0)
    assert chosen.update_interval == 1


def test_it_goes_back_when_updates_become_cheap():
    found = steer(steering(), publish_s=lambda step: 2.0 if step < 60 else 0.0, steps=120)
    assert found[58] == (4, 4) and found[-1] == (1, 1)


def test_an_interval_that_does_not_give_its_gain_is_left_and_tried_again_later():
    """Publishing is reported to cost much and costs nothing: only what is measured of the speed says so."""
    chosen, own = steering(most=2, retry=4), []
    for step in range(1, 401):
        chosen.costs.publish.append(1.0)
        chosen.add_step(step, float(step), 100.0, {"ess/tokens": 1.0}, 0.0)
        own.append(chosen.update_interval)
    tries = [at for at, (a, b) in enumerate(pairwise(own)) if a < b]
    assert len(tries) >= 2 and own.count(1) > 200
    gaps = [later - at for at, later in pairwise(tries)]
    assert gaps == sorted(gaps) and gaps[-1] > gaps[0]


def test_the_level_stays_within_its_bound_and_the_interval_within_what_the_level_allows():
    rng = random.Random(3)
    for _ in range(100):
        least, high = rng.randint(1, 3), rng.randint(3, 9)
        low = max(least - 1, 1)
        most = rng.randint(least, least + high - low)
        section = SteeringSection(min_level=low, max_level=high, max_update_interval=most, interval=rng.randint(2, 5))
        level, interval = within(section, rng.randint(0, 12), rng.randint(1, 12), least)
        chosen, now = Steering(section, level, interval, least_interval=least), 0.0
        for step in range(1, 200):
            assert low <= chosen.level <= high and least <= chosen.update_interval <= min(most, chosen.level + 1)
            took = rng.lognormvariate(0.0, 1.0)
            now += took
            chosen.costs.publish.append(rng.random())
            chosen.costs.pause.append(rng.random())
            metrics = {"ess/tokens": rng.uniform(0.3, 1.0), "off_policy/mean": rng.uniform(0, 8)}
            chosen.add_step(step, now, 100.0, metrics, took * rng.random())
