"""Environments with demonstrations."""

from __future__ import annotations

from fakes import EchoEnv

from stretto.records.rollout import Task


class Shown(EchoEnv):
    """A task's demonstration is the word to say."""

    def demonstration(self, task: Task) -> str:
        return task.data["word"]


class Forgetful(EchoEnv):
    """Knows the demonstration of its first task only."""

    def demonstration(self, task: Task) -> str:
        return {"train0": "train0"}[task.data["word"]]
