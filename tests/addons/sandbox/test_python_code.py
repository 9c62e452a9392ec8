"""python-code: rewards of right, wrong and harmful replies."""

from __future__ import annotations

import asyncio

import pytest

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import load_environment
from stretto.records.rollout import Task


def code_task(function):
    return Task(env="python-code", task_id="t", data={"function": function, "examples": "f(0)=1"})


@pytest.mark.heavy
async def test_code_is_paid_for_passing_the_tests():
    env, task = load_environment("python-code"), code_task("x*2")
    for right in ("x*2", " 2*x ", "x+x", "sum([x, x])", "int('2') * x  # so"):
        assert (await env.score(task, right)).reward == 1.0, right
    for wrong in ("x*3", "2*x if x < 10 else 0", "str(x*2)", "x*2.0", "", "2*", "x*2 if", "print(2)", "y"):
        assert (await env.score(task, wrong)).reward == 0.0, wrong


@pytest.mark.heavy
@pytest.mark.parametrize("function, values", [("x+3", [13, 14]), ("x-9", [1, 2]), ("x*7", [70, 77])])
async def test_code_is_tested_where_no_example_is(function, values):
    env = load_environment("python-code", {"num_tests": 2})
    hard_coded = {10 + index: value for index, value in enumerate(values)}
    assert (await env.score(code_task(function), f"{hard_coded}[x]")).reward == 1.0
    for index in range(100):
        shown = env.tasks("train").task(index).data["examples"]
        assert len(set(shown.split())) == 2 and all(f"f({x})" not in shown for x in hard_coded)


@pytest.mark.heavy
async def test_code_that_misbehaves_earns_nothing_and_ends():
    env, task = load_environment("python-code", {"timeout_s": 0.5}), code_task("x+3")
    loop = await env.score(task, "[0 for _ in iter(int, 1)]")
    assert loop.reward == 0.0 and loop.metrics["killed"] == 1.0
    for wrong in ("exit()", "__import__('os')._exit(0)", "print(x) or x+3", "bytearray(10**11)"):
        assert (await env.score(task, wrong)).reward == 0.0, wrong


async def test_part_of_the_tests_is_paid_where_asked_for():
    env = load_environment("python-code", {"partial": True})
    assert (await env.score(code_task("x+3"), "x+3 if x < 12 else 0")).reward == pytest.approx(2 / 6)


async def test_the_same_reply_is_run_once_for_all_tasks():
    env = load_environment("python-code")
    runs = []
    run = env.sandbox.run

    async def counted_run(code, **given):
        runs.append(given)
        return await run(code, **given)

    env.sandbox.run = counted_run
    tasks = [code_task(function) for function in ("x+3", "x+4", "x+3")]
    results = await asyncio.gather(*(env.score(task, "x+3") for task in tasks))
    assert [result.reward for result in results] == [1.0, 0.0, 1.0] and len(runs) == 1


async def test_a_run_that_was_cancelled_or_failed_is_made_again():
    env, task = load_environment("python-code"), code_task("x+3")
    run, is_broken = env.sandbox.run, True

    async def fragile(code, **given):
        if is_broken:
            raise EnvError("no sandbox")
        return await run(code, **given)

    env.sandbox.run = fragile
    with pytest.raises(EnvError):
        await env.score(task, "x+3")
    is_broken = False
    first = asyncio.ensure_future(env.score(task, "x+3"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await env.score(task, "x+3")).reward == 1.0
    assert first.cancelled()


@pytest.mark.heavy
async def test_code_solves_its_own_tasks():
    env = load_environment("python-code")
    for row in env.sft_rows(4, seed=1):
        user, assistant = row["messages"]
        task = code_task(assistant["content"])
        task.data["examples"] = user["content"]
        assert env.prompt(task) == [user] and user["content"].count("f(") == 2
        assert (await env.score(task, assistant["content"])).reward == 1.0


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="jail"):
        load_environment("python-code", {"backend": "jail"})
