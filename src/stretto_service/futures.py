"""Futures: a request is answered at once with an id, and its client fetches the result by this id.

A result is JSON, or bytes of a protocol buffer, or a failure with its reason. States: waiting -> done. Only the owner
gets a result. It is kept for a while after it was first sent, because an answer may be lost on the way. A user has a
limited number of results, of which the newest stay. A request for a deleted result is answered with 410.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stretto.transports.engine.api import Refusal

KEEP_SENT_S = 120.0
KEEP_UNSENT_S = 3600.0
MAX_KEPT = 20_000
"""Largest number of results that are kept per user."""
MAX_KEPT_BYTES = 1 << 30
"""Largest size of these results together; the newest one is always kept."""

_PATH = re.compile(r"(?<![\w/.:])/[^\s/'\"`:;,()\[\]<>=]+(?:/[^\s'\"`:;,()\[\]<>=]*)+")


def without_paths(text: str) -> str:
    """The text with the names of this machine's files in the place of their paths, which are no business of users."""
    return _PATH.sub(lambda found: _name_of(found[0]), text)


def _name_of(path: str) -> str:
    """The last part of a path that begins with a directory of this machine; else `path`, which may be a route."""
    return path.rstrip("/").rpartition("/")[2] if Path("/", path.split("/")[1]).is_dir() else path


class Result(msgspec.Struct, frozen=True):
    """The result of a request. error: the reason of a failure, instead of a body; category: who must act."""

    body: bytes = b"{}"
    is_protobuf: bool = False
    error: str | None = None
    category: str = "user"

    @classmethod
    def of(cls, value: object) -> Result:
        return cls(msgspec.json.encode(value))

    @classmethod
    def failed(cls, error: str, category: str = "user") -> Result:
        return cls(error=error, category=category)

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.error or "")

    def json(self) -> bytes:
        if self.error is None:
            return self.body
        return msgspec.json.encode({"error": self.error, "category": self.category})


@dataclass(eq=False)
class Future:
    """One request of a user."""

    id: str
    owner: str
    result: Result | None = None
    sent_at: float | None = None
    done_at: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: Callable[[], object] | None = None
    """Stops the work on it; None if that cannot be stopped."""
    run: str | None = None
    """The run whose request it is; None for samples."""
    number_done: int = 0
    """Its position in the order in which all futures were done, from 1."""
    on_done: Callable[[Future], None] = lambda future: None

    def set(self, result: Result) -> None:
        """Answer the request; after a crash a result that is computed again replaces the first one."""
        if result.error is not None:
            result = msgspec.structs.replace(result, error=without_paths(result.error))
        self.result, self.done_at = result, time.monotonic()
        self.on_done(self)
        self.changed.set()


class Futures:
    """The futures of all users, until their results are deleted."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._swept_at = time.monotonic()
        self._num_done = 0
        self._any_done = asyncio.Event()

    def open(self, name: str, owner: str, *, run: str | None = None) -> Future:
        """A new future, or that of the same request sent again."""
        if time.monotonic() - self._swept_at > KEEP_SENT_S / 4:
            self.sweep()
        return self._futures.setdefault(name, Future(name, owner, run=run, on_done=self._number))

    def _number(self, future: Future) -> None:
        self._num_done += 1
        future.number_done = self._num_done
        self._any_done.set()
        self._any_done = asyncio.Event()

    async def wait_any(self, is_included: Callable[[Future], bool], after: int, timeout_s: float) -> list[Future]:
        """Wait for included futures that are done with a number above `after`, in order; [] if none is in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._any_done
            found = [f for f in self._futures.values() if f.number_done > after and is_included(f)]
            left = deadline - time.monotonic()
            if found or left <= 0:
                return sorted(found, key=lambda future: future.number_done)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await event.wait()

    def fail(self, run: str, result: Result) -> None:
        """Answer the requests of a run that have no answer."""
        for future in self._futures.values():
            if future.run == run and future.result is None:
                future.set(result)

    def forget(self, prefix: str) -> None:
        """Delete the futures whose ids begin with this: those of a run whose name another run takes."""
        for name in [name for name in self._futures if name.startswith(prefix)]:
            del self._futures[name]

    def find(self, name: str) -> Future | None:
        return self._futures.get(name)

    def of(self, name: str, user: str, *, is_admin: bool = False) -> Future:
        """A user's future. Raises: Refusal 410 if there is none (any more), 403 if it is another user's."""
        future = self._futures.get(name)
        if future is None:
            raise Refusal(
                f"{name}: there is no such request, or its result is gone; results are kept for {KEEP_UNSENT_S:g} s, "
                f"and for {KEEP_SENT_S:g} s once they were sent",
                410,
            )
        if not is_admin and future.owner != user:
            raise Refusal(f"{name}: this is a request of another user", 403)
        return future

    async def wait(self, future: Future, timeout_s: float) -> Result | None:
        """Wait for the result; None if it is not there in time."""
        if future.result is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await future.changed.wait()
            except TimeoutError:
                return None
        future.sent_at = time.monotonic()
        return future.result

    def sweep(self) -> None:
        """Delete results that are old, and the oldest of users who have too many."""
        self._swept_at = now = time.monotonic()
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        done = [future for future in self._futures.values() if future.done_at is not None]
        for future in sorted(done, key=lambda future: future.number_done, reverse=True):
            assert future.done_at is not None and future.result is not None, "it is done"
            counts[future.owner] += 1
            sizes[future.owner] += future.result.num_bytes
            is_old = now - future.done_at > KEEP_UNSENT_S
            is_old |= future.sent_at is not None and now - future.sent_at > KEEP_SENT_S
            has_many = counts[future.owner] > MAX_KEPT
            has_many |= sizes[future.owner] > MAX_KEPT_BYTES and counts[future.owner] > 1
            if is_old or has_many:
                del self._futures[future.id]
