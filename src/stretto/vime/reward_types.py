"""The built-in rewards, by their names in vime's --rm-type; envs/rewards/builtin.py computes them."""

from __future__ import annotations

RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "remote_rm", "random")
BOXED = "boxed_"
"""Before a name: the content of the reply's last box is the reply."""
LABELLED = ("math", "dapo", "deepscaler", "f1")
"""Rewards that compare a reply with its record's label."""
UNLABELLED = "stretto.envs.rewards.builtin.unlabelled"
"""The function that is the reward where one of these is chosen and no record has a label."""
WITH_ENTRIES = ("dapo", "remote_rm")
"""Rewards that may be a dictionary; all others are numbers."""


def is_rm_type(name: str) -> bool:
    """Is there a built-in reward of this name?"""
    return name.removeprefix(BOXED) in RM_TYPES
