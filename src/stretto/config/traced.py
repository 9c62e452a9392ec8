"""Steps to trace (`--profile N`), in an environment variable that models/trace.py reads."""

from __future__ import annotations

import re

from stretto.base.errors import ConfigError

VARIABLE = "STRETTO_PROFILE"
FLAG = "--profile"
MAX_STEPS = 20


def parse_steps(text: str) -> frozenset[int]:
    """Steps of `3`, `3,7` or `3-5`.

    Raises: ConfigError for anything else, and for too many.
    """
    steps: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?\s*", part)
        if found is None or int(found[2] or found[1]) - int(found[1]) not in range(MAX_STEPS):
            raise ConfigError(f"--profile {text}: give steps such as 3, 3,7 or 3-5, at most {MAX_STEPS}")
        steps.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    if len(steps) > MAX_STEPS:
        raise ConfigError(f"--profile {text}: at most {MAX_STEPS} steps")
    return frozenset(steps)


def split_profile_flag(words: list[str]) -> tuple[list[str], str | None]:
    """The words without `--profile N`, and N.

    Raises: ConfigError if no steps are given.
    """
    rest, given = [], None
    left = iter(words)
    for word in left:
        if word == FLAG or word.startswith(f"{FLAG}="):
            given = word.partition("=")[2] or next(left, "")
            parse_steps(given)
        else:
            rest.append(word)
    return rest, given
