"""asyncio helpers: waits with a deadline and a name, long work in slices, task groups that fail fast.

A `Deadline` does for any number of waits what asyncio.timeout does for one, with a single timer: thousands of requests
wait at once, and a timer of its own would cost each as much as its part of the network does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from stretto.base.errors import EngineError, StrettoError

T = TypeVar("T")

SLICE_S = 0.004
LATE_SHARE = 1 / 128
"""By this share of its length a wait of `Deadlines` may end too late."""
_SHORTEST_S = 1 / 64
"""Shorter waits may be as late as those of this length."""


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled (not only something it waits for)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_for(awaitable: Awaitable[T], timeout_s: float | None, what: str) -> T:
    """Await and return a result; a timeout raises an error that says what was waited for.

    timeout_s: None waits for ever; use it only where a stall watchdog covers the wait.

    Raises: EngineError after timeout_s.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError as cause:
        if not deadline.expired():
            raise
        raise EngineError(f"waited {timeout_s:g}s for {what}") from cause


class Call:
    """What a task waits for, and somebody else may end."""

    __slots__ = ("_is_absorbed", "_is_ended", "_num_cancelled", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be ended"
        self._task, self._num_cancelled = task, task.cancelling()
        self._is_ended = self._is_absorbed = False

    def cancel(self) -> None:
        """End the wait: its task goes on with an error."""
        if not self._is_ended:
            self._is_ended = True
            self._task.cancel()

    def absorb(self) -> bool:
        """Take the cancellation back; whether it came from `cancel` alone, and not also from who cancels the task."""
        if not self._is_ended or self._is_absorbed:
            return False
        self._is_absorbed = True
        return self._task.uncancel() <= self._num_cancelled


class Deadline:
    """A moment at which all waits end that are bound to it; `when` is the event loop's time."""

    __slots__ = ("_calls", "_timer", "when")

    def __init__(self, when: float) -> None:
        self.when = when
        self._calls: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Limit) -> None:
        self._calls.add(call)
        if self._timer is None:  # the first one, or one that comes after the moment or after `close`
            self._timer = asyncio.get_running_loop().call_at(self.when, self._end)

    def remove(self, call: Limit) -> None:
        self._calls.discard(call)

    def close(self) -> None:
        """Nobody waits for it any more; who does nevertheless, ends at its moment."""
        if self._timer is not None and not self._calls:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer, calls = None, self._calls
        self._calls = set()
        for call in calls:
            call.cancel()


class Limit(Call):
    """`with Limit(deadline):` ends with a TimeoutError if its deadline, should it have one, comes before its end."""

    __slots__ = ("deadline", "when")

    def __init__(self, deadline: Deadline | None, when: float | None = None) -> None:
        """when: the moment meant, if the deadline is one that it shares with others and comes a little later."""
        super().__init__()
        self.deadline = deadline
        self.when = deadline.when if when is None and deadline is not None else when

    @property
    def is_over(self) -> bool:
        """Has the deadline come?"""
        return self._is_ended

    def move_to(self, deadline: Deadline | None) -> None:
        """Have another deadline from now on, or none."""
        if self.deadline is not None:
            self.deadline.remove(self)
        self.deadline = deadline
        if deadline is not None:
            deadline.add(self)

    def __enter__(self) -> Limit:
        if self.deadline is not None:
            self.deadline.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.deadline is not None:
            self.deadline.remove(self)
        if self.absorb() and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Deadlines:
    """Deadlines that many waits share: those that end at about one time have the same one."""

    def __init__(self) -> None:
        self._known: dict[float, Deadline] = {}  # by their moments

    def after(self, seconds: float) -> Limit:
        """A limit of the running task, of this many seconds."""
        when = asyncio.get_running_loop().time() + seconds
        return Limit(self.at(when), when)

    def at(self, when: float) -> Deadline:
        """The deadline that comes at this moment, or later by up to LATE_SHARE of the time until then."""
        now = asyncio.get_running_loop().time()
        # Powers of two, so that waits of any length share what is between now and then: a few hundred at most.
        grain = math.ldexp(LATE_SHARE, math.frexp(max(when - now, _SHORTEST_S))[1] - 1)
        moment = math.ceil(when / grain) * grain
        if (deadline := self._known.get(moment)) is None:
            for each in [each for each in self._known if each < now]:
                del self._known[each]
            deadline = self._known[moment] = Deadline(moment)
        return deadline


async def run_in_slices(work: Generator[None, None, T]) -> T:
    """Run `work` to its end and return its result; every SLICE_S seconds other tasks run.

    `work` yields often, wherever it may be paused. A thread would not help: it would hold the interpreter lock for
    5 ms each time the event loop touches a socket.
    """
    while True:
        slice_end = time.perf_counter() + SLICE_S
        try:
            while time.perf_counter() < slice_end:
                next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup that raises the first failure itself instead of an exception group.

    If several tasks failed, a StrettoError is preferred over other exceptions: it says who must act.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """The first StrettoError of a (nested) exception group, else its first exception."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = list(error.exceptions) + pending
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, StrettoError)), leaves[0])
