"""tic-tac-toe: the policy plays against itself from openings; 1 for a win, 0.5 for a draw, 0 for a loss.

The agents `first` (who moves next) and `second` are both the policy, each with its own history. Both are trained, each
with the reward of its own game, and credit compares an agent only with itself. An agent sees the board as nine
characters, its own marks as `x` and the other's as `o`, and answers with the number of a field, 1 to 9. An illegal
answer loses. To measure progress, play an opponent that does not learn: `opponent = "random"`.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, RolloutContext, RolloutResult, Split, TaskSource
from stretto.envs.bundled.held_out import GeneratedTasks, assistant, user
from stretto.records.rollout import Task

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class TicTacToe(GeneratedTasks):
    """Games that start after num_opening_moves random moves, against the policy (`self`) or `random` moves.

    Against `random` the policy moves first in even tasks, second in odd ones.
    """

    stream = "tic-tac-toe"

    def __init__(
        self, num_opening_moves: int = 3, opponent: str = "self", seed: int = 0, instruction: str = ""
    ) -> None:
        if not 2 <= num_opening_moves <= 4:
            raise ConfigError(f"tic-tac-toe: num_opening_moves = {num_opening_moves} must lie in 2..4.")
        if opponent not in ("self", "random"):
            raise ConfigError(f"tic-tac-toe: opponent = {opponent!r} is neither self nor random.")
        self.name = "tic-tac-toe"
        self.num_opening_moves = num_opening_moves
        self.opponent = opponent
        self.seed = seed
        self.instruction = instruction

    def make_text(self, entropy: int) -> str:
        moves = random.Random(entropy).sample("123456789", self.num_opening_moves)
        # A canonical order of moves per board, so that each board belongs to one split only.
        moves[::2], moves[1::2] = sorted(moves[::2]), sorted(moves[1::2])
        return "".join(moves)

    def task_data(self, text: str) -> dict[str, str]:
        return {"opening": text}

    def tasks(self, split: Split) -> TaskSource:
        source = super().tasks(split)

        def make(index: int) -> Task:
            task = source.make(index)
            return replace(task, data=task.data | {"is_first": index % 2 == 0})

        return TaskSource(make)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        board, mover = after(task.data["opening"])
        first, second = mover, other(mover)
        me = first if task.data["is_first"] else second
        contexts = {me: ctx}  # of the marks that the policy plays
        if self.opponent == "self":
            me, contexts = first, {first: ctx.agent("first"), second: ctx.agent("second")}
        rng = random.Random(f"{self.seed}/{task.task_id}")
        histories: dict[str, list[Message]] = {"x": [], "o": []}
        is_legal = True
        while (won := winner(board)) is None and "." in board:
            fields = free_fields(board)
            if not histories[me]:  # the game may not end before the policy has moved
                fields = [f for f in fields if winner(put(board, f, mover)) is None]
            answer = str(rng.choice(fields))
            if mover in contexts:
                histories[mover].append(self._user_message(board, mover))
                reply = await contexts[mover].chat(histories[mover])
                histories[mover].append(reply.message)
                answer = reply.text.strip()
            if answer not in map(str, free_fields(board)):
                is_legal, won = False, other(mover)
                break
            board, mover = put(board, int(answer), mover), other(mover)
        rewards = {mark: 0.5 if won is None else float(won == mark) for mark in "xo"}
        agents = {"first": rewards[first], "second": rewards[second]} if len(contexts) == 2 else {}
        metrics = {"won": float(won == me), "drawn": float(won is None), "legal": float(is_legal)}
        return RolloutResult(reward=rewards[me], agent_rewards=agents, metrics=metrics)

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """The winners' moves in games of random moves from openings of the training split."""
        rows: list[dict] = []
        index = 0
        while len(rows) < num_rows:
            board, mover = after(self.draw_for_sft(seed, index).data["opening"])
            rng = random.Random(f"{self.seed}/{seed}/{index}")
            histories: dict[str, list[Message]] = {"x": [], "o": []}
            while (won := winner(board)) is None and "." in board:
                move = rng.choice(free_fields(board))
                histories[mover] += [self._user_message(board, mover), assistant(str(move))]
                board, mover = put(board, move, mover), other(mover)
            if won:
                rows.append({"messages": histories[won]})
            index += 1
        return rows

    def _user_message(self, board: str, mover: str) -> Message:
        seen = board if mover == "x" else board.translate(str.maketrans("xo", "ox"))
        return user(self.instruction + seen)


def after(moves: str) -> tuple[str, str]:
    """The board after these moves, `x` first, and the mark that moves next. After four moves no mark can have won."""
    board = "." * 9
    for turn, field in enumerate(moves):
        board = put(board, int(field), "xo"[turn % 2])
    return board, "xo"[len(moves) % 2]


def put(board: str, field: int, mark: str) -> str:
    return board[: field - 1] + mark + board[field:]


def free_fields(board: str) -> list[int]:
    return [field for field, mark in enumerate(board, start=1) if mark == "."]


def winner(board: str) -> str | None:
    """The mark that has three in a row; None if none has."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


def other(mark: str) -> str:
    return "o" if mark == "x" else "x"
