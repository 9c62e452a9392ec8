"""Usage of each user by hour and session: tokens trained, read and sampled, and checkpoints written.

Counts are kept in memory and written to the database every few seconds; a crash loses those that were not written.
"""

from __future__ import annotations

import time
from typing import Literal

from stretto_service.store import Store, Usage

Kind = Literal["training", "prefill", "cached", "sampled", "checkpoints"]
HOUR_S = 3600


class Meter:
    """The counts of all users."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed: dict[str, Usage] = {}

    def add(self, owner: str, session: str | None, **counts: int) -> None:
        """Add to the counts of this hour; their names are those of `Kind`."""
        hour = int(time.time()) // HOUR_S
        name = f"{owner}/{session or ''}/{hour}"
        usage = self._changed.get(name) or self._store.get(Usage, name)
        if usage is None:
            usage = Usage(id=name, owner=owner, session=session, hour=hour)
        for kind, count in counts.items():
            usage.counts[kind] = usage.counts.get(kind, 0) + count
        self._changed[name] = usage

    def write(self) -> None:
        """Write the changed counts to the database."""
        for usage in self._changed.values():
            self._store.put(usage)
        self._changed.clear()

    def between(self, start: float, stop: float) -> list[Usage]:
        """Counts of the hours that begin in [start, stop), seconds since 1970, in order."""
        self.write()
        usages = [each for each in self._store.all(Usage) if start <= each.hour * HOUR_S < stop]
        return sorted(usages, key=lambda usage: (usage.hour, usage.id))
