"""A wrong value from an environment fails its rollout, with an error that names the environment."""

from __future__ import annotations

import asyncio
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import CharRenderer, FakeEngine, parrot
from processes.forked import fork_children_of

from stretto.base import process
from stretto.base.errors import EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import RolloutResult, SingleTurnEnv, TaskSource
from stretto.envs.result import MAX_REWARD, checked_number, checked_rewards
from stretto.envs.workers.pool import open_workers
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import Group, RolloutStatus, Task

HERE = Path(__file__).parent
NOT_NUMBERS: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "none": None,
    "text": "1",
    "bytes": b"1",
    "list": [1.0],
    "array": np.array([1.0]),
    "complex": 1j,
    "object": object(),
    "dict": {"reward": 1.0},
    "too large": 10**400,
}
RESULTS: dict[str, Any] = {
    **{name: value for name, value in NOT_NUMBERS.items() if name not in ("nan", "inf", "too large")},
    "a number": 1.0,
    **{f"reward {name}": RolloutResult(reward=value) for name, value in NOT_NUMBERS.items()},
    **{f"agent {n}": RolloutResult(reward=0.0, agent_rewards={"a": value}) for n, value in NOT_NUMBERS.items()},
    **{f"metric {n}": RolloutResult(reward=0.0, metrics={"a": value}) for n, value in NOT_NUMBERS.items()},
    "agents none": RolloutResult(reward=0.0, agent_rewards=None),  # type: ignore[arg-type]
    "metrics none": RolloutResult(reward=0.0, metrics=None),  # type: ignore[arg-type]
    "metrics list": RolloutResult(reward=0.0, metrics=[1.0]),  # type: ignore[arg-type]
    "metrics by number": RolloutResult(reward=0.0, metrics={1: 1.0}),  # type: ignore[dict-item]
    "truncated": RolloutResult(reward=0.0, is_truncated=np.array([1, 0])),  # type: ignore[arg-type]
    "beyond float32": RolloutResult(reward=1e39),
    **{f"turn {n}": RolloutResult(reward=0.0, turn_rewards=[v]) for n, v in NOT_NUMBERS.items() if v is not None},
    **{f"value {n}": RolloutResult(reward=0.0, state_values=[v]) for n, v in NOT_NUMBERS.items() if v is not None},
    "a state that is no text": RolloutResult(reward=0.0, states=[3]),  # type: ignore[arg-type, list-item]
    "one text for the states": RolloutResult(reward=0.0, states="a"),  # type: ignore[arg-type]
    "turns none": RolloutResult(reward=0.0, turn_rewards=None),  # type: ignore[arg-type]
    "two rewards of one turn": RolloutResult(reward=0.0, turn_rewards=[1.0, 1.0]),  # type: ignore[arg-type]
}
GOOD: dict[str, Any] = {
    "int": 1,
    "bool": True,
    "float32": np.float32(1),
    "int64": np.int64(1),
    "flag": np.bool_(True),
    "array without dimensions": np.array(1.0),
    "fraction": Fraction(1),
}


class Wrong:
    """The first member returns the value that the task names; the others return a valid result."""

    limits = None

    def __init__(self, values: str = "results", which: str | None = None) -> None:
        self.name, self.values, self.which = "wrong", {"results": RESULTS}[values], which

    def tasks(self, split: str) -> TaskSource:
        names = [self.which] if self.which else list(self.values)
        return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={"which": names[i]}), len(names))

    async def rollout(self, task: Task, ctx: Any) -> Any:
        reply = await ctx.chat([{"role": "user", "content": "a"}])
        return self.values[task.data["which"]] if reply.text == "a" else RolloutResult(reward=1.0)


class WrongScore(SingleTurnEnv):
    def __init__(self, value: Any) -> None:
        self.name, self.value = "scores", value

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={}), 1)

    def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": "a"}]

    def score(self, task: Task, text: str) -> Any:
        return self.value


class EndsItself(Wrong):
    """Ends its episode as the action says."""

    def __init__(self, action: str) -> None:
        super().__init__()
        self.action = action

    async def rollout(self, task: Task, ctx: Any) -> Any:
        await ctx.chat([{"role": "user", "content": "a"}])
        if self.action == "exit":
            sys.exit(3)
        if self.action == "cancel":
            raise asyncio.CancelledError
        if self.action == "leak":  # like a cancel scope that outlives its block
            asyncio.current_task().cancel()
            await asyncio.sleep(1)
        if self.action == "talk":
            await ctx.chat("text instead of messages")
        if self.action == "tools":
            await ctx.chat([{"role": "user", "content": "a"}], tools="text")
        raise AssertionError(self.action)


def player(**settings: Any) -> Player:
    return Player(
        FakeEngine(parrot(1.0)), CharRenderer(), SamplingSection(), seq_len=4000, **{"max_retries": 0} | settings
    )


def play(env: Any, index: int = 0, num_members: int = 2, **settings: Any) -> Group:
    async def run() -> Group:
        task = env.tasks("train").task(index)
        return await asyncio.wait_for(player(**settings).play(env, Draw(index, task, num_members, version=0)), 20)

    return asyncio.run(run())


@pytest.mark.parametrize("which", list(RESULTS))
def test_an_invalid_result_fails_its_rollout_and_the_error_names_the_environment(which: str) -> None:
    group = play(Wrong(which=which))
    assert all(r.status is RolloutStatus.FAILED for r in group.rollouts)
    assert all(r.error.startswith("EnvError: environment wrong, rollout g0.") for r in group.rollouts)


@pytest.mark.parametrize("which", list(NOT_NUMBERS))
def test_a_score_that_is_no_number_fails_its_rollout(which: str) -> None:
    group = play(WrongScore(NOT_NUMBERS[which]))
    assert all(r.error.startswith("EnvError: environment scores, rollout g0.") for r in group.rollouts)
    assert all("its reward is" in r.error and "finite number" in r.error for r in group.rollouts)


@pytest.mark.parametrize("which", list(GOOD))
def test_numbers_of_every_kind_become_floats(which: str) -> None:
    [rollout] = play(WrongScore(GOOD[which]), num_members=1).rollouts
    assert rollout.status is RolloutStatus.FINISHED and type(rollout.reward) is float and rollout.reward == 1.0


def test_messages_show_at_most_one_line_of_a_wrong_value() -> None:
    with pytest.raises(EnvError) as error:
        checked_number(np.zeros((50, 50)), "environment e", "its reward")
    assert str(error.value).startswith("environment e: its reward is ndarray array([[0., 0.")
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)
    [rollout] = play(Wrong(which="beyond float32"), num_members=1).rollouts
    assert "its reward is 1e+39; a reward is trained in float32" in rollout.error
    assert np.isfinite(np.float32(MAX_REWARD) ** 2)


@pytest.mark.parametrize("returned", [None, "ab", 1.0, [1.0], [1.0, None], [1.0, 2.0, 3.0], {"a": 1, "b": 2}])
def test_group_rewards_that_do_not_fit_fail_the_group(returned: Any) -> None:
    class Together(WrongScore):
        async def score_group(self, group: Group, notes: list) -> Any:
            return returned

    group = play(Together(0.0))
    if returned is None:  # members keep their rewards
        return
    assert all("environment scores, group 0, score_group" in r.error for r in group.rollouts)


def test_a_group_may_be_given_metrics_beside_its_rewards() -> None:
    class Together(WrongScore):
        async def score_group(self, group: Group, notes: list) -> Any:
            return [RolloutResult(reward=2.0, metrics={"rank": 1}), 0.5]

    first, second = play(Together(0.0)).rollouts
    assert (first.reward, first.metrics["rank"], second.reward) == (2.0, 1.0, 0.5) and "rank" not in second.metrics


def test_group_rewards_may_be_an_array() -> None:
    assert checked_rewards(np.array([1, 2], np.float32), 2, "here") == [1.0, 2.0]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("exit", "it called sys.exit(3)"),
        ("cancel", "CancelledError, though nobody cancelled it"),
        ("leak", "CancelledError, though nobody cancelled it"),
    ],
)
def test_an_environment_that_exits_or_cancels_itself_fails_its_rollout(action: str, message: str) -> None:
    group = play(EndsItself(action))
    assert all(r.error.startswith("EnvError: environment wrong, rollout g0.") for r in group.rollouts)
    assert all(message in r.error for r in group.rollouts)


@pytest.mark.parametrize("action", ["exit", "cancel"])
def test_a_single_turn_score_that_exits_or_cancels_itself_fails_its_rollout(action: str) -> None:
    class Ending(WrongScore):
        def score(self, task: Task, text: str) -> Any:
            sys.exit(3) if action == "exit" else None
            raise asyncio.CancelledError

    group = play(Ending(0.0))
    assert all(r.error.startswith("EnvError: environment scores") for r in group.rollouts)


def test_a_cancellation_by_the_run_is_no_failure_of_the_environment() -> None:
    ended = []

    class Waiting(Wrong):
        async def rollout(self, task: Task, ctx: Any) -> Any:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(task.task_id)

    async def run() -> None:
        env = Waiting()
        playing = asyncio.create_task(player().play(env, Draw(0, env.tasks("train").task(0), 2, version=0)))
        await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(run())
    assert ended == ["0", "0"]
    group = play(Waiting(), timeout_s=0.1)
    assert all("not done after 0.1 s" in r.error for r in group.rollouts)


@pytest.mark.heavy
def test_wrong_values_do_not_end_a_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children_of(monkeypatch, process)
    monkeypatch.syspath_prepend(str(HERE))

    async def run() -> None:
        env = open_workers("test_env_results:Wrong", {}, "mine", num_workers=1)
        source, pid = env.tasks("train"), env.pool.workers[0].child.pid
        try:
            for index in range(source.num_tasks):
                group = await player().play(env, Draw(index, source.task(index), 1, version=0))
                assert group.rollouts[0].error.startswith("EnvError: environment mine"), group.rollouts[0].error
            assert env.pool.workers[0].child.pid == pid and env.pool.num_lost == 0
        finally:
            await env.close()

    asyncio.run(run())


@pytest.mark.heavy
@pytest.mark.parametrize("action", ["exit", "cancel", "leak", "talk", "tools"])
def test_exits_and_cancellations_do_not_end_a_worker_process(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children_of(monkeypatch, process)
    monkeypatch.syspath_prepend(str(HERE))

    async def run() -> None:
        env = open_workers("test_env_results:EndsItself", {"action": action}, "mine", num_workers=1)
        try:
            group = await player().play(env, Draw(0, env.tasks("train").task(0), 1, version=0))
            assert group.rollouts[0].status is RolloutStatus.FAILED and env.pool.num_lost == 0
            if action != "leak":  # a worker cannot distinguish it from a cancellation by the run
                assert group.rollouts[0].error.startswith("EnvError"), group.rollouts[0].error
        finally:
            await env.close()

    asyncio.run(run())


class Prompted(WrongScore):
    """A single turn whose prompt is whatever it is told."""

    def __init__(self, prompt: Any) -> None:
        super().__init__(1.0)
        self._prompt = prompt

    def prompt(self, task: Task) -> Any:
        return self._prompt


def test_a_text_is_a_message_of_the_user() -> None:
    prompts = ["say a", [{"role": "user", "content": "say a"}]]
    text, messages = (
        [rollout.branches[0].token_ids.tolist() for rollout in play(Prompted(prompt)).rollouts] for prompt in prompts
    )
    assert text == messages


@pytest.mark.parametrize("prompt", [None, 3, [], ["say a"], [{"content": "say a"}], {"role": "user", "content": "a"}])
def test_what_is_no_prompt_fails_and_says_what_a_prompt_is(prompt: Any) -> None:
    group = play(Prompted(prompt))
    assert all(rollout.status is RolloutStatus.FAILED for rollout in group.rollouts)
    assert "environment scores, task 0, prompt (" in group.rollouts[0].error
    assert "test_env_results.py:" in group.rollouts[0].error
    advice = "has no role" if isinstance(prompt, list) and prompt and "role" not in prompt[0] else ""
    advice = advice if advice and isinstance(prompt[0], dict) else "return a text, or a list of messages such as"
    assert advice in group.rollouts[0].error


def test_the_traceback_of_an_error_that_comes_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(WrongScore):
        def score(self, task: Task, text: str) -> Any:
            return {}["absent"]

    for _ in range(3):
        play(Broken(0))
    found = [record for record in caplog.records if record.exc_info]
    assert (
        len(found) == 1
        and "in score" in caplog.text
        and "KeyError: 'absent'; rollouts that meet it fail" in caplog.text
    )
