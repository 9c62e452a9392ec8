"""Methods of environments of users: which there must be, and with which arguments."""

from __future__ import annotations

import re

import pytest

from stretto.base.errors import ConfigError
from stretto.envs.base import SingleTurnEnv, TaskSource, load_environment
from stretto.envs.multi_turn import MultiTurnEnv
from stretto.envs.parameters import check_methods
from stretto.records.rollout import Task


class _Lacking(SingleTurnEnv):
    name = "lacking"

    def tasks(self, split):
        return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={}))

    def prompt(self, task):
        return "abc"


class _Narrow(_Lacking):
    def score(self, text):
        return 1.0


class _Asking(MultiTurnEnv):
    name = "asking"

    def tasks(self):
        return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={}))

    def prompt(self, task):
        return "abc"

    def respond(self, episode, reply):
        return []

    def score(self, episode):
        return 1.0


class _Wide(_Lacking):
    def score(self, task, text, *, strict=False, **rest):
        return 1.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_Lacking, "_Lacking has no `score`; write `def score(self, task, text)`"),
        (_Narrow, r"_Narrow.score \(.*test_envs_methods.py:\d+\): .*; write `def score\(self, task, text\)`"),
        (_Asking, r"_Asking.tasks \(.*:\d+\): .*; write `def tasks\(self, split\)`"),
    ],
)
def test_a_method_that_is_missing_or_takes_other_arguments_is_told_how_to_write_it(kind, words) -> None:
    pattern = words if "\\" in words else re.escape(words)
    with pytest.raises(ConfigError, match=pattern):
        load_environment(f"test_envs_methods:{kind.__name__}")


def test_a_method_may_take_more() -> None:
    check_methods(_Wide, "wide")
