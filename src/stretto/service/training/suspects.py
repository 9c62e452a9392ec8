"""Which request ends the trainer: one that was computed when it died is suspect, and is computed alone after that.

The trainer may also die for another reason, such as memory or a person. So a request is given up only if the trainer
died `KILLS` times with it, the last time with nothing else; the requests of others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.service.training.jobs import Job
from stretto.service.training.scheduler import Share

KILLS = 2
Key = tuple[str, str, int | None]


class Suspects:
    """Requests during which the trainer has died."""

    def __init__(self) -> None:
        self._kills: dict[Key, int] = {}
        self._running: Sequence[Share] = ()

    def groups(self, shares: Sequence[Share]) -> list[Sequence[Share]]:
        """The shares of a turn in groups to compute one after the other: each suspect is alone."""
        suspects = [share for share in shares if share.request.payload.key in self._kills]
        others = [share for share in shares if share.request.payload.key not in self._kills]
        return [group for group in (others, *([share] for share in suspects)) if group]

    def begin(self, shares: Sequence[Share]) -> None:
        """The ranks compute these shares from now."""
        self._running = shares

    def end(self) -> None:
        """They have answered."""
        self._running = ()

    def died(self) -> list[Job]:
        """The trainer died: returns, and forgets, the requests that must not be computed again."""
        jobs, self._running = [share.request.payload for share in self._running], ()
        for job in jobs:
            self._kills[job.key] = self._kills.get(job.key, 0) + 1
        found = [job for job in jobs if len(jobs) == 1 and self._kills[job.key] >= KILLS]
        for job in found:
            self.clear(job)
        return found

    def clear(self, job: Job) -> None:
        """This request is done."""
        self._kills.pop(job.key, None)

    def forget(self, run: str) -> None:
        """This run has left."""
        self._kills = {key: kills for key, kills in self._kills.items() if key[0] != run}
