"""Finds the request that makes the trainer die: one that was computed at a death is a suspect and is computed alone.

The trainer may also die for another reason, for example because a person ended it. So a request is given up only if the
trainer died `KILLS` times while it was computed, the last time alone. The requests of others continue.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto_service.training.jobs import Job
from stretto_service.training.scheduler import Share

KILLS = 2
Key = tuple[str, str, int | None]


class Suspects:
    """Requests during which the trainer has died."""

    def __init__(self) -> None:
        self._kills: dict[Key, int] = {}
        self._running: Sequence[Share] = ()

    def groups(self, shares: Sequence[Share]) -> list[Sequence[Share]]:
        """Split the shares of a turn into groups to compute one after the other: each suspect alone."""
        suspects = [share for share in shares if share.request.payload.key in self._kills]
        others = [share for share in shares if share.request.payload.key not in self._kills]
        return [group for group in (others, *([share] for share in suspects)) if group]

    def begin(self, shares: Sequence[Share]) -> None:
        """Record that the ranks compute these shares now."""
        self._running = shares

    def end(self) -> None:
        """Record that the ranks have answered."""
        self._running = ()

    def died(self) -> list[Job]:
        """Record a death of the trainer; returns the requests that must not be computed again."""
        jobs, self._running = [share.request.payload for share in self._running], ()
        for job in jobs:
            self._kills[job.key] = self._kills.get(job.key, 0) + 1
        if len(jobs) != 1 or self._kills[jobs[0].key] < KILLS:
            return []
        self.clear(jobs[0])
        return jobs

    def clear(self, job: Job) -> None:
        """Forget a request that is done."""
        self._kills.pop(job.key, None)

    def forget(self, run: str) -> None:
        """Forget the requests of a run that has left."""
        self._kills = {key: kills for key, kills in self._kills.items() if key[0] != run}
