"""How rollouts end: reasons, what a timeout is worth, and what infrastructure does to advantages."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from fakes import CharRenderer, EchoEnv, FakeEngine, GuessEnv, parrot, run_virtual

from stretto.base.errors import EngineError, EnvError
from stretto.config.sections.algorithm import GrpoAlgo
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import EpisodeLimits, LimitReached, RolloutResult
from stretto.envs.workers.wire import error_from, error_kind
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.orchestrator.groups.ends import Ends
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.outcomes import OUTCOMES, Cause, Reason, reason_of, treatment_of
from stretto.records.rollout import RolloutStatus


def play(env: Any, engine: FakeEngine | None = None, *, index: int = 0, members: int = 4, **settings: Any) -> Any:
    engine = engine or FakeEngine(parrot(0.5))
    settings = {"sampling": SamplingSection(), "seq_len": 200, "seed": 1, "max_retries": 0} | settings
    player = Player(engine=engine, renderer=CharRenderer(), **settings)
    return run_virtual(player.play(env, Draw(index, env.tasks("train").task(index), members, version=0)))


def reasons_of(group: Any) -> set[Reason | None]:
    return {rollout.reason for rollout in group.rollouts}


class Sandboxed(GuessEnv):
    """Gives what a member's number and task say; its sandbox may be killed, or hang."""

    def __init__(self, killed: set[tuple[str, int]], hung: set[tuple[str, int]]) -> None:
        super().__init__(num_turns=1)
        self.killed, self.hung = killed, hung

    async def rollout(self, task: Any, ctx: Any) -> RolloutResult:
        await super().rollout(task, ctx)
        who = (task.task_id, ctx.episode.member)
        if who in self.killed:
            raise EnvError("sandbox: it was killed", reason=Reason.SANDBOX_LOST)
        if who in self.hung:
            await asyncio.Event().wait()
        return RolloutResult(reward=random.Random(str(who)).random())


class Slow(GuessEnv):
    """Scores what is there if its time is over; the first of three turns is right."""

    async def rollout(self, task: Any, ctx: Any) -> RolloutResult:
        messages: list[dict[str, Any]] = []
        for _ in range(3):
            messages.append({"role": "user", "content": "go"})
            try:
                reply = await ctx.chat(messages)
            except LimitReached:
                return RolloutResult(reward=0.25, is_truncated=True)
            messages.append(dict(reply.message))
        return RolloutResult(reward=1.0)


def slow_engine() -> FakeEngine:
    """Its first reply takes 1 s, any other one 100 s."""
    return FakeEngine(parrot(1.0), delay=lambda request: 1.0 if len(request.prompt_ids) < 6 else 100.0)


@pytest.mark.heavy
def test_lost_sandboxes_change_no_advantage_of_healthy_members() -> None:
    rng = random.Random(5)
    for index in range(40):
        everyone = [(f"train-{index}", member) for member in range(8)]
        fates = {who: rng.random() for who in everyone}
        killed = {who for who, fate in fates.items() if fate < 0.05}
        hung = {who for who, fate in fates.items() if 0.05 <= fate < 0.1}
        healthy = [who[1] for who in everyone if who not in killed | hung]
        group = play(Sandboxed(killed, hung), index=index, members=8, timeout_s=60.0)
        for who in everyone:
            expected = Reason.SANDBOX_LOST if who in killed else Reason.ENV_HUNG if who in hung else None
            assert group.rollouts[who[1]].reason is expected
        got = np.array(assign_advantages(group, GrpoAlgo())[0].advantages)
        rewards = np.array([random.Random(str(everyone[member])).random() for member in healthy])
        np.testing.assert_allclose(got[healthy], rewards - rewards.mean(), rtol=0, atol=1e-9)
        assert abs(got[healthy].mean()) < 1e-9
        assert all(got[member] == 0 for member in range(8) if member not in healthy)


@pytest.mark.parametrize(
    ("timeout_is", "status", "reward"),
    [("score", RolloutStatus.TRUNCATED, 0.25), ("zero", RolloutStatus.TRUNCATED, 0.0),
     ("fail", RolloutStatus.FAILED, 0.0)],
)  # fmt: skip
def test_a_deadline_during_a_later_reply_is_what_the_environment_says(
    timeout_is: str, status: RolloutStatus, reward: float
) -> None:
    group = play(Slow(), slow_engine(), timeout_s=10.0, timeout_is=timeout_is, max_retries=2)
    assert reasons_of(group) == {Reason.DEADLINE}
    for rollout in group.rollouts:
        assert rollout.status is status and rollout.reward == reward
        assert rollout.num_sampled_tokens + rollout.num_lost_tokens > 0


def test_a_time_limit_of_the_environment_is_a_timeout_too() -> None:
    env = Slow()
    env.limits = EpisodeLimits(timeout_s=0.5)
    group = play(env, slow_engine(), timeout_is="zero")
    assert reasons_of(group) == {Reason.TIME_LIMIT} and {r.reward for r in group.rollouts} == {0.0}


def test_limits_and_failures_have_reasons_of_their_own() -> None:
    late = FakeEngine(parrot(1.0), delay=lambda request: 100.0)
    assert reasons_of(play(EchoEnv(), late, timeout_s=10.0)) == {Reason.ENGINE_LATE}
    assert reasons_of(play(GuessEnv(), late, timeout_s=10.0)) == {Reason.ENGINE_LATE}
    broken = FakeEngine(parrot(1.0), fail=lambda request: "it is gone")
    assert reasons_of(play(EchoEnv(), broken)) == reasons_of(play(GuessEnv(), broken)) == {Reason.ENGINE_ERROR}
    assert reasons_of(play(EchoEnv(broken=True))) == {Reason.ENV_ERROR}
    assert reasons_of(play(EchoEnv(), seq_len=5)) == reasons_of(play(GuessEnv(), seq_len=3)) == {Reason.NO_REPLY}
    assert reasons_of(play(GuessEnv(), seq_len=14)) <= {Reason.CONTEXT_FULL, Reason.REPLY_CUT}
    turns = GuessEnv()
    turns.limits = EpisodeLimits(max_turns=1)
    assert reasons_of(play(turns)) == {Reason.TURN_LIMIT}
    turns.limits = EpisodeLimits(max_tokens=4)
    assert reasons_of(play(turns)) <= {Reason.TOKEN_LIMIT, Reason.REPLY_CUT}
    assert reasons_of(play(EchoEnv(), FakeEngine(parrot(1.0)))) == {None}


def test_every_reason_has_a_row_and_only_timeouts_ask_what_they_are() -> None:
    assert set(OUTCOMES) == set(Reason)
    for reason, outcome in OUTCOMES.items():
        asked = {treatment_of(reason, timeout_is) for timeout_is in ("score", "zero", "fail")}
        assert (len(asked) == 3) == (outcome.cause is Cause.TIMEOUT)
        assert not outcome.is_retried or outcome.cause is Cause.INFRASTRUCTURE


def test_a_reason_crosses_the_wire_of_a_worker() -> None:
    error = EnvError("it was killed", reason=Reason.SANDBOX_LOST)
    assert reason_of(error_from(error_kind(error), str(error), error.reason)) is Reason.SANDBOX_LOST
    assert reason_of(error_from("EngineError", "gone")) is reason_of(EngineError("gone")) is Reason.ENGINE_ERROR


def test_metrics_show_whether_long_rollouts_are_left_out_more_often() -> None:
    ends = Ends()
    assert ends.metrics() == {}
    ends.add(play(Slow(), slow_engine(), timeout_s=10.0))
    assert ends.metrics() == {"outcomes/deadline": 1.0, "outcomes/left_out": 0.0}
    ends = Ends()
    ends.lengths, ends.is_left_out = [10, 20, 300, 400], [False, False, True, False]
    row = ends.metrics()
    assert (row["outcomes/left_out"], row["outcomes/left_out_long"], row["outcomes/left_out_short"]) == (0.25, 0.5, 0.0)
