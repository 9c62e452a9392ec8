"""Waiting with a deadline and a name, trying again within one, long work in slices, a task group that fails fast."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from stretto.base.errors import EngineError, StrettoError

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
SLICE_S = 0.004


async def wait_for(awaitable: Awaitable[T], timeout_s: float | None, what: str) -> T:
    """The awaitable's result; a deadline that passes is an error that names what was waited for.

    Raises: EngineError after timeout_s. None waits for ever and is only for waits that a stall watchdog
    covers.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError as cause:
        if not deadline.expired():
            raise
        raise EngineError(f"waited {timeout_s:g}s for {what}, in vain") from cause


async def retry(
    call: Callable[[], Awaitable[T]],
    *,
    what: str,
    attempts: int,
    deadline_s: float | None = None,
    is_retryable: Callable[[Exception], bool] = lambda error: isinstance(error, (OSError, EngineError)),
    first_delay_s: float = FIRST_DELAY_S,
) -> T:
    """Call until it succeeds; waits double from first_delay_s, with jitter, and end before the deadline.

    Raises: the last error when it is not retryable; EngineError with that error as cause when attempts or
    time run out.
    """
    assert attempts >= 1, f"{what}: {attempts} attempts"
    started = time.monotonic()
    for attempt in range(1, attempts + 1):
        spent_s = time.monotonic() - started
        try:
            if deadline_s is None:
                return await call()
            return await wait_for(call(), max(deadline_s - spent_s, 0.001), what)
        except (
            Exception
        ) as error:  # the boundary of a retried call: anything may be transient, the caller decides
            if not is_retryable(error):
                raise
            spent_s = time.monotonic() - started
            delay_s = min(first_delay_s * 2 ** (attempt - 1), LONGEST_DELAY_S) * random.uniform(0.8, 1.2)
            is_too_late = deadline_s is not None and spent_s + delay_s >= deadline_s
            if attempt == attempts or is_too_late:
                raise EngineError(
                    f"{what} failed {attempt} times in {spent_s:.1f}s; last: {error}"
                ) from error
            logger.debug(
                "%s failed (attempt %d of %d): %s; again in %.1fs", what, attempt, attempts, error, delay_s
            )
        await asyncio.sleep(delay_s)
    raise AssertionError("unreachable")


def at_once(work: Generator[None, None, T]) -> T:
    """What `work` returns, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


async def in_slices(work: Generator[None, None, T]) -> T:
    """What `work` returns; whenever it yields after SLICE_S of its own, everybody else has a turn.

    A thread would be no help: it holds the interpreter for 5 ms each time that the event loop touches a socket.
    """
    while True:
        until = time.perf_counter() + SLICE_S
        try:
            while time.perf_counter() < until:
                next(work)
        except StopIteration as end:
            return end.value
        await asyncio.sleep(0)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup whose first failure cancels the others and is raised as itself, not in a group.

    When several tasks failed, a StrettoError wins over other exceptions: it says who must act.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """The most telling exception of a (nested) group: the first StrettoError, else the first of any kind."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = list(error.exceptions) + pending
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, StrettoError)), leaves[0])
