"""The environment of `repairs.py`: a small network plays `repo-repair`, and a script says what its replies do.

Each reply of the network is sampled, recorded and trained as any other. What it calls is drawn by the rollout and the
turn, so that an episode has known commands and a known number of turns, 2 to 100, and a reward of 1 for every other
member of a group: those end with the solution of the task.
"""

from __future__ import annotations

import random
from contextvars import ContextVar
from typing import Any

from stretto.data.messages import checked_messages
from stretto.envs.base import Message, Reply, RolloutContext, RolloutResult
from stretto.envs.multi_turn import Episode
from stretto.records.rollout import Task
from stretto_repair.env import RepoRepair

ROLLOUT: ContextVar[str] = ContextVar("rollout")
COMMANDS = (
    ("run", "ls | head -3"),
    ("run", "echo {turn} >> notes.txt; tail -n 2 notes.txt"),
    ("run", "date +%N; head -c 6 /dev/urandom | od -An -tx1"),  # another answer each time
    ("run", "mkdir -p kept/{turn}; cp notes.txt kept/{turn}/; ls kept | wc -l"),
    ("run", "rm -rf kept; find . -newer notes.txt | head -2"),
    ("create", "notes.txt"),
    ("view", "notes.txt"),
)


def num_turns_of(rollout_id: str) -> int:
    """Turns of an episode: 2 to 100, most of them short."""
    return 2 + round(98 * random.Random(f"turns/{rollout_id}").random() ** 5)


class Scripted(RepoRepair):
    """repo-repair, played by the script."""

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        assert ctx.episode is not None
        token = ROLLOUT.set(ctx.episode.rollout_id)
        try:
            return await super().rollout(task, ctx)
        finally:
            ROLLOUT.reset(token)

    async def answer_tools(self, episode: Episode, reply: Reply) -> list[Message]:
        call = self._call(episode)
        if call is None:
            return []
        name, arguments = call
        function = {"name": name, "arguments": arguments}
        [answer] = await self.toolset().answer(
            Reply(
                message={"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
                text="",
                token_ids=reply.token_ids,
                finish_reason="stop",
            )
        )
        return checked_messages([{"role": "user", "content": answer["content"]}], "the script")

    def _call(self, episode: Episode) -> tuple[str, dict[str, Any]] | None:
        """The call of this turn; None after the last one."""
        rollout, turn = ROLLOUT.get(), episode.num_turns
        left = num_turns_of(rollout) - turn
        if left <= 0:
            return None
        solution = self.solution(episode.task) if int(rollout.rpartition(".")[2]) % 2 else []
        if 0 < left <= len(solution):
            return solution[len(solution) - left]
        name, text = random.Random(f"{rollout}/{turn}").choice(COMMANDS)
        if name == "run":
            return name, {"command": text.format(turn=turn)}
        return name, {"path": text} | ({"text": f"begun in turn {turn}\n"} if name == "create" else {})
