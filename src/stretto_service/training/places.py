"""The places of runs in the trainer: their waiting requests, their answers, and how a run gets its place again.

After a crash every run is created from its saved state, and the journal has the requests since then.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stretto.base.errors import DataError, StrettoError
from stretto_service.futures import Futures, Result, without_paths
from stretto_service.store import Run, Store
from stretto_service.training.jobs import WRITES, Job, Limits, read_job
from stretto_service.training.journal import REFUSED, Journal
from stretto_service.training.place import Tenant
from stretto_service.training.scheduler import Request, TrainQueue

logger = logging.getLogger(__name__)


class Places:
    """All runs that have a place. directory: of the files of all runs."""

    def __init__(self, directory: Path, queue: TrainQueue, store: Store, futures: Futures, limits: Limits) -> None:
        self.directory, self.queue = directory, queue
        self._store, self._futures, self._limits = store, futures, limits
        self.tenants: dict[str, Tenant] = {}
        self.changed = asyncio.Event()
        """Set whenever a request is added."""
        for run in store.all(Run):
            if run.is_placed:
                self.admit_again(run)

    def waiting_bytes(self, owner: str, *, with_early: bool = False) -> int:
        """Size of the bodies of a user's requests that are in the queue; with_early: or wait for a lower number."""
        own = [tenant for tenant in self.tenants.values() if tenant.run.owner == owner]
        jobs = [request.payload for tenant in own for request in self.queue.requests(tenant.run.id)]
        if with_early:
            jobs += [job for tenant in own for job in tenant.early.values() if job is not None]
        return sum(job.num_bytes for job in jobs)

    def admit(self, run: Run) -> None:
        """Put a run into the queue: its creation first, then the requests since it was saved.

        Raises: DataError for a damaged request, OSError for one that cannot be read; then the run has no place.
        """
        journal = Journal(self.directory / run.spec.name / "journal")
        results, requests = journal.results(), journal.requests(run.saved_seq)
        tenant = Tenant(run, journal, run.saved_seq + 1, clean_seq=run.saved_seq)
        self.tenants[run.id] = tenant
        self.queue.add(
            run.id,
            weight=run.weight,
            priority=run.priority,
            tokens_per_minute=run.tokens_per_minute,
            now=time.monotonic(),
        )
        future = self._futures.open(f"{run.id}/0", run.owner, run=run.id)
        self.push(Job(run, "create", None, future=future))
        for seq, result in results.items():
            self._futures.open(f"{run.id}/{seq}", run.owner, run=run.id).set(result)
        for seq, kind, body in requests:
            job = None if kind == REFUSED else self._read_again(run, kind, body, seq)
            self.push_all(tenant.accept(seq, job, is_in_journal=True))

    def admit_again(self, run: Run) -> None:
        """Admit a run that had a place; one whose files cannot be read fails, and the others continue."""
        try:
            self.admit(run)
        except (OSError, ValueError, DataError) as error:
            logger.exception("%s cannot continue", run.id)
            run.state, run.reason = "failed", without_paths(f"its files cannot be read: {error}")
            self._store.put(run)
            self._futures.fail(run.id, Result.failed(f"{run.id}: {run.reason}"))

    def _read_again(self, run: Run, kind: str, body: bytes, seq: int) -> Job | None:
        """The job of a request in the journal; None if it is not valid or needs no work."""
        future = self._futures.open(f"{run.id}/{seq}", run.owner, run=run.id)
        try:
            job = read_job(run, kind, body, self._limits, seq=seq)
        except StrettoError as error:
            future.set(Result.failed(str(error)))
            return None
        job.future, job.num_bytes = future, len(body)
        is_written = kind in WRITES and future.result is not None
        return None if is_written else job

    def rebuild(self) -> None:
        """Put all runs into the queue again, after the ranks were restarted."""
        for run_id in list(self.tenants):
            tenant = self.tenants.pop(run_id)
            waiting = [request.payload for request in self.queue.remove(run_id)]
            self.admit_again(tenant.run)
            if (again := self.tenants.get(run_id)) is None:
                continue
            again.early |= {seq: job for seq, job in tenant.early.items() if seq >= again.next_seq}
            for job in waiting:
                if job.kind == "save_state" and job.on_done is not None:  # of the service itself
                    self.push(job)

    def push_all(self, jobs: Sequence[Job]) -> None:
        """Put these requests into the queue, in order."""
        for job in jobs:
            self.push(job)

    def push(self, job: Job, *, is_first: bool = False) -> None:
        """Put a request into the queue, unless its run has lost its place; is_first: before those that wait."""
        if job.run.id in self.tenants:
            self.queue.push(Request(job.run.id, job.units, job), is_first=is_first)
            self.changed.set()

    def answer(self, job: Job, result: Result) -> None:
        """Give the result of a request to its future and the journal."""
        if job.future is None:
            return
        if job.seq is not None and (tenant := self.tenants.get(job.run.id)) is not None:
            tenant.journal.write_result(job.seq, result)
        job.future.set(result)

    def refuse_waiting(self, tenant: Tenant, since: int) -> None:
        """Fail the requests from this number on that have no result; they are not computed after a restart either."""
        run = tenant.run

        def is_refused(request: Request) -> bool:
            job: Job = request.payload
            is_answered = job.future is None or job.future.result is not None
            return job.seq is not None and job.seq >= since and not is_answered

        dropped = [request.payload for request in self.queue.drop(run.id, is_refused)]
        for job in [*dropped, *tenant.refuse_early()]:
            tenant.journal.refuse(job.seq)
            self.answer(job, Result.failed(f"{run.id} is frozen: {run.reason}"))

    def close_gap(self, tenant: Tenant) -> None:
        """Stop waiting for numbers that never came, and fail the requests behind them."""
        error = f"the request with seq_id = {tenant.next_seq} never came, so those behind it are not computed"
        for job in tenant.close_gap():
            self.answer(job, Result.failed(error))

    def drop(self, run_id: str, state: Any, reason: str) -> None:
        """Remove a run from the queue; its waiting requests fail."""
        tenant = self.tenants.get(run_id)
        if tenant is None:
            return
        run = tenant.run
        run.state = state
        if not run.is_held:  # else the reason says why the admin has frozen it
            run.reason = without_paths(reason)
        self._store.put(run)
        jobs = [request.payload for request in self.queue.remove(run_id)]
        jobs += [job for job in tenant.early.values() if job is not None]
        for job in jobs:
            if job.future is not None and job.future.result is None:
                self.answer(job, Result.failed(f"{run.id}: {reason}"))
        del self.tenants[run_id]
        if state in ("ended", "failed"):
            self._store.flush()
            own = self.directory / run.spec.name
            gone = own / f".gone-{time.time_ns()}"  # a run that begins with this name now must not find them
            gone.mkdir(parents=True, exist_ok=True)
            for part in ("journal", "state"):
                with suppress(FileNotFoundError):
                    (own / part).rename(gone / part)
            self._store.after(lambda: shutil.rmtree(gone, ignore_errors=True))
