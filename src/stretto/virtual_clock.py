# mypy: disable-error-code="attr-defined, misc"
"""Virtual time for a simulation: an event loop whose clock jumps to the next timer, and shared processors.

The orchestrator's code runs unchanged under this clock, and waiting takes no real time.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose sleeps take no time: if no task can run, the clock jumps to the next timer.

    If there is no timer either, all tasks wait for each other: that is a deadlock, and raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._num_jobs = 0  # in threads, which take no time here

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            # As the base class does before it looks at the first timer.
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready and not self._stopping and not self._num_jobs:
            if not self._scheduled:
                raise RuntimeError("deadlock: every task waits and no timer is set")
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()

    def run_in_executor(  # type: ignore[override]  # the names of its parameters differ between Pythons
        self, executor: Any, function: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        self._num_jobs += 1
        job = super().run_in_executor(executor, function, *arguments)
        job.add_done_callback(self._end_job)
        return job

    def _end_job(self, job: asyncio.Future[Any]) -> None:
        self._num_jobs -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._num_jobs += 1
        await super().shutdown_default_executor()
        self._num_jobs -= 1


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine like asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class Job:
    """A piece of work. When it ends, the result of `done` is the share that was completed."""

    def __init__(self, cores: Cores, seconds: float) -> None:
        self.seconds = self.left = seconds
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._cores = cores

    def cut(self) -> None:
        """End it now, completed or not."""
        self._cores.end(self)


class Cores:
    """Runs jobs at full speed while there is a core for each; more jobs share the cores evenly."""

    def __init__(self, num: float) -> None:
        """num: cores; infinity where every process has a device of its own."""
        self._num = num
        self._jobs: list[Job] = []
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float) -> None:
        """Do work to its end."""
        if seconds <= 0:
            return
        job = self.start(seconds)
        try:
            await job.done
        except asyncio.CancelledError:
            self.end(job)
            raise

    def start(self, seconds: float) -> Job:
        """Begin work that may be cut short."""
        self._advance()
        job = Job(self, max(seconds, 1e-9))
        self._jobs.append(job)
        self._plan()
        return job

    def end(self, job: Job) -> None:
        """End a job, finished or not."""
        self._advance()
        if job in self._jobs:
            self._finish(job)
            self._plan()

    def _rate(self) -> float:
        return 1.0 if math.isinf(self._num) else min(1.0, self._num / max(len(self._jobs), 1))

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        passed = (now - self._at) * self._rate()
        for job in self._jobs:
            job.left = max(job.left - passed, 0.0)
        self._at = now

    def _finish(self, job: Job) -> None:
        self._jobs.remove(job)
        if not job.done.done():
            job.done.set_result(1.0 - job.left / job.seconds)

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            soonest = min(job.left for job in self._jobs) / self._rate()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._at + soonest, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        least = 1e-12 + 2 * math.ulp(self._at)  # less than the clock can tell apart would never pass
        for job in [job for job in self._jobs if job.left <= least + 1e-9 * job.seconds]:
            job.left = 0.0
            self._finish(job)
        self._plan()
