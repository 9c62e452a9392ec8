"""tic-tac-toe: the policy plays against itself from openings; 1 for a win, 0.5 for a draw, 0 for a loss.

Both seats are played by the policy's newest weights, each with a history of its own. One seat is trained, the
other (`opponent`) plays along, so that the members of a group, who start from one opening on one seat, can be
compared by any credit rule. A player sees the board as nine characters, its own marks `x`, the other's `o`, and
answers with the number of a field, 1 to 9. An illegal answer loses.
"""

from __future__ import annotations

import random

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, RolloutContext, RolloutResult, Split, TaskSource
from stretto.envs.held_out import draw_held_out
from stretto.records.rollout import Task

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class TicTacToe:
    """Games after num_opening_moves random moves. `opponent` is the policy (`self`) or plays at `random`."""

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

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            opening = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            # The trained player is next to move in even tasks, second in odd ones.
            data = {"opening": opening, "is_first": index % 2 == 0}
            return Task(env=self.name, task_id=f"{split}-{index}", data=data)

        return TaskSource(make)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        board = board_after(task.data["opening"])
        mover = "ox"[len(task.data["opening"]) % 2 == 0]
        trained = mover if task.data["is_first"] else other(mover)
        chance = random.Random(f"{self.seed}/{task.task_id}")
        players = {trained: ctx, other(trained): ctx.agent("opponent", is_trained=False)}
        heard: dict[str, list[Message]] = {"x": [], "o": []}
        payoff, is_legal = 0.5, True
        while winner(board) is None and "." in board:
            if mover != trained and self.opponent == "random":
                answer = str(chance.choice(free_fields(board)))
            else:
                heard[mover].append(self._ask(board, mover))
                reply = await players[mover].chat(heard[mover])
                heard[mover].append(reply.message)
                answer = reply.text.strip()
            if answer not in map(str, free_fields(board)):
                is_legal, payoff = mover != trained, float(mover != trained)
                break
            board = put(board, int(answer), mover)
            mover = other(mover)
        if found := winner(board):
            payoff = float(found == trained)
        metrics = {"won": float(payoff == 1.0), "drawn": float(payoff == 0.5), "legal": float(is_legal)}
        return RolloutResult(reward=payoff, agent_rewards={"opponent": 1.0 - payoff}, metrics=metrics)

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Games of the train side that one player won: it takes a win at once, both else move at random."""
        rows: list[dict] = []
        index = 0
        while len(rows) < num_rows:
            opening = self._draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
            board, mover = board_after(opening), "ox"[len(opening) % 2 == 0]
            chance = random.Random(f"{self.seed}/{seed}/{index}")
            heard: dict[str, list[Message]] = {"x": [], "o": []}
            while (found := winner(board)) is None and "." in board:
                moves = free_fields(board)
                wins = [m for m in moves if winner(put(board, m, mover))]
                move = chance.choice(wins or moves)
                heard[mover] += [self._ask(board, mover), {"role": "assistant", "content": str(move)}]
                board = put(board, move, mover)
                mover = other(mover)
            if found:
                rows.append({"messages": heard[found]})
            index += 1
        return rows

    def _ask(self, board: str, mover: str) -> Message:
        seen = board if mover == "x" else board.translate(str.maketrans("xo", "ox"))
        return {"role": "user", "content": self.instruction + seen}

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        def make(entropy: int) -> str:
            return "".join(map(str, random.Random(entropy).sample(range(1, 10), self.num_opening_moves)))

        return draw_held_out(f"tic-tac-toe/{stream}", index, is_eval=is_eval, make=make)


def board_after(moves: str) -> str:
    """The board after these fields were taken in turn, `x` first; at most four moves, so nobody has won."""
    board = "." * 9
    for turn, field in enumerate(moves):
        board = put(board, int(field), "xo"[turn % 2])
    return board


def put(board: str, field: int, mark: str) -> str:
    return board[: field - 1] + mark + board[field:]


def free_fields(board: str) -> list[int]:
    return [field for field, mark in enumerate(board, start=1) if mark == "."]


def winner(board: str) -> str | None:
    """The mark that has three in a row."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


def other(mark: str) -> str:
    return "o" if mark == "x" else "x"
