"""Worker processes that judge groups: each gets a few at a time, and one that dies or hangs costs one group.

The groups that a worker had when it ended are given out again one by one; one with which a worker ends again is not
judged.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from stretto.base.errors import ConfigError, EngineError
from stretto_review.judging import Job, Judged, work

SHARE = 32
"""Groups that a worker is given at once."""
START_S = 120.0
HANGING_S = 10.0


@dataclass
class _Worker:
    process: BaseProcess
    wire: Connection
    asked: list[int]
    """Groups that it has not answered yet."""
    pulse: Any
    """When it last did something: a shared number."""


def judge_all(job: Job, group_ids: Sequence[int], num_workers: int) -> Iterator[Judged]:
    """Every group, judged, in the order in which they are done.

    Raises: ConfigError for rewards that do not exist; DataError if the replies cannot be read.
    """
    shares = deque([list(group_ids[start : start + SHARE]) for start in range(0, len(group_ids), SHARE)])
    workers = [_start(job) for _ in range(min(num_workers, len(shares)))]
    try:
        for worker in workers:
            _wait_for_start(worker)
        while workers:
            wait([each.wire for each in workers], timeout=0.5)
            for worker in list(workers):
                yield from _answers(worker)
                if worker.asked and not _is_lost(worker, job):
                    continue
                if worker.asked:
                    yield from _give_up(worker, job, shares)
                    workers[workers.index(worker)] = worker = _start(job)
                    _wait_for_start(worker)
                if shares:
                    _ask(worker, shares.popleft())
                else:
                    workers.remove(worker)
                    worker.wire.close()
                    worker.process.join()
    finally:
        for worker in workers:
            worker.process.kill()


def _start(job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    pulse = context.Value("d", time.monotonic(), lock=False)
    process = context.Process(target=work, args=(other, job, pulse), daemon=True)
    process.start()
    other.close()
    return _Worker(process, own, [], pulse)


def _wait_for_start(worker: _Worker) -> None:
    """Raises: ConfigError for rewards that do not exist; EngineError if it does not start."""
    try:
        error = worker.wire.recv() if worker.wire.poll(START_S) else EngineError(f"it took more than {START_S:g} s")
    except EOFError:
        worker.process.join()
        error = EngineError(f"it ended with exit status {worker.process.exitcode}; does an import end the process?")
    if error is not None:
        raise error if isinstance(error, ConfigError) else EngineError(f"a worker of rescore did not start: {error}")


def _ask(worker: _Worker, groups: list[int]) -> None:
    worker.asked, worker.pulse.value = groups, time.monotonic()
    worker.wire.send(list(groups))


def _answers(worker: _Worker) -> Iterator[Judged]:
    try:
        while worker.asked and worker.wire.poll():
            judged: Judged = worker.wire.recv()
            worker.asked.remove(judged.group_id)
            yield judged
    except (EOFError, OSError):
        return


def _is_lost(worker: _Worker, job: Job) -> bool:
    """Is it dead, or silent for longer than a function that can be interrupted would make it?"""
    return not worker.process.is_alive() or time.monotonic() > worker.pulse.value + job.limit_s + HANGING_S


def _give_up(worker: _Worker, job: Job, shares: deque[list[int]]) -> Iterator[Judged]:
    """End a worker; its groups are given out one by one, and one that was alone is not judged."""
    is_dead = not worker.process.is_alive()
    worker.process.kill()
    worker.process.join()
    yield from _answers(worker)
    worker.wire.close()
    if not worker.asked:
        return
    if len(worker.asked) > 1:
        shares.extendleft([group_id] for group_id in reversed(worker.asked))
        return
    code = worker.process.exitcode
    why = (
        f"the reward ended its process (exit status {code})"
        if is_dead
        else f"the reward did not end in {job.limit_s:g} s"
    )
    yield Judged(worker.asked[0], "", [], error=f"{why}; it judged group g{worker.asked[0]}")
