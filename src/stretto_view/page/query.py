"""What a request asks for: numbers, filters, and the name of a rollout, and what each parameter means."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from stretto.base.errors import ConfigError
from stretto_view.page.rollouts import STATUSES, Filters

FILTERS = {
    "step": "rollouts that this step trained on; only then `sort` may be best, worst or longest",
    "env": "environment",
    "task": "id of a task: its rollouts over the versions",
    "status": "finished, truncated, failed, dropped or running; without it, all that have ended",
    "min_reward": "at least this reward", "max_reward": "at most this",
    "min_tokens": "sampled ones", "max_tokens": "sampled ones",
    "version": "sampled a token of it",
    "sort": "newest, best, worst or longest",
    "text": "text that the rollout has; the case of letters does not matter",
    "place": "where: anywhere, prompt or reply",
    "before": "`next` of the previous page",
}  # fmt: skip
ROLLOUT = {
    "group": "number after the g of a rollout's name",
    "member": "number after its dot",
    "branch": "number of the branch that `from` is about, from 0",
    "from": "its first token that is given, of a branch that is too long for one answer",
}
CURVE = {
    "key": "a metric; may be repeated",
    "axis": "step, time (hours) or tokens",
    "smooth": "share of the rows, 0 to 1",
}


def check_names(query: Any, parameters: Iterable[str]) -> None:
    """Raises: ConfigError for a parameter that the address does not have."""
    known = list(parameters)
    for name in query:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            takes = f"did you mean {near[0]}?" if near else f"this address takes {', '.join(known) or 'none'}."
            raise ConfigError(f"there is no parameter {name!r}; {takes}")


def number(query: Any, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the query; None if it is missing. Raises: ConfigError if it is not a finite number."""
    text = query.get(name)
    if text in (None, ""):
        return None
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) >= 2**62:
        raise ConfigError(f"{name}: {text!r} is not a number.")
    return value


def filters_of(query: Any) -> Filters:
    """The filters of a request. Raises: ConfigError for a number that is none, and for a status that does not exist."""
    if (status := query.get("status") or None) not in (None, *STATUSES):
        raise ConfigError(f"status {status!r}: a rollout is {', '.join(STATUSES)}.")
    return Filters(
        step=number(query, "step", int),
        env=query.get("env") or None,
        status=status,
        min_reward=number(query, "min_reward", float),
        max_reward=number(query, "max_reward", float),
        min_tokens=number(query, "min_tokens", int),
        max_tokens=number(query, "max_tokens", int),
        version=number(query, "version", int),
        task=query.get("task") or None,
        sort=query.get("sort") or "newest",
    )


def rollout_of(query: Any) -> tuple[int, int, tuple[int, int]]:
    """Group and member of a request, and a branch with its first token. Raises: ConfigError if one is missing."""
    group, member = number(query, "group", int), number(query, "member", int)
    if group is None or member is None:
        raise ConfigError("a request for a rollout needs the numbers `group` and `member`.")
    return group, member, (number(query, "branch", int) or 0, max(0, number(query, "from", int) or 0))
