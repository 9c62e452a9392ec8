"""The bundled environments: what is right, wrong, malformed and cut off is worth; who sees which task."""

from __future__ import annotations

import pytest

from stretto.base.errors import ConfigError
from stretto.envs.base import load_environment, scored
from stretto.envs.held_out import is_held_out
from stretto.records.rollout import Task

# What names a task of an environment, in its data: two tasks of one name are one task.
KEYS = {
    "arithmetic": lambda data: data["question"].rstrip("="),
    "python-code": lambda data: data["function"],
}


@pytest.mark.parametrize("env_id", KEYS)
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


@pytest.mark.parametrize("env_id", KEYS)
def test_no_held_out_task_is_ever_trained_on(env_id):
    env = load_environment(env_id)
    held_out = {KEYS[env_id](env.tasks("eval").task(i).data) for i in range(300)}
    trained = {KEYS[env_id](env.tasks("train").task(i).data) for i in range(2000)}
    assert not held_out & trained
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, trained))


# -- arithmetic --


async def value_of(env, task, text):
    return (await scored(env.score(task, text))).reward


async def test_arithmetic_pays_for_the_value_in_the_box():
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
        task = Task(
            env=env.name, task_id="t", data={"question": question, "answer": str(eval(question[:-1]))}
        )
        assert env.prompt(task) == row["messages"][:1]
        assert await value_of(env, task, row["messages"][1]["content"]) == 1.0


def test_arithmetic_refuses_what_makes_no_tasks():
    for args in (
        {"max_number": 0},
        {"num_terms": 1},
        {"operators": "+/"},
        {"operators": ""},
        {"max_number": 2},
    ):
        with pytest.raises(ConfigError, match="arithmetic: "):
            load_environment("arithmetic", args)


# -- python-code --


@pytest.fixture
def code_task():
    return Task(env="python-code", task_id="t", data={"function": "3*x+2"})


async def test_code_is_paid_for_passing_the_tests(code_task):
    env = load_environment("python-code")
    assert env.prompt(code_task) == [{"role": "user", "content": "f(0)=2 f(1)=5"}]
    for right in ("3*x+2", " 2+x*3 ", "x+x+x+2", "sum([x, x, x, 2])", "int('2') + 3*x  # so"):
        assert (await env.score(code_task, right)).reward == 1.0, right
    for wrong in (
        "3*x+1",
        "2 if x == 0 else 5",
        "str(3*x+2)",
        "3*x+2.0",
        "",
        "3*",
        "3*x+2 if",
        "print(2)",
        "y",
    ):
        assert (await env.score(code_task, wrong)).reward == 0.0, wrong


async def test_code_that_misbehaves_earns_nothing_and_ends(code_task):
    env = load_environment("python-code", {"timeout_s": 0.5})
    loop = await env.score(code_task, "[0 for _ in iter(int, 1)]")
    assert loop.reward == 0.0 and loop.metrics["killed"] == 1.0
    for wrong in ("exit()", "__import__('os')._exit(0)", "print(x) or 3*x+2", "bytearray(10**11)"):
        assert (await env.score(code_task, wrong)).reward == 0.0, wrong


async def test_part_of_the_tests_is_paid_where_asked_for(code_task):
    env = load_environment("python-code", {"partial": True})
    assert (await env.score(code_task, "2 if x == 0 else 5")).reward == pytest.approx(2 / 6)


async def test_the_same_reply_is_run_once(code_task):
    env = load_environment("python-code")
    assert await env.score(code_task, "3*x") is await env.score(code_task, "3*x")


async def test_code_solves_its_own_tasks():
    env = load_environment("python-code")
    for row in env.sft_rows(4, seed=1):
        user, assistant = row["messages"]
        task = Task(env=env.name, task_id="t", data={"function": assistant["content"]})
        assert env.prompt(task) == [user]
        assert (await env.score(task, assistant["content"])).reward == 1.0
