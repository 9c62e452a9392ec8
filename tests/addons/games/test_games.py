"""Games: rewards of right, wrong, illegal and truncated moves."""

from __future__ import annotations

from turns import Script, play, replay

from stretto.envs.base import load_environment
from stretto.records.rollout import Task
from stretto_games.tic_tac_toe import after, put, winner
from stretto_games.wordle import compare


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
