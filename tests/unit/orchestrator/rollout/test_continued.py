"""A rollout that loses its worker, its sandbox or an engine goes on from its last turn, as if nothing had been lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import CharRenderer, FakeEngine, parrot

from stretto.base.errors import EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import RolloutResult, TaskSource
from stretto.envs.workers.pool import open_workers
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.outcomes import Reason
from stretto.records.rollout import Group, RolloutStatus, Task

NUM_TURNS = 6


class Losing:
    """A dialogue with two agents; before the turns in `lost`, once each, it is lost for this reason."""

    def __init__(self, lost: dict[int, Reason | None], *, always: bool = False) -> None:
        self.name, self.lost, self.always = "losing", dict(lost), always

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={}))

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        messages: list[dict] = []
        for turn in range(NUM_TURNS):
            if turn in self.lost:
                reason = self.lost[turn] if self.always else self.lost.pop(turn)
                raise EnvError("lost", reason=reason)
            messages.append({"role": "user", "content": f"word{turn}"})
            reply = await (ctx.agent("other") if turn % 3 == 2 else ctx).chat(messages)
            messages.append(reply.message)
        return RolloutResult(reward=1.0)


def player_of(engine: FakeEngine, **settings) -> Player:
    return Player(engine, CharRenderer(), SamplingSection(), seq_len=4000, **settings)


def play(env: Any, engine: FakeEngine, **settings) -> Group:
    return asyncio.run(player_of(engine, **settings).play(env, Draw(0, env.tasks("train").task(0), 1, version=0)))


def contents(group: Group) -> list:
    return [
        (r.status, r.num_turns, b.agent, b.token_ids.tolist(), b.is_sampled.tolist(), b.logprobs.tolist())
        for r in group.rollouts
        for b in r.branches
    ]


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.SANDBOX_LOST, Reason.ENGINE_ERROR])
@pytest.mark.parametrize("turns", [(1,), (3, 5), (2, 3, 4, 5)])
def test_a_lost_rollout_ends_with_the_same_tokens_and_samples_no_turn_twice(reason, turns):
    whole = play(Losing({}), FakeEngine(parrot(0.5)))
    engine = FakeEngine(parrot(0.5))
    continued = play(Losing(dict.fromkeys(turns, reason)), engine, max_retries=1)
    assert contents(continued) == contents(whole) != []
    assert engine.num_requests == NUM_TURNS


def test_an_engine_that_fails_once_costs_one_request():
    whole = play(Losing({}), FakeEngine(parrot(0.5)))
    causes = iter([None, None, None, "gone", *[None] * NUM_TURNS])
    engine = FakeEngine(parrot(0.5), fail=lambda request: next(causes))
    assert contents(play(Losing({}), engine, max_retries=1)) == contents(whole)
    assert engine.num_requests == NUM_TURNS + 1


def test_no_request_has_the_name_of_one_that_an_engine_may_still_have():
    names: list[str] = []

    def fail(request) -> str | None:
        names.append(request.request_id)
        return "gone" if len(names) == 4 else None

    engine = FakeEngine(parrot(0.5), fail=fail)
    play(Losing({5: Reason.WORKER_LOST}), engine, max_retries=1)
    assert len(names) == len(set(names)) == NUM_TURNS + 1


@pytest.mark.parametrize(("reason", "num_requests"), [(Reason.WORKER_LOST, 6), (Reason.ENV_ERROR, 6), (None, 6)])
def test_a_rollout_that_is_lost_at_the_same_place_begins_anew_with_other_samples(reason, num_requests):
    engine = FakeEngine(parrot(0.5))
    group = play(Losing({2: reason}, always=True), engine, max_retries=2)
    assert group.rollouts[0].status is RolloutStatus.FAILED
    assert engine.num_requests == num_requests  # two turns, three times


def test_without_retries_a_lost_rollout_has_failed():
    group = play(Losing({3: Reason.WORKER_LOST}), FakeEngine(parrot(0.5)), max_retries=0)
    assert group.rollouts[0].reason is Reason.WORKER_LOST


@pytest.mark.heavy
def test_kill_9_of_a_worker_changes_no_token(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "envs"))

    async def played(*, kills: bool) -> tuple[Group, int, int]:
        env = open_workers("worker_envs:Chain", {"num_turns": 8}, "test", num_workers=1)
        engine, numbers = FakeEngine(parrot(0.5)), itertools.count()

        def fail(request) -> None:
            if kills and next(numbers) == 8:  # two rollouts play side by side
                os.kill(env.pool.workers[0].child.pid, signal.SIGKILL)

        engine.fail, engine.delay = fail, lambda request: 0.05
        try:
            player = player_of(engine, max_retries=1)
            group = await player.play(env, Draw(0, env.tasks("train").task(0), 2, version=0))
            return group, env.pool.num_lost, engine.num_requests
        finally:
            await env.close()

    whole, _, num_whole = asyncio.run(played(kills=False))
    continued, num_lost, num_requests = asyncio.run(played(kills=True))
    assert num_lost == 1 and contents(continued) == contents(whole) != []
    assert num_whole == 18 and num_requests <= num_whole + 2  # a turn that was under way is sampled again
