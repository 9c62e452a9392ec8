"""What a frozen model has been asked costs what its prices say, and no run spends more than it may."""

from __future__ import annotations

import asyncio

import pytest
from test_model_client import ASK, Judge, asked

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.distill import ModelLimits
from stretto_frozen.costs import Spending, restore

PRICES = {"prompt_price": 2.0, "reply_price": 10.0}  # of the judge's 5 and 2 tokens: 0.00003 per request
COST = (5 * 2.0 + 2 * 10.0) / 1e6


def test_a_request_costs_its_tokens_and_a_cached_one_nothing():
    async def ask(client):
        for _ in range(3):
            await client.chat(ASK)
        await client.chat(ASK, temperature=1.0)
        return client.spending

    spending = asked(Judge("1"), ask, **PRICES)
    assert spending.cost == pytest.approx(2 * COST)
    assert spending.gauges() == {
        "models/judge/requests": 4.0,
        "models/judge/cached": 2.0,
        "models/judge/failed": 0.0,
        "models/judge/prompt_tokens": 10.0,
        "models/judge/completion_tokens": 4.0,
        "models/judge/cost": spending.cost,
    }
    assert spending.summary() == "4 requests, 2 cached, 10 prompt tokens, 4 completion tokens, cost 6e-05"


def test_without_a_price_there_is_no_cost():
    spending = asked(Judge("1"), _ask_once)
    assert "models/judge/cost" not in spending.gauges() and "cost" not in spending.summary()


async def _ask_once(client):
    await client.chat(ASK)
    return client.spending


def test_a_request_beyond_the_bound_is_not_sent_and_says_what_to_raise():
    async def ask(client):
        for number in range(2):
            await client.chat([{"role": "user", "content": str(number)}])
        await client.chat([{"role": "user", "content": "1"}])  # known from before: costs nothing
        with pytest.raises(ConfigError, match=r"models.judge has cost 6e-05.*max_cost = 5e-05.*--resume"):
            await client.chat(ASK)

    judge = Judge("1")
    asked(judge, ask, **PRICES, max_cost=5e-5)
    assert len(judge.bodies) == 2


def test_a_run_is_ended_at_its_bound_and_who_asks_waits_to_be_cancelled():
    async def ask(client):
        reasons = []
        client.spending.stop = reasons.append
        await client.chat(ASK)
        waiting = asyncio.create_task(client.chat([{"role": "user", "content": "more"}]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        return reasons

    [reason] = asked(Judge("1"), ask, **PRICES, max_cost=1e-5)
    assert "max_cost" in reason


def test_a_server_that_counts_no_tokens_cannot_have_a_price():
    spending = Spending("judge", ModelLimits(**PRICES))

    async def ask(client):
        client._parsed = lambda data, kind: type(client)._parsed(client, data.replace(b'"usage"', b'"use"'), kind)
        await client.chat(ASK)

    with pytest.raises(ConfigError, match=r"models.judge.*usage"):
        asked(Judge("1"), ask, **PRICES)
    assert not spending.counts


def test_a_resumed_run_goes_on_from_the_newest_counts():
    spending, other = (Spending(name, ModelLimits(**PRICES, max_cost=1.0)) for name in ("judge", "other"))
    events = [{"judge": {"requests": n, "prompt tokens": n * 1000}} for n in (1, 2)]
    restore([spending, other], events)
    assert spending.counts == {"requests": 2, "prompt tokens": 2000} and spending.cost == pytest.approx(0.004)
    assert not other.counts
    with pytest.raises(ConfigError, match=r"models.judge has cost 2,? and|has cost 2"):
        restore([spending], [{"judge": {"prompt tokens": 1_000_000}}])


def test_a_bound_without_a_price_is_refused(tmp_path):
    words = ["--models.judge.base_url", "https://h/v1", "--models.judge.client.max_cost", "5"]
    with pytest.raises(ConfigError, match=r"models.judge.client.max_cost = 5.*prompt_price"):
        load(RLConfig, ["--orchestrator.env", '[{"id": "sort-letters"}]', *words], verb="rl")
