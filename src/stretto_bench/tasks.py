"""Made-up data: an environment with prompts of a given length in tokens, and rows for `sft`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from stretto.envs.base import Message, RunInfo, SingleTurnEnv, TaskSource
from stretto.records.rollout import Task

WORDS = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")


class BenchTasks(SingleTurnEnv):
    """Prompts of about `prompt_tokens` tokens; rewards are 0 or 1 by the hash of the reply, so that groups differ."""

    name = "bench"

    def __init__(self, prompt_tokens: int, run: RunInfo | None = None) -> None:
        self._num_words = prompt_tokens
        if run is not None and run.prompt_ids is not None:
            while self._num_words > 1 and len(run.prompt_ids(self._messages(0), None)) > prompt_tokens:
                self._num_words -= max(1, self._num_words // 50)

    def tasks(self, split: str) -> TaskSource:
        """Tasks without end, whose prompts differ early."""
        return TaskSource(lambda index: Task(env=self.name, task_id=f"{split}-{index}", data={"index": index}))

    def prompt(self, task: Task) -> list[Message]:
        return self._messages(task.data["index"])

    def _messages(self, index: int) -> list[Message]:
        return [{"role": "user", "content": text_of(self._num_words, index)}]

    def score(self, task: Task, text: str) -> float:
        return float(hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 2)


def text_of(num_words: int, index: int) -> str:
    """Words; another index gives other words, from the first one on."""
    digits = [WORDS[index >> (3 * place) & 7] for place in range(min(num_words, 6))]
    return " ".join([*digits, *(WORDS[(index + place) % 8] for place in range(6, num_words))])


def write_rows(path: Path, num_rows: int, num_words: int) -> Path:
    """Rows for `sft` of that many words, each at least a token: longer ones are cut at seq_len."""
    rows = ({"prompt": "go", "completion": text_of(num_words, index)} for index in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
