"""A run ends within one step of its budget, at a checkpoint, and goes on with a larger one; starts are added up."""

from __future__ import annotations

import itertools
import random

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.run import BudgetSection
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics
from stretto.monitors.purse import Purse, Used, larger_bound
from stretto.orchestrator.state.resume import used_before
from stretto.orchestrator.state.run_checkpoint import Progress

HOUR_S = 3600.0


def run(path, *, level=1, seed=0, step_s=9.0, start=0, max_steps=60, **settings):
    """A run whose replies and steps take log-normal times; its loop and trainer."""
    rng = random.Random(seed)
    engine = FakeEngine(parrot(0.5), delay=lambda _: 2.0 * rng.lognormvariate(0.0, 0.6))
    trainer = FakeTrainer(
        max_steps=max_steps, start=start, step_delay=lambda _: step_s * rng.lognormvariate(0.0, 0.3), checkpoint_every=2
    )
    resume = {"resume": {"step": start}} if start else {}
    cfg = config(path, max_steps=max_steps, max_async_level=level, **settings, **resume)
    return train(cfg, engine, trainer), trainer


def steps_of(loop):
    """The metrics of each step."""
    return [row for row in read_metrics(loop.parts.run_dir.metrics("orchestrator")) if "time/step" in row]


@pytest.mark.heavy
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_hours_are_held_within_one_step(tmp_path, level, seed):
    loop, trainer = run(tmp_path, level=level, seed=seed, budget={"max_hours": 150 / HOUR_S})
    ends = [row["budget/hours"] * HOUR_S for row in steps_of(loop)]
    longest = max(b - a for a, b in zip([0.0, *ends], ends, strict=False))
    assert trainer.step == len(ends) < 60 and abs(ends[-1] - 150) <= longest
    assert loop.stopped_because.startswith("budget.max_hours = ")
    assert loop.parts.run_dir.latest_complete_checkpoint() == trainer.step


def test_tokens_are_held_within_one_step_whatever_is_under_way(tmp_path):
    loop, trainer = run(tmp_path, level=3, budget={"max_tokens": 1000})
    tokens = [row["budget/tokens"] for row in steps_of(loop)]
    assert tokens[-2] < 1000 <= tokens[-1] and trainer.step == len(tokens)


def test_a_budget_that_is_smaller_than_a_step_gives_one_step(tmp_path):
    loop, trainer = run(tmp_path, level=3, budget={"max_tokens": 1})
    assert trainer.step == 1 and loop.stopped_because.startswith("budget.max_tokens = 1, and ")


def test_costs_are_the_prices_of_hours_and_tokens(tmp_path):
    prices = {"hour": 36.0, "sampled_tokens": 1e3, "trained_tokens": 1e3}
    loop, _ = run(tmp_path, budget={"max_cost": 3.0, "prices": prices})
    rows = steps_of(loop)
    for row in rows:
        tokens = row["budget/tokens"] + row["budget/sampled_tokens"]
        assert row["budget/cost"] == pytest.approx(36.0 * row["budget/hours"] + tokens / 1e3)
    step = max(b["budget/cost"] - a["budget/cost"] for a, b in itertools.pairwise(rows))
    assert abs(rows[-1]["budget/cost"] - 3.0) <= step and "budget.max_cost = 3" in loop.stopped_because


@pytest.mark.heavy
def test_starts_are_added_up_with_what_a_resume_takes_back_and_a_larger_budget_goes_on(tmp_path):
    first, trainer = run(tmp_path, budget={"max_hours": 100 / HOUR_S})
    used = used_before(first.parts.run_dir, Progress())
    assert used.trained == steps_of(first)[-1]["budget/tokens"] and used.seconds >= 100 - 9
    with pytest.raises(ConfigError, match=r"budget.max_hours = .* has used .*raise it, or leave it out"):
        Purse(BudgetSection(max_hours=used.seconds / HOUR_S), used).check()
    start = trainer.step // 2 * 2 - 2  # an earlier checkpoint: its later steps were paid too
    second, again = run(tmp_path, start=start, budget={"max_hours": 200 / HOUR_S})
    ends = [row["budget/hours"] * HOUR_S for row in steps_of(second) if row["incarnation"] == 2]
    assert ends[0] > used.seconds and abs(ends[-1] - 200) <= 30 and again.step > trainer.step


def test_what_is_used_is_in_the_ledger_with_its_step(tmp_path):
    loop, trainer = run(tmp_path, max_steps=5)
    with LedgerReader(loop.parts.run_dir) as reader:
        events = [event["data"] for event in reader.events("used")]
    assert len(events) == trainer.step == 5
    assert [event["trained"] for event in events] == [row["budget/tokens"] for row in steps_of(loop)]


def test_the_forecast_is_the_step_at_which_the_run_ends(tmp_path):
    loop, trainer = run(tmp_path, budget={"max_tokens": 3000})
    forecasts = [row["budget/last_step"] for row in steps_of(loop)[8:]]
    assert all(abs(step - trainer.step) <= 2 for step in forecasts)


def test_a_purse_adds_up_what_a_clock_and_steps_say():
    now = [100.0]
    purse = Purse(BudgetSection(max_hours=1.0, max_tokens=10_000), Used(seconds=600.0), clock=lambda: now[0])
    purse.begin(7)
    assert purse.forecast() is None and purse.seconds_left() == 3000.0
    for step in (8, 9):
        now[0] += 60.0
        row = purse.end_step(step, 1000)
    assert row["budget/tokens"] == 2000 and row["budget/hours"] == 720 / HOUR_S and row["budget/share"] == 0.2
    forecast = purse.forecast()
    assert (forecast.key, forecast.last_step, forecast.left_s) == ("max_tokens", 17, 480.0)
    now[0] += 50.0
    assert purse.spent_after(2, 3000) == Used(seconds=840.0, trained=5000)  # 120 s from the end of step 9
    assert purse.excess() is None and "has used 10k tokens" in purse.excess(purse.spent_after(2, 8000))
    assert (
        Used.of(purse.used.as_dict()) == purse.used
        and larger_bound("max_tokens", 1e7) == "--budget.max-tokens 20000000"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "{}"], "a budget without a bound ends nothing; give budget.max_hours, budget.max_tokens or"),
        (["--budget.max-cost", "5"], r"budget.max_cost = 5(.0)? and nothing has a price.*give budget.prices.hour"),
        (["--budget.max-hours", "0"], r"budget.max_hours"),
        (["--budget.max-hour", "1"], r"did you mean --budget.max-hours"),
    ],
)
def test_what_is_wrong_with_a_budget_is_said(words, message):
    envs = ["--orchestrator.env", '[{"id": "sort-letters"}]']
    with pytest.raises(ConfigError, match=message):
        load(RLConfig, [*envs, *words])


@needs("sft")
def test_sft_refuses_a_price_of_what_it_does_not_do():
    words = ["--data.type", "environment", "--data.id", "sort-letters", "--max-steps", "4"]
    with pytest.raises(ConfigError, match=r"prices.sampled_tokens = 1(.0)? does nothing: `sft` samples no tokens"):
        load(SFTConfig, [*words, "--budget.prices.sampled-tokens", "1"])


def test_the_cost_of_frozen_models_is_a_price(tmp_path):
    words = ["--orchestrator.env", '[{"id": "sort-letters"}]', "--budget.max-cost", "5"]
    judge = ["--models.judge.base_url", "http://localhost:1/v1", "--models.judge.client.prompt_price", "1.0"]
    assert load(RLConfig, [*words, *judge]).budget.max_cost == 5
