"""asyncio helpers: waits with a deadline and a name, long work in slices, task groups that fail fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from stretto.base.errors import EngineError, StrettoError

T = TypeVar("T")

SLICE_S = 0.004


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
