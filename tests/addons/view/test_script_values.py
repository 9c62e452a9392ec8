"""`stretto.rl` from a script: what a configuration cannot hold is refused by its key, before a process starts."""

from __future__ import annotations

import pytest

import stretto
from stretto.base.errors import ConfigError


class Mine:
    """A class of a notebook."""


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"id": Mine}, "orchestrator.env.0.id is .*'envs:Mine'"),
        ({"id": "dataset", "args": {"reward": len}}, "orchestrator.env.0.args.reward is .*put it into a file"),
        ({"id": "dataset", "args": {"path": {1, 2}}}, "orchestrator.env.0.args.path is a set"),
    ],
)
def test_an_object_that_no_file_can_hold_is_refused_by_its_key(env, words) -> None:
    with pytest.raises(ConfigError, match=words):
        stretto.rl({"max_steps": 1, "orchestrator": {"env": [env]}})


def test_a_second_dict_is_told_that_flags_are_texts() -> None:
    with pytest.raises(ConfigError, match="there go flags as texts"):
        stretto.rl({"max_steps": 1}, {"seq_len": 3})
