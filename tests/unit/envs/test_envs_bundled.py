"""The bundled environments: rewards of right, wrong, malformed and truncated replies; which tasks are held out."""

from __future__ import annotations

import pytest
from turns import play, replay

from stretto.base.errors import ConfigError
from stretto.envs import find
from stretto.envs.base import checked_score, load_environment
from stretto.envs.bundled.calculator import calculate
from stretto.envs.bundled.held_out import is_held_out
from stretto.records.rollout import Task

# What names a task of an environment, in its data: two tasks of one name are one task.
KEYS = {
    "arithmetic": lambda data: data["question"].rstrip("="),
    "alphabet-sort": lambda data: data["letters"],
    "calculator": lambda data: data["product"],
    "count-shapes": lambda data: f"{data['num_shapes']} {data['places']}",
    "python-code": lambda data: f"{data['function']} {data['examples']}",
    "tic-tac-toe": lambda data: data["opening"],
    "wordle": lambda data: data["word"],
}
HERE = [env_id for env_id in KEYS if env_id in find.names()]
"""Without add-ons there are fewer."""


@pytest.mark.parametrize("env_id", HERE)
def test_tasks_are_the_same_by_index_in_every_process(env_id):
    first, second = load_environment(env_id), load_environment(env_id)
    for split in ("train", "eval"):
        tasks = [first.tasks(split).task(i) for i in range(40)]
        assert tasks == [second.tasks(split).task(i) for i in range(40)]
        assert len({t.task_id for t in tasks}) == 40
    other = load_environment(env_id, {"seed": 1})
    assert [other.tasks("train").task(i).data for i in range(40)] != [
        first.tasks("train").task(i).data for i in range(40)
    ]


@pytest.mark.parametrize("env_id", HERE)
def test_no_held_out_task_is_ever_trained_on(env_id):
    env = load_environment(env_id)
    held_out = {KEYS[env_id](env.tasks("eval").task(i).data) for i in range(300)}
    trained = {KEYS[env_id](env.tasks("train").task(i).data) for i in range(2000)}
    assert not held_out & trained
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, trained))


async def value_of(env, task, text):
    return (await checked_score(env.score(task, text), "a score")).reward


async def test_arithmetic_rewards_the_value_in_the_box():
    env = load_environment("arithmetic")
    task = Task(env="arithmetic", task_id="t", data={"question": "3-14=", "answer": "-11"})
    for right in (r"\boxed{-11}", r"\boxed{-11.0}", r"\boxed{-22/2}", r"first \boxed{3}, so \boxed{ -11 }"):
        assert await value_of(env, task, right) == 1.0, right
    for wrong in (r"\boxed{11}", "-11", r"\boxed{-11", r"\boxed{}", "", r"\boxed{-11} or \boxed{4}"):
        assert await value_of(env, task, wrong) == 0.0, wrong


async def test_arithmetic_solves_its_own_tasks():
    env = load_environment("arithmetic", {"num_terms": 3, "operators": "+-*", "instruction": "Sum: "})
    for row in env.sft_rows(50, seed=3):
        question = row["messages"][0]["content"].removeprefix("Sum: ")
        assert not is_held_out(question.rstrip("="))
        task = Task(env=env.name, task_id="t", data={"question": question, "answer": str(eval(question[:-1]))})
        assert env.prompt(task) == row["messages"][:1]
        assert await value_of(env, task, row["messages"][1]["content"]) == 1.0


def test_arithmetic_refuses_settings_that_make_no_tasks():
    for args in ({"max_number": 0}, {"num_terms": 1}, {"operators": "+/"}, {"operators": ""}, {"max_number": 2}):
        with pytest.raises(ConfigError, match="arithmetic: "):
            load_environment("arithmetic", args)


def call(**arguments):
    function = {"name": "calculate", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


async def test_the_calculator_is_called_or_not_and_the_answer_is_rewarded():
    env, data = load_environment("calculator"), {"product": "47*86"}
    result, ctx = await play(env, data, call(expression="47*86"), "4042")
    assert ctx.received == ["47*86=", "4042"]
    assert (result.reward, result.metrics) == (1.0, {"calls": 1.0, "errors": 0.0})
    assert (await play(env, data, "4042"))[0].reward == 1.0
    assert (await play(env, data, call(expression="47*8"), "376"))[0].reward == 0.0
    assert (await play(env, data, "40..."))[0].is_truncated
    unparsed = {"role": "assistant", "content": "", "unparsed_tool_calls": ["{oh"]}
    result, ctx = await play(env, data, unparsed, call(number="1"), call(expression="2**9"), "4042")
    assert (result.reward, result.metrics) == (1.0, {"calls": 3.0, "errors": 3.0})


async def test_the_calculator_solves_its_own_tasks():
    env = load_environment("calculator")
    for row in env.sft_rows(20, seed=2):
        assert row["tools"] == env.tool_schemas()
        assert await replay(env, {"product": row["messages"][0]["content"][:-1]}, row) == 1.0


def test_the_calculator_evaluates_no_python():
    assert calculate("2*(3+4)-5") == "9" and calculate("-3*2") == "-6"
    for wrong in ("__import__('os')", "9**9**9", "'a'*9", "1/0", "True+1", "1.5*2", "1" * 65, ""):
        with pytest.raises((ValueError, SyntaxError)):
            calculate(wrong)


WRONG = (
    ("alphabet-sort", {"num_turns": 0}),
    ("alphabet-sort", {"num_symbols": 27}),
    ("calculator", {"min_number": 5, "max_number": 6}),
    ("wordle", {"num_symbols": 2}),
    ("wordle", {"max_turns": 0}),
    ("python-code", {"num_examples": 1}),
    ("python-code", {"num_tests": 1}),
    ("python-code", {"operators": "/"}),
    ("python-code", {"max_constant": 1}),
)


@pytest.mark.parametrize(("env_id", "args"), [each for each in WRONG if each[0] in HERE])
def test_settings_that_make_no_game_are_refused(env_id, args):
    with pytest.raises(ConfigError, match=f"{env_id}: "):
        load_environment(env_id, args)
