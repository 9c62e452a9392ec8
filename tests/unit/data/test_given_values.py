"""What users' code and files give is used whole, or refused with its place: messages, tasks, rewards, texts."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fakes import FakeEngine, run_virtual
from processes.add_ons import needs
from turns import CallRenderer, OneTask, scripted, text_of

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.orchestrator import SamplingSection
from stretto.data.messages import checked_messages, parse_message, parse_messages, parse_tools
from stretto.data.records import read_records
from stretto.data.values import checked_json, with_whole_text
from stretto.envs.base import TaskSource, tasks_of
from stretto.envs.multi_turn import MultiTurnEnv, ToolEnv
from stretto.orchestrator.first_rollout import same_task
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus, Task
from stretto.vime.sample import Sample

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WRONG: dict[str, tuple[Any, str]] = {
    "a number": ({"role": "tool", "content": 7}, r"content must be text, got 7; write str\(\.\.\.\)"),
    "a truth": ({"role": "user", "content": True}, r"content must be text, got True; write str"),
    "a set": ({"role": "user", "content": {"a"}}, "content must be text"),
    "nothing": ({"role": "user", "content": None}, 'write "" for an empty one'),
    "no content": ({"role": "tool"}, "content must be text, got None"),
    "a role with a typo": ({"role": "asistant", "content": "a"}, "did you mean 'assistant'"),
    "another word for a role": ({"role": "human", "content": "a"}, "did you mean 'user'"),
    "no role": ({"content": "a"}, "has no role; it has content; give a role of system, user, assistant, tool"),
    "a number in a part": ({"role": "user", "content": [{"type": "text", "text": 3}]}, "write str"),
    "a part of an unknown type": (
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        r"content\[0\].type must be one of text, image, image_url, got 'input_text'",
    ),
    "a text as part": ({"role": "user", "content": ["a"]}, r"content\[0\] must be an object with a type"),
    "a text as call": ({"role": "assistant", "content": "", "tool_calls": ["add"]}, r"tool_calls\[0\] must be an"),
    "a call without a name": ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, "a name"),
    "calls that are no list": ({"role": "assistant", "content": "", "tool_calls": 5}, "must be a list of calls"),
    "arguments in a list": (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        "the arguments of f must be an object",
    ),
    "the old form of a call": ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "tool_calls"),
    "a thought that is no text": ({"role": "assistant", "content": "", "thinking": 4}, "reasoning_content must be"),
}


class Told(OneTask, MultiTurnEnv):
    """Gives one message as prompt, or as answer."""

    def __init__(self, message: Any, at: str) -> None:
        super().__init__()
        self.message, self.at = message, at

    def prompt(self, task: Task) -> Any:
        return [self.message] if self.at == "prompt" else [{"role": "user", "content": "go"}]

    def respond(self, episode: Any, reply: Any) -> Any:
        return [self.message] if self.at == "respond" and episode.num_turns < 2 else None

    def score(self, episode: Any) -> float:
        return 1.0


class Chats(OneTask):
    """Asks the policy itself."""

    def __init__(self, message: Any) -> None:
        super().__init__()
        self.message = message

    async def rollout(self, task: Task, ctx: Any) -> Any:
        return await ctx.chat([self.message])


def play(env: Any, answer: Any = None) -> Any:
    player = Player(
        engine=FakeEngine(answer or scripted("hm.", "hm.")),
        renderer=CallRenderer(),
        sampling=SamplingSection(),
        seq_len=2000,
        seed=1,
        max_retries=0,
    )
    (rollout,) = run_virtual(player.play(env, Draw(3, env.tasks("train").task(0), 1, version=0))).rollouts
    return rollout


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_fails_its_rollout_wherever_it_comes_from(name: str) -> None:
    message, advice = WRONG[name]
    for env, place in (
        (Told(message, "prompt"), "Told.prompt, "),
        (Told(message, "respond"), "Told.respond, "),
        (Chats(message), "messages of ctx.chat"),
    ):
        rollout = play(env)
        assert rollout.status is RolloutStatus.FAILED
        with pytest.raises(EnvError, match=advice):
            raise EnvError(rollout.error)
        assert place in rollout.error


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_of_a_record_is_refused_with_its_line(name: str) -> None:
    message, advice = WRONG[name]
    with pytest.raises(DataError, match=advice) as caught:
        parse_messages([message], "messages", "rows.jsonl:3")
    assert str(caught.value).startswith("rows.jsonl:3: messages[0]")


def test_right_messages_stay_as_they_are() -> None:
    messages = [
        {"role": "system", "content": "a", "mine": 1},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": b"x"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "", "name": "add"},
    ]
    assert checked_messages(messages, "here") == messages


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable"])
@pytest.mark.parametrize("value", [0, False, 1, True])
def test_the_words_of_others_for_the_mask_are_understood(key: str, value: Any) -> None:
    message = parse_message({"role": "assistant", "content": "a", key: value}, "here")
    assert message == {"role": "assistant", "content": "a", "step_loss_mask": int(value)}


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_the_words_of_others_for_a_thought_are_understood(key: str) -> None:
    message = parse_message({"role": "assistant", "content": "a", key: "hm"}, "here")
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_a_key_that_nothing_reads_is_refused_and_two_that_differ_are() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1 .*'tool_call'.*'tool_calls'"):
        parse_message({"role": "user", "content": "a", "tool_call": []}, "rows.jsonl:1")
    with pytest.raises(DataError, match="'step_loss_mask' and 'weight', which differ"):
        parse_message({"role": "user", "content": "a", "step_loss_mask": 1, "weight": 0}, "here")
    with pytest.raises(DataError, match="must be 1, or 0"):
        parse_message({"role": "user", "content": "a", "weight": 0.5}, "here")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("is_text", [False, True])
def test_a_number_that_is_not_finite_in_a_call_of_a_record_is_refused(number: float, is_text: bool) -> None:
    arguments: Any = {"a": [number]}
    function = {"name": "add", "arguments": json.dumps(arguments) if is_text else arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    with pytest.raises(DataError, match=r"rows.jsonl:1.*arguments of add.*\['a'\].* is (nan|-inf), which JSON"):
        parse_message(message, "rows.jsonl:1")


@pytest.mark.parametrize("tool", [{}, {"type": "web_search"}, {"type": "function", "function": {"parameters": {}}}])
def test_a_tool_that_names_no_function_is_refused(tool: dict[str, Any]) -> None:
    named = [{"name": "add"}, {"type": "function", "function": {"name": "add"}}]
    assert parse_tools(named, "tools", "rows.jsonl:1") == named
    with pytest.raises(DataError, match=r"rows.jsonl:1: tools\[2\] names no function, got .*; write .*'?name"):
        parse_tools([*named, tool], "tools", "rows.jsonl:1")


# -- texts --


def test_half_a_character_in_a_record_is_refused_and_from_a_program_is_replaced() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:4: prompt\[0\]: content: .*surrogate"):
        parse_messages([{"role": "user", "content": "caf\ud83d"}], "prompt", "rows.jsonl:4")
    assert checked_messages([{"role": "tool", "content": "a\udcb2"}], "here")[0]["content"] == "a\ufffd"
    assert with_whole_text("a\udcb2b \U0001f600") == "a\ufffdb \U0001f600"
    assert play(Told({"role": "user", "content": "a\udcb2"}, "respond"), scripted("a.", "b.")).error is None


def test_half_a_character_in_an_error_does_not_end_the_run(caplog) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # pytest cannot send a report with half a character to its first process

    class Fails(Told):
        def score(self, episode: Any) -> float:
            raise ValueError("no file a\udcb2")

    rollout = play(Fails({"role": "user", "content": "a"}, "prompt"))
    assert rollout.status is RolloutStatus.FAILED
    assert "no file a\ufffd" in rollout.error


# -- tasks --


class Source(OneTask):
    """An environment whose tasks are whatever `make` gives."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(self._make, 5)


@pytest.mark.parametrize(
    "value",
    [{1}, b"a", object(), 1j, [{"a": {2}}], float("nan"), -np.float64("inf")],
    ids=["set", "bytes", "object", "complex", "set below", "nan", "inf"],
)
def test_data_of_a_task_that_json_cannot_hold_is_refused(value: Any) -> None:
    env = Source(lambda i: Task(env="e", task_id="t", data={"letters": value}))
    with pytest.raises(EnvError, match=r"task 0: data\['letters'\].*which JSON cannot hold"):
        tasks_of(env, "train").task(0)


def test_keys_of_a_tasks_data_are_text_and_those_that_are_not_are_named() -> None:
    env = Source(lambda i: Task(env="e", task_id="t", data={"by number": {1: "a"}}))
    with pytest.raises(EnvError, match=r"task 0: data\['by number'\] has the key 1; keys of JSON are text"):
        tasks_of(env, "train").task(0)


def test_data_of_a_task_is_what_the_ledger_holds() -> None:
    data = {"a": (1, np.int64(2)), "b": "x\ud83d", "c": None, "d": {"e": [True, 1.5]}}
    held = checked_json(data, "here")
    assert held == {"a": [1, 2], "b": "x\ufffd", "c": None, "d": {"e": [True, 1.5]}}
    assert json.loads(json.dumps(held)) == held


def test_tasks_that_differ_from_call_to_call_are_told_before_the_start() -> None:
    numbers = itertools.count()
    env = Source(lambda i: Task(env="e", task_id=f"t{i}", data={"n": next(numbers)}))
    with pytest.raises(EnvError, match=r"make\(0\) .*two different tasks"):
        same_task(env, tasks_of(env, "train"), "train")
    same = Source(lambda i: Task(env="e", task_id=f"t{i}", data={"n": i}))
    assert same_task(same, tasks_of(same, "train"), "train").data == {"n": 0}


# -- columns --


def test_nulls_that_a_column_format_adds_are_not_given_to_a_template(tmp_path: Any) -> None:
    tools = [
        [{"type": "function", "function": {"name": n, "parameters": {"properties": {key: {"type": "string"}}}}}]
        for n, key in (("weather", "city"), ("compute", "expr"))
    ]
    messages = [
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": n, "arguments": {key: "x"}}}]}]
        for n, key in (("weather", "city"), ("compute", "expr"))
    ]
    rows = [{"tools": t, "messages": m, "metadata": {"a": None}} for t, m in zip(tools, messages)]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert [row for _, row in read_records(file)] == rows


# -- rewards --


@pytest.mark.parametrize("reward", [True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)], ids=repr)
def test_a_sample_takes_the_scalars_that_an_environment_may_give(reward: Any) -> None:
    assert Sample(prompt="a", reward=reward).get_reward_value(None) == 1.0
    assert type(Sample(prompt="a", reward=reward).get_reward_value(None)) is float


def test_a_wrong_score_is_told_with_the_line_of_its_function() -> None:
    class Nan(Told):
        def score(self, episode: Any) -> float:
            return float("nan")

    assert "test_given_values.py:" in play(Nan({"role": "user", "content": "a"}, "prompt")).error


# -- tools and further turns --


def add(a: int) -> int:
    """Add one."""
    return a + 1


class Further(OneTask, ToolEnv):
    """Answers tools, and asks a second question after the first reply without a call."""

    tools = (add,)

    def prompt(self, task: Task) -> Any:
        return [{"role": "user", "content": "go"}]

    def respond(self, episode: Any, reply: Any) -> Any:
        return None if episode.state.setdefault("asked", 0) else self._ask(episode)

    def _ask(self, episode: Any) -> Any:
        episode.state["asked"] = 1
        return [{"role": "user", "content": "again"}]

    def score(self, episode: Any) -> float:
        return float(episode.num_turns)


def test_tools_are_answered_and_then_the_environment_gives_the_next_turn() -> None:
    rollout = play(Further(), scripted('!add{"a": 1}', "one.", '!add{"a": 2}', "two."))
    assert rollout.error is None
    assert rollout.reward == 4.0
    assert "again" in text_of(rollout.branches[0], False)


def test_further_turns_come_also_if_respond_asks_the_class_above_without_await() -> None:
    class Asks(Further):
        def respond(self, episode: Any, reply: Any) -> Any:
            answered = ToolEnv.respond(self, episode, reply)
            return answered or super().respond(episode, reply)

    assert play(Asks(), scripted("one.", "two.")).reward == 2.0


def test_an_answer_that_nobody_awaited_is_told() -> None:
    class Forgets(Further):
        def respond(self, episode: Any, reply: Any) -> Any:
            async def ask() -> Any:
                return self._ask(episode)

            async def outer() -> Any:
                return ask()

            return outer()

    assert "nobody awaited" in play(Forgets(), scripted("one.")).error


def test_an_answer_that_is_no_list_of_messages_is_told() -> None:
    class Text(Further):
        def respond(self, episode: Any, reply: Any) -> Any:
            return "again"

    assert "Text.respond" in play(Text(), scripted("one.")).error


# -- echo --


@needs("prime")
def test_a_table_of_roles_of_prime_rl_replaces_the_default() -> None:
    def weights(*roles: str) -> tuple[Any, ...]:
        words = [word for role in roles for word in (f"--orchestrator.algo.roles.{role}.alpha", "0.2")]
        base = ["--model.name", "m", "--orchestrator.env", '[{"id": "arithmetic"}]']
        algo = load(RLConfig, [*base, "--orchestrator.algo.type", "echo", *words]).orchestrator.algo
        return algo.tool, algo.user, algo.system

    assert weights() == (0.1, None, None)
    assert weights("user") == (None, 0.2, None)
    assert weights("system", "user") == (None, 0.2, 0.2)
    assert weights("user", "tool") == (0.2, 0.2, None)


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"rows\.parquet.*stretto\[parquet\]"):
        list(read_records(tmp_path / "rows.parquet", "the data"))


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"function": {"name": "f", "arguments": ""}}, {}),
        ({"function": {"name": "f", "arguments": None}}, {}),
        ({"function": {"name": "f"}}, {}),
        ({"name": "f", "arguments": {"a": 1}, "id": "c"}, {"a": 1}),
        ({"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}, '{"a": 1}'),
    ],
)
def test_calls_of_records_have_one_form(given, arguments):
    message = parse_message({"role": "assistant", "tool_calls": [given]}, "rows.jsonl:1: messages[0]")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": arguments}
    assert call.keys() - {"function"} == given.keys() & {"id", "type"}


@pytest.mark.parametrize(
    ("arguments", "mistake"), [("{city: Rome}", "not JSON"), ("[1]", "must be an object, or JSON")]
)
def test_arguments_that_no_parser_would_read_are_refused_with_their_place(arguments, mistake):
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(DataError, match=rf"rows.jsonl:1.*tool_calls\[0\]: the arguments of f:? ?{mistake}"):
        parse_message({"role": "assistant", "content": "", "tool_calls": [call]}, "rows.jsonl:1: messages[0]")
