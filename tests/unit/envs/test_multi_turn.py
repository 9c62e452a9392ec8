"""Episodes of many turns: limits, tools, several agents. Branches hold exactly what the engine saw."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from fakes import FakeEngine, run_virtual
from turns import CallRenderer, OneTask, called, number, scripted, text_of

from stretto.base.errors import ConfigError, EngineError, EnvError
from stretto.base.paths import RunDir
from stretto.config.sections.algorithm import GrpoAlgo
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import EpisodeLimits, LimitReached, Reply, RolloutResult, TaskSource
from stretto.envs.multi_turn import Episode, MultiTurnEnv, ToolEnv
from stretto.envs.tools import MAX_CALLS, MAX_STUCK, Tool, Toolset
from stretto.ledger import Ledger, LedgerReader
from stretto.orchestrator.batch import to_samples
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.codec import decode_blob, encode_blob
from stretto.records.rollout import Group, RolloutStatus, Task


def play(env, answer, *, members=1, delay=None, renderer=None, **settings):
    engine = FakeEngine(answer, delay=delay)
    settings = {"sampling": SamplingSection(), "seq_len": 2000, "seed": 1, "max_retries": 0} | settings
    player = Player(engine=engine, renderer=renderer or CallRenderer(), **settings)
    draw = Draw(3, env.tasks("train").task(0), members, version=0)
    return run_virtual(player.play(env, draw))


# -- limits --


class Endless(OneTask, MultiTurnEnv):
    """Never ends by itself; the reward is the number of turns."""

    def __init__(self, limits=None, after=None):
        super().__init__()
        self.limits, self.after = limits, after

    def prompt(self, task):
        return [{"role": "user", "content": "go"}]

    def respond(self, episode, reply):
        episode.state["replies"] = [*episode.state.get("replies", ()), reply.text]
        if episode.num_turns == self.after:
            return None
        return [{"role": "user", "content": "on"}]

    def score(self, episode):
        assert episode.last_text == "hm"
        return RolloutResult(
            reward=float(episode.num_turns),
            agent_rewards={"a": 1.0},
            metrics={"cut": episode.is_truncated},
            note=episode.num_turns,
        )


def hm(prompt, rng, version):
    return "hm"


def test_an_episode_that_its_environment_ends_is_not_truncated():
    (rollout,) = play(Endless(after=2), hm).rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.FINISHED, 2.0, 2)
    (branch,) = rollout.branches
    assert (text_of(branch, True), text_of(branch, False)) == ("hm.hm.", "Ugo.AUon.A")


@pytest.mark.parametrize(
    ("limits", "turns"),
    [(EpisodeLimits(max_turns=3), 3), (EpisodeLimits(max_tokens=6), 2), (EpisodeLimits(timeout_s=4.5), 5)],
)
def test_a_limit_ends_an_episode_as_truncated_with_its_reward(limits, turns):
    (rollout,) = play(Endless(limits), hm, delay=lambda request: 1.0).rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.TRUNCATED, float(turns), turns)
    assert rollout.agent_rewards == {"a": 1.0} and rollout.metrics == {"cut": True}
    assert rollout.num_sampled_tokens == 3 * turns


async def test_a_truncated_episode_keeps_the_note_for_the_score_of_its_group():
    class Cut:
        async def chat(self, messages, tools=None, **sampling):
            message = {"role": "assistant", "content": "hm"}
            return Reply(message=message, text="hm", token_ids=np.zeros(1, np.int32), finish_reason="length")

    env = Endless()
    result = await env.rollout(env.tasks("train").task(0), Cut())
    assert result.is_truncated and result.note == 1


def test_the_last_reply_may_use_the_remaining_tokens_and_is_cut_there():
    (rollout,) = play(Endless(EpisodeLimits(max_tokens=8)), hm).rollouts
    assert rollout.num_sampled_tokens == 8 and rollout.num_turns == 3
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == 3.0


def test_a_history_that_fills_seq_len_ends_an_episode_as_truncated_with_its_reward():
    (rollout,) = play(Endless(), hm, seq_len=20).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == rollout.num_turns > 1
    assert rollout.num_tokens <= 20


def test_a_first_prompt_that_leaves_no_room_is_a_failure():
    (rollout,) = play(Endless(), hm, seq_len=3).rollouts
    assert rollout.status is RolloutStatus.FAILED and "leave no room" in rollout.error


def test_a_limit_that_is_not_caught_ends_an_episode_without_reward():
    class Careless(OneTask):
        limits = EpisodeLimits(max_turns=2)

        async def rollout(self, task, ctx):
            while True:
                await ctx.chat([{"role": "user", "content": "go"}])

    (rollout,) = play(Careless(), hm).rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.TRUNCATED, 0.0, 2)


def test_all_agents_share_the_limits():
    class Two(OneTask):
        limits = EpisodeLimits(max_turns=3)

        async def rollout(self, task, ctx):
            spoken = []
            try:
                for name in "abababab":
                    reply = await ctx.agent(name).chat([{"role": "user", "content": "go"}])
                    spoken.append(name + reply.text)
            except LimitReached as limit:
                assert "3 turns (max_turns)" in str(limit)
            return RolloutResult(reward=float(len(spoken)), is_truncated=True)

    (rollout,) = play(Two(), hm).rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.TRUNCATED, 3.0, 3)


class Crowd(OneTask):
    """All agents take turns at the same time, `rounds` times; a limit ends only the turn that reaches it."""

    def __init__(self, limits, agents=4, rounds=1, **sampling):
        super().__init__()
        self.limits, self.agents, self.rounds, self.sampling = limits, agents, rounds, sampling

    async def rollout(self, task, ctx):
        async def speak(number):
            return await ctx.agent(f"a{number}").chat([{"role": "user", "content": "go"}], **self.sampling)

        for _ in range(self.rounds):
            replies = await asyncio.gather(*map(speak, range(self.agents)), return_exceptions=True)
            self.refused = [str(reply) for reply in replies if isinstance(reply, LimitReached)]
            assert all(isinstance(reply, Reply | LimitReached) for reply in replies), replies
        return RolloutResult(reward=1.0)


@pytest.mark.parametrize(
    ("limits", "sampling", "turns", "tokens", "takes"),
    [
        (EpisodeLimits(max_turns=1), {}, 1, 3, 1.0),
        (EpisodeLimits(max_turns=3, max_tokens=100), {"max_tokens": 10}, 3, 9, 1.0),
        (EpisodeLimits(max_turns=1, max_tokens=5), {}, 1, 3, 1.0),
        # Tokens that one turn leaves go to the next; a turn that may use all tokens is taken alone.
        (EpisodeLimits(max_tokens=12), {}, 4, 12, 4.0),
        (EpisodeLimits(max_tokens=11), {}, 4, 11, 4.0),
        (EpisodeLimits(max_tokens=5), {}, 2, 5, 2.0),
        (EpisodeLimits(max_tokens=20), {"max_tokens": 10}, 4, 12, 3.0),
        (EpisodeLimits(max_tokens=40), {"max_tokens": 10}, 4, 12, 1.0),
        (EpisodeLimits(max_tokens=1000, timeout_s=2.5), {}, 3, 9, 3.0),
    ],
)
def test_concurrent_turns_of_agents_stay_within_the_limits(limits, sampling, turns, tokens, takes):
    env, ended_at = Crowd(limits, **sampling), []

    def delay(request):
        ended_at.append(asyncio.get_running_loop().time() + 1.0)
        return 1.0

    (rollout,) = play(env, hm, delay=delay).rollouts
    assert (rollout.num_turns, rollout.num_sampled_tokens, ended_at[-1]) == (turns, tokens, takes)
    assert len(env.refused) == 4 - turns
    assert all("the episode has had its" in text for text in env.refused)


def test_the_tokens_of_concurrent_agents_do_not_depend_on_which_is_faster():
    def said(number):
        delays = random.Random(number)
        env = Crowd(EpisodeLimits(max_tokens=31), rounds=3, max_tokens=9)
        (rollout,) = play(
            env, lambda prompt, rng, version: "x" * rng.randrange(12), delay=lambda request: delays.random()
        ).rollouts
        assert rollout.num_sampled_tokens <= 31
        return sorted((branch.agent, text_of(branch, True)) for branch in rollout.branches)

    assert all(said(number) == said(0) for number in range(1, 6))


def test_a_turn_without_a_reply_returns_its_reserved_tokens():
    class Again(OneTask):
        limits = EpisodeLimits(max_turns=1, max_tokens=5)

        async def rollout(self, task, ctx):
            with pytest.raises(EngineError):
                await ctx.chat([{"role": "user", "content": "go"}])
            task = asyncio.create_task(ctx.agent("cancelled").chat([{"role": "user", "content": "go"}]))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.wait([task])
            await ctx.agent("other").chat([{"role": "user", "content": "go"}])
            return RolloutResult(reward=1.0)

    failures = iter(["hiccup", None, None])
    engine = FakeEngine(hm, delay=lambda request: 1.0, fail=lambda request: next(failures))
    player = Player(engine=engine, renderer=CallRenderer(), sampling=SamplingSection(), seq_len=2000, max_retries=0)
    env = Again()
    (rollout,) = run_virtual(player.play(env, Draw(0, env.tasks("train").task(0), 1, version=0))).rollouts
    assert (rollout.status, rollout.num_turns) == (RolloutStatus.FINISHED, 1), rollout.error


# -- tools --


class Color(enum.Enum):
    RED = "red"


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Any two.

    Args:
        a: the first
        b (int): the second
    """
    return a + b


async def paint(color: Color, mode: Literal["thin", "thick"], where: list[int] | None = None) -> dict:
    """Paints."""
    await asyncio.sleep(0)
    return {"color": color.value, "mode": mode, "where": where}


async def plus(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


def boom() -> str:
    """Breaks."""
    raise RuntimeError("it broke")


def leaves() -> str:
    """Leaves the program."""
    sys.exit(3)


def stops() -> str:
    """Ends an iteration that is none."""
    return next(iter(()))


async def sleepy() -> str:
    """Sleeps."""
    await asyncio.sleep(1000)
    return "awake"


def test_a_schema_has_the_signature_and_the_docstring():
    function = Tool(add).schema["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.\n\nAny two.")
    parameters = function["parameters"]
    assert parameters["properties"] == {
        "a": {"type": "integer", "description": "the first"},
        "b": {"type": "integer", "default": 1, "description": "the second"},
    }
    assert parameters["required"] == ["a"] and parameters["type"] == "object"
    assert parameters["additionalProperties"] is False
    painted = Tool(paint).schema["function"]["parameters"]
    assert painted["properties"]["mode"]["enum"] == ["thin", "thick"]
    assert painted["required"] == ["color", "mode"]
    assert Tool(boom).schema["function"]["parameters"]["properties"] == {}


def test_the_tokens_of_a_tools_name_and_schema_are_json():
    assert json.loads(json.dumps(Toolset([add, paint, boom]).schemas))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *args: 0, r"\*args cannot be described"),
        (lambda **rest: 0, r"\*\*rest cannot be described"),
        (lambda untyped: 0, "argument untyped has no type"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        Tool(function)


def test_two_tools_of_the_same_name_are_refused():
    with pytest.raises(ConfigError, match="two tools have the same name"):
        Toolset([add, add])


async def test_sync_and_async_tools_answer_in_the_order_of_the_calls():
    calls = [
        called("add", {"a": 2, "b": 3}, id="x"),
        called("paint", '{"color": "red", "mode": "thin"}'),
        called("add", '{"a": 41}', id="y"),
    ]
    reply = Reply(
        message={"role": "assistant", "content": "", "tool_calls": calls, "unparsed_tool_calls": ["<add 1"]},
        text="",
        token_ids=np.array([1]),
        finish_reason="stop",
    )
    assert await Toolset([add, paint]).answer(reply) == [
        {"role": "tool", "name": "add", "tool_call_id": "x", "content": "5"},
        {"role": "tool", "name": "paint", "content": '{"color": "red", "mode": "thin", "where": null}'},
        {"role": "tool", "name": "add", "tool_call_id": "y", "content": "42"},
        {"role": "tool", "content": "Error: this is no valid tool call: <add 1"},
    ]


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (called("subtract", {}), "Error: no tool 'subtract'; there are add, paint, boom, leaves, stops."),
        (called("add", {"a": "two"}), "Error: the arguments of add do not fit: a: Input should be a valid int"),
        (called("add", {}), "Error: the arguments of add do not fit: a: Field required"),
        (called("add", {"a": 1, "c": 2}), "Error: the arguments of add do not fit: c: Extra inputs"),
        (called("add", "[1]"), "Error: the arguments of add do not fit"),
        (called("add", '{"a": '), "Error: JSONDecodeError"),
        (called("paint", {"color": "blue", "mode": "thin"}), "Error: the arguments of paint do not fit: color"),
        (called("boom", {}), "Error: RuntimeError: it broke"),
        (called("boom", None), "Error: RuntimeError: it broke"),
        (called("leaves", {}), "Error: SystemExit: 3"),
        (called("stops", {}), "Error: RuntimeError: coroutine raised StopIteration"),
    ],
)
async def test_the_tool_message_explains_what_is_wrong_with_a_call(call, content):
    message = await Toolset([add, paint, boom, leaves, stops]).call(call)
    assert message["role"] == "tool" and message["content"].startswith(content)


async def test_a_tool_call_ends_at_its_timeout():
    def blocked() -> str:
        """Blocks its thread."""
        time.sleep(0.3)
        return "late"

    tools = Toolset([sleepy, blocked], timeout_s=0.05)
    for name in ("sleepy", "blocked"):
        message = await tools.call(called(name, {}))
        assert message["content"] == f"Error: {name} was not done in time."


@pytest.fixture
def gate():
    """Blocks until the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.heavy
async def test_calls_that_hang_do_not_block_others(gate):
    def hang() -> str:
        """Hangs."""
        gate.wait()
        return "late"

    tools = Toolset([hang, add], timeout_s=0.2)
    many = 2 * MAX_CALLS
    hung = [asyncio.create_task(tools.call(called("hang", {}))) for _ in range(many)]
    await asyncio.sleep(0)
    assert (await tools.call(called("add", {"a": 1})))["content"] == "2"  # its timeout starts with the call
    assert {(await each)["content"] for each in hung} == {"Error: hang was not done in time."}
    assert await asyncio.to_thread(int, "7") == 7  # the event loop's threads are still free
    # With the calls of a cancelled episode, MAX_STUCK is reached.
    other = Toolset([hang], timeout_s=None)
    for _ in range((MAX_STUCK - many) // MAX_CALLS):
        hung = [asyncio.create_task(other.call(called("hang", {}))) for _ in range(MAX_CALLS)]
        await asyncio.sleep(0.05)
        for each in hung:
            each.cancel()
        await asyncio.wait(hung)
    with pytest.raises(EnvError, match=rf"tool add: {MAX_STUCK} calls .*\(hang\)"):
        await tools.call(called("add", {"a": 1}))
    gate.set()
    while True:
        with contextlib.suppress(EnvError):
            assert (await tools.call(called("add", {"a": 1})))["content"] == "2"
            break
        await asyncio.sleep(0.01)


@pytest.mark.heavy
def test_a_call_that_hangs_does_not_keep_the_process_alive():
    code = """
import asyncio, threading
from stretto.envs.tools import Toolset
def hang() -> str: threading.Event().wait()
call = {"function": {"name": "hang", "arguments": {}}}
print(asyncio.run(Toolset([hang], timeout_s=0.1).call(call))["content"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "Error: hang was not done in time.\n"), done.stderr


async def test_a_thread_sees_the_context_of_its_call():
    name = contextvars.ContextVar("name")

    def who() -> str:
        """Says."""
        return name.get()

    async def ask(value):
        name.set(value)
        return (await Toolset([who]).call(called("who", {})))["content"]

    values = [str(n) for n in range(100)]
    assert await asyncio.gather(*map(ask, values)) == values


class Adding(OneTask, ToolEnv):
    """Adds with a tool; the reward is the answer."""

    tools = (plus, sleepy)

    def prompt(self, task):
        return [{"role": "user", "content": "2+3?"}]

    def score(self, episode):
        return float(episode.last_text or -1)


def test_tool_results_are_not_trained_and_the_first_reply_without_a_call_is_the_last():
    (rollout,) = play(Adding(), scripted('hm!plus{"a": 2, "b": 3}', "5"), members=1).rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.FINISHED, 5.0, 2)
    (branch,) = rollout.branches
    assert text_of(branch, True) == 'hm!plus{"a": 2, "b": 3}.5.'
    assert text_of(branch, False) == "U2+3?.AT5.A"
    assert not branch.logprobs[~branch.is_sampled].any()


async def open_box(number: int, episode: Episode) -> str:
    """What is in a box."""
    episode.state["opened"] = number
    return episode.task.data["boxes"][number]


def test_a_tool_sees_and_changes_its_episode_and_the_policy_knows_nothing_of_that_argument():
    class Boxes(Adding):
        tools = (open_box,)

        def tasks(self, split):
            return TaskSource(lambda i: Task(env="t", task_id=str(i), data={"boxes": ["3", "7"]}))

        def score(self, episode):
            return float(episode.last_text) + 10 * episode.state["opened"]

    assert Boxes().tool_schemas()[0]["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
    replies = ('!open_box{"number": 1}', "7")
    assert play(Boxes(), scripted(*replies)).rollouts[0].reward == 17.0
    given = play(Boxes(), scripted('!open_box{"number": 1, "episode": {}}', *replies)).rollouts[0]
    assert "do not fit: episode: Extra inputs are not permitted" in text_of(given.branches[0], False)


def test_a_sync_tool_does_not_block_the_event_loop():
    class Sync(Adding):
        tools = (add,)

    engine = FakeEngine(scripted('!add{"a": 2, "b": 3}', "5"))
    player = Player(engine=engine, renderer=CallRenderer(), sampling=SamplingSection(), seq_len=2000)
    env = Sync()
    group = asyncio.run(player.play(env, Draw(0, env.tasks("train").task(0), 2, version=0)))
    assert [r.reward for r in group.rollouts] == [5.0, 5.0]
    assert {text_of(r.branches[0], False) for r in group.rollouts} == {"U2+3?.AT5.A"}


def test_a_policy_may_retry_after_wrong_calls():
    lines = ("!mul{}!plus", "!sleepy{}", '!plus{"a": 4}', "5")
    (rollout,) = play(Adding(), scripted(*lines)).rollouts
    given = text_of(rollout.branches[0], False)
    assert "no tool 'mul'; there are plus, sleepy" in given and "no valid tool call: plus" in given
    assert "sleepy was not done in time" in given
    assert rollout.reward == 5.0 and rollout.num_turns == 4


def test_a_policy_that_only_calls_tools_is_stopped_after_ten_turns():
    (rollout,) = play(Adding(), lambda *_: '7!plus{"a": 1}').rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.TRUNCATED, 7.0, 10)


def test_a_reply_that_is_cut_off_calls_no_tool():
    (rollout,) = play(Adding(), lambda *_: '7!plus{"a": 1}', sampling=SamplingSection(max_completion_tokens=1)).rollouts
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.TRUNCATED, 7.0, 1)


# -- what continues a history --


class Edits(OneTask):
    """Three turns; before the last, `edit(messages)` changes the history in place."""

    def __init__(self, edit):
        super().__init__()
        self.edit = edit

    async def rollout(self, task, ctx):
        messages = [{"role": "user", "content": [{"text": "go"}]}]
        for turn in range(3):
            reply = await ctx.chat(messages)
            messages += [reply.message, {"role": "user", "content": "on"}]
            if turn == 1:
                self.edit(messages)
        return RolloutResult(reward=1.0)


def leave(messages):
    pass


def edit_prompt(messages):
    messages[0]["content"] = "removed"


def edit_part(messages):
    messages[0]["content"][0]["text"] = "removed"


def edit_reply(messages):
    messages[1]["content"] = "removed"


def edit_answer(messages):
    messages[2]["content"] = "removed"


@pytest.mark.parametrize("edit", [leave, edit_prompt, edit_part, edit_reply, edit_answer])
def test_a_message_that_is_edited_in_place_opens_a_branch_with_the_new_text(edit):
    (rollout,) = play(Edits(edit), hm).rollouts
    given = [text_of(branch, False) for branch in rollout.branches]
    assert len(given) == (1 if edit is leave else 2)
    assert all("removed" not in text for text in given[:-1])
    assert ("removed" in given[-1]) == (edit is not leave)
    assert sum(text_of(branch, True).count("hm.") for branch in rollout.branches) == 3


class ToolsRenderer(CallRenderer):
    """Renders the names of tools before the messages."""

    def render_prompt(self, messages, tools=None):
        head = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        return np.concatenate((np.array([ord(c) for c in head], np.int32), super().render_prompt(messages)))


def test_changed_tools_open_a_branch():
    class Growing(OneTask):
        async def rollout(self, task, ctx):
            messages, tools = [{"role": "user", "content": "go"}], []
            for new in ([], [add], [], [boom], []):
                tools += Toolset(new).schemas  # the same list, made longer
                reply = await ctx.chat(messages, tools)
                messages += [reply.message, {"role": "user", "content": "on"}]
            return RolloutResult(reward=1.0)

    (rollout,) = play(Growing(), hm, renderer=ToolsRenderer()).rollouts
    given = [text_of(branch, False) for branch in rollout.branches]
    assert given == ["Ugo.A", "[add]Ugo.Ahm.Uon.AUon.A", "[add][boom]Ugo.Ahm.Uon.Ahm.Uon.Ahm.Uon.AUon.A"]
    assert [text_of(branch, True) for branch in rollout.branches] == ["hm.", "hm.hm.", "hm.hm."]


def test_the_same_tools_in_another_list_extend_the_branch():
    class Same(OneTask):
        async def rollout(self, task, ctx):
            messages = [{"role": "user", "content": "go"}]
            for tools in (None, [], None):
                reply = await ctx.chat(messages, tools)
                messages += [reply.message, {"role": "user", "content": "on"}]
            for _ in range(2):
                reply = await ctx.agent("other").chat(messages, Toolset([add]).schemas)
                messages += [reply.message, {"role": "user", "content": "on"}]
            return RolloutResult(reward=1.0)

    (rollout,) = play(Same(), hm).rollouts
    assert [branch.agent for branch in rollout.branches] == ["policy", "other"]


# -- agents --


def test_an_agent_reward_that_is_no_number_fails_the_rollout():
    class Nan(OneTask):
        async def rollout(self, task, ctx):
            await ctx.chat([{"role": "user", "content": "go"}])
            return RolloutResult(reward=0.0, agent_rewards={"policy": float("inf")})

    (rollout,) = play(Nan(), hm).rollouts
    assert rollout.status is RolloutStatus.FAILED and "the reward of policy is inf" in rollout.error


def agents_of(group: Group) -> list:
    return [
        (r.reward, r.agent_rewards, [(b.agent, b.is_trained, b.token_ids.tolist()) for b in r.branches])
        for r in group.rollouts
    ]


class Duel(OneTask):
    """Two agents and a judge that is not trained; all take turns at the same time, twice."""

    async def rollout(self, task, ctx):
        agents = [ctx.agent("left"), ctx.agent("right"), ctx.agent("judge", is_trained=False)]
        assert ctx.agent("left") is agents[0]
        histories = [[{"role": "user", "content": "go"}] for _ in agents]
        for _ in range(2):
            replies = await asyncio.gather(*(a.chat(h) for a, h in zip(agents, histories)))
            for history, reply in zip(histories, replies):
                history += [reply.message, {"role": "user", "content": "on"}]
        return RolloutResult(reward=0.5, agent_rewards={"left": 1.0, "right": 0.0})


def test_each_agent_has_its_own_stream_seeds_and_reward():
    group = play(Duel(), number, members=2)
    for rollout in group.rollouts:
        assert [(b.agent, b.is_trained) for b in rollout.branches] == [
            ("left", True),
            ("right", True),
            ("judge", False),
        ]
        assert rollout.num_turns == 6
        assert [rollout.reward_of(b.agent) for b in rollout.branches] == [1.0, 0.0, 0.5]
        for branch in rollout.branches:
            assert text_of(branch, False) == "Ugo.AUon.A" and text_of(branch, True).count(".") == 2
    said = {part for r in group.rollouts for b in r.branches for part in text_of(b, True).split(".") if part}
    assert len(said) == 12
    assert agents_of(play(Duel(), number, members=2)) == agents_of(group)
    assert agents_of(play(Duel(), number, members=2, seed=2)) != agents_of(group)


def test_concurrent_turns_of_agents_are_concurrent_requests():
    asked_at = []

    def delay(request):
        asked_at.append(asyncio.get_running_loop().time())
        return 1.0

    (rollout,) = play(Duel(), number, delay=delay).rollouts
    assert asked_at == [0.0] * 3 + [1.0] * 3 and rollout.num_turns == 6


def test_two_turns_of_one_agent_at_once_are_an_error_of_the_environment():
    class Greedy(OneTask):
        async def rollout(self, task, ctx):
            prompt = [{"role": "user", "content": "go"}]
            await asyncio.gather(ctx.chat(prompt), ctx.chat(prompt))

    (rollout,) = play(Greedy(), hm, delay=lambda request: 1.0).rollouts
    assert rollout.status is RolloutStatus.FAILED and "two turns of one agent at once" in rollout.error


def test_an_agent_whose_last_reply_was_cut_off_truncates_the_episode():
    class Cut(OneTask):
        async def rollout(self, task, ctx):
            await ctx.agent("short").chat([{"role": "user", "content": "go"}], max_tokens=1)
            await ctx.agent("long").chat([{"role": "user", "content": "go"}])
            return RolloutResult(reward=1.0)

    (rollout,) = play(Cut(), hm).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == 1.0


class Stakes(OneTask):
    """The rewards of left and right are their digits; the judge gets none; some episodes have no right."""

    async def rollout(self, task, ctx):
        prompt = [{"role": "user", "content": "go"}]
        left = (await ctx.agent("left").chat(prompt)).text
        await ctx.agent("judge", is_trained=False).chat(prompt)
        rewards = {"left": float(left)}
        if left != "0":
            rewards["right"] = 100 * float((await ctx.agent("right").chat(prompt)).text)
        return RolloutResult(reward=-1.0, agent_rewards=rewards)


def digit(prompt, rng, version):
    return str(rng.randrange(3))


def test_members_are_compared_within_one_agent_and_untrained_agents_are_not_trained():
    group, has_signal = assign_advantages(play(Stakes(), digit, members=12), GrpoAlgo())
    assert has_signal
    for agent in ("left", "right"):
        rewards = [r.agent_rewards.get(agent) for r in group.rollouts]
        mean = np.mean([reward for reward in rewards if reward is not None])
        expected = [0.0 if reward is None else reward - mean for reward in rewards]
        np.testing.assert_allclose(group.agent_advantages[agent], expected, atol=1e-9)
    assert None in [r.agent_rewards.get("right") for r in group.rollouts]
    for member, advantage in enumerate(group.advantages):
        assert abs(advantage) == max(map(abs, group.advantages_of(member).values()))
    samples = {sample.sample_id: sample for sample in to_samples([group])}
    assert len(samples) == sum(b.is_trained for r in group.rollouts for b in r.branches)
    for member, rollout in enumerate(group.rollouts):
        for index, branch in enumerate(rollout.branches):
            if branch.is_trained:
                sample = samples[f"{rollout.rollout_id}/{index}"]
                advantage = np.float32(group.advantages_of(member)[branch.agent])
                np.testing.assert_array_equal(sample.loss_mask, branch.is_sampled)
                np.testing.assert_array_equal(sample.advantages, advantage * branch.is_sampled)


def test_a_single_trained_agent_gets_its_own_reward():
    class Student(Stakes):
        async def rollout(self, task, ctx):
            prompt = [{"role": "user", "content": "go"}]
            said = float((await ctx.chat(prompt)).text)
            await ctx.agent("judge", is_trained=False).chat(prompt)
            return RolloutResult(reward=1.0, agent_rewards={"policy": said})

    group, has_signal = assign_advantages(play(Student(), digit, members=8), GrpoAlgo())
    rewards = np.array([r.agent_rewards["policy"] for r in group.rollouts])
    assert has_signal and not group.agent_advantages
    np.testing.assert_allclose(group.advantages, rewards - rewards.mean(), atol=1e-9)
    assert len(to_samples([group])) == 8


def test_agents_round_trip_through_the_codec_and_the_ledger(tmp_path: Path):
    group, _ = assign_advantages(play(Duel(), number, members=2), GrpoAlgo())
    copy = decode_blob(encode_blob(group), Group, where="test")
    assert copy.agent_advantages == group.agent_advantages == {"left": (0.0, 0.0), "right": (0.0, 0.0)}
    assert agents_of(copy) == agents_of(group)
    run_dir = RunDir(tmp_path / "run")
    ledger = Ledger(run_dir)
    ledger.task_drawn(group.group_id, group.task)
    ledger.groups_finished([group])
    ledger.close()
    with LedgerReader(run_dir) as reader:
        assert agents_of(reader.group(group.group_id)) == agents_of(group)
