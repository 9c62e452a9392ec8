"""Which metrics of a run have no entry on the page of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from stretto.monitors.catalog import PARTS


@cache
def _known(role: str) -> re.Pattern[str]:
    return re.compile("|".join(m.pattern for part in PARTS if role in part.roles for m in part.metrics))


def unlisted(role: str, names: Iterable[str]) -> list[str]:
    """The names among those of a row of metrics/<role>.jsonl that have no entry in monitors/catalog.py."""
    frame = ("step", "time", "incarnation", "resumed_step")
    return sorted({name for name in names if name not in frame and not _known(role).fullmatch(name)})
