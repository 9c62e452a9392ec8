"""The bundled environments: rewards of right, wrong, malformed and truncated replies; which tasks are held out."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import Reply, checked_score, load_environment
from stretto.envs.bundled.calculator import calculate
from stretto.envs.bundled.held_out import is_held_out
from stretto.envs.bundled.tic_tac_toe import after, put, winner
from stretto.envs.bundled.wordle import compare
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


# -- python-code --


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


# -- many turns --


class Script:
    """A context whose policy gives scripted replies; checks that every turn extends the history."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.received = []
        self.history = []

    async def chat(self, messages, tools=None, **sampling):
        assert messages[: len(self.history)] == self.history and len(messages) > len(self.history)
        self.received.append(messages[-1]["content"])
        words = self.replies.pop(0)
        finish_reason = "stop"
        if isinstance(words, str) and words.endswith("..."):
            words, finish_reason = words[:-3], "length"
        message = {"role": "assistant", "content": words} if isinstance(words, str) else words
        self.history = [*messages, message]
        return Reply(
            message=message, text=message["content"], token_ids=np.zeros(1, dtype=np.int32), finish_reason=finish_reason
        )


async def play(env, data, *replies):
    ctx = Script(*replies)
    result = await env.rollout(Task(env=env.name, task_id="t", data=data), ctx)
    assert not ctx.replies, "the episode ended early"
    return result, ctx


async def replay(env, data, row):
    """The reward of an SFT row, played as an episode."""
    replies = [message for message in row["messages"] if message["role"] == "assistant"]
    result, ctx = await play(env, data, *replies)
    assert ctx.history == row["messages"]
    return result.reward


async def test_sorting_is_paid_when_every_turn_is_right():
    env, data = load_environment("alphabet-sort", {"instruction": "Sort: "}), {"letters": "dabccb"}
    result, ctx = await play(env, data, " abd\n", "abbccd")
    assert ctx.received == ["Sort: dab", "+ccb"]
    assert (result.reward, result.metrics) == (1.0, {"turns_right": 2.0})
    result, _ = await play(env, data, "abd", "abccbd")
    assert (result.reward, result.metrics) == (0.0, {"turns_right": 1.0})
    for wrong in ("dab", "", "abd abd"):
        assert (await play(env, data, wrong))[0].reward == 0.0
    result, _ = await play(env, data, "abd", "abbcc...")
    assert result.reward == 0.0 and result.is_truncated


async def test_sorting_solves_its_own_tasks():
    env = load_environment("alphabet-sort", {"num_turns": 3})
    for row in env.sft_rows(20, seed=2):
        letters = "".join(m["content"].lstrip("+") for m in row["messages"] if m["role"] == "user")
        assert await replay(env, {"letters": letters}, row) == 1.0


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


def test_a_guess_is_answered_letter_by_letter():
    assert compare("abc", "abc") == "ABC"
    assert compare("cab", "abc") == "cab"
    assert compare("aab", "abc") == "A-b"
    assert compare("aaa", "bab") == "-A-"
    assert compare("bba", "abb") == "bBa"
    assert compare("def", "abc") == "---"


async def test_a_word_is_rewarded_when_found_in_time():
    env, data = load_environment("wordle"), {"word": "abc"}
    result, ctx = await play(env, data, "bad", "cab", "abc")
    assert ctx.received == ["guess", "ba-", "cab"] and result.reward == 1.0
    assert result.metrics == {"guesses": 3.0, "malformed": 0.0}
    result, _ = await play(env, data, "aaa", "aaa", "aaa", "aaa")
    assert (result.reward, result.metrics) == (0.0, {"guesses": 4.0, "malformed": 0.0})
    for malformed in ("abcd", "", "ab", "xyz"):
        result, _ = await play(env, data, "aab", malformed)
        assert (result.reward, result.metrics["malformed"]) == (0.0, 1.0)
    assert (await play(env, data, "ab..."))[0].is_truncated


async def test_sft_rows_are_won_games():
    env = load_environment("wordle")
    for row in env.sft_rows(20, seed=2):
        assert await replay(env, {"word": row["messages"][-1]["content"]}, row) == 1.0


def test_settings_that_make_no_game_are_refused():
    for env_id, args in (
        ("alphabet-sort", {"num_turns": 0}),
        ("alphabet-sort", {"num_symbols": 27}),
        ("calculator", {"min_number": 5, "max_number": 6}),
        ("wordle", {"num_symbols": 2}),
        ("wordle", {"max_turns": 0}),
        ("python-code", {"num_examples": 1}),
        ("python-code", {"num_tests": 1}),
        ("python-code", {"operators": "/"}),
        ("python-code", {"max_constant": 1}),
    ):
        with pytest.raises(ConfigError, match=f"{env_id}: "):
            load_environment(env_id, args)


# -- self-play --


class Table(Script):
    """A context with two agents, each with its own script."""

    def __init__(self, first, second, replies=()):
        super().__init__(*replies)
        self.agents = {"first": Script(*first), "second": Script(*second)}

    def agent(self, name, *, is_trained=True):
        assert is_trained
        return self.agents[name]


async def play_tic_tac_toe(first, second, replies=(), is_first=True, **args):
    env = load_environment("tic-tac-toe", args)
    task = Task(env=env.name, task_id="t", data={"opening": "15", "is_first": is_first})
    ctx = Table(first, second, replies)
    return await env.rollout(task, ctx), ctx


async def test_each_agent_sees_its_own_marks_as_x_and_the_rewards_are_opposite():
    for is_first in (True, False):
        result, ctx = await play_tic_tac_toe(["2", "3"], ["9"], is_first=is_first)
        histories = {name: agent.received for name, agent in ctx.agents.items()}
        assert histories == {"first": ["x...o....", "xx..o...o"], "second": ["oo..x...."]} and not ctx.received
        assert result.reward == 1.0 and result.agent_rewards == {"first": 1.0, "second": 0.0}
        assert result.metrics == {"won": 1.0, "drawn": 0.0, "legal": 1.0}


async def test_a_draw_is_half_and_an_illegal_move_loses():
    result, _ = await play_tic_tac_toe(["9", "8", "3", "4"], ["2", "7", "6"])
    assert (result.reward, result.metrics["drawn"]) == (0.5, 1.0)
    assert result.agent_rewards == {"first": 0.5, "second": 0.5}
    for illegal in ("1", "5", "0", "10", "x", ""):
        result, _ = await play_tic_tac_toe([illegal], [])
        assert result.agent_rewards == {"first": 0.0, "second": 1.0}
        assert result.metrics == {"won": 0.0, "drawn": 0.0, "legal": 0.0}
    result, _ = await play_tic_tac_toe(["2"], ["1"])
    assert result.agent_rewards == {"first": 1.0, "second": 0.0} and result.metrics["legal"] == 0.0


async def test_a_random_opponent_needs_no_second_agent_and_moves_the_same_in_each_task():
    for is_first, num_of_other in ((True, [1, 2]), (False, [2])):
        replies = ["2", "1"] if is_first else ["5"]  # ends with a field that is taken
        games = [await play_tic_tac_toe([], [], replies, is_first=is_first, opponent="random") for _ in range(2)]
        boards = games[0][1].received
        assert boards == games[1][1].received and [board.count("o") for board in boards] == num_of_other
        assert games[0][0].reward == 0.0 and not games[0][0].agent_rewards


async def test_a_random_opponent_does_not_win_before_the_policy_has_moved():
    task = Task(env="tic-tac-toe", task_id="t", data={"opening": "1425", "is_first": False})  # x wins with 3
    for seed in range(20):
        env, ctx = (load_environment("tic-tac-toe", {"opponent": "random", "seed": seed}), Table([], [], ["?"]))
        result = await env.rollout(task, ctx)
        assert result.metrics["legal"] == 0.0 and len(ctx.received) == 1 and ctx.received[0][2] == "."


def test_a_board_has_one_opening():
    env = load_environment("tic-tac-toe")
    for split in ("train", "eval"):
        openings = {env.tasks(split).task(index).data["opening"] for index in range(300)}
        assert len({after(opening) for opening in openings}) == len(openings)


def test_sft_rows_are_moves_of_winners():
    for row in load_environment("tic-tac-toe").sft_rows(50, seed=1):
        last, move = row["messages"][-2:]
        assert winner(put(last["content"], int(move["content"]), "x")) == "x"
