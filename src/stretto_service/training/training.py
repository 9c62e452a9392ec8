"""Gives the trainer the work of all runs in turns, and saves each run's state so that it can be created again.

One task (`work`) takes a turn from the queue, sends it to the ranks as operations, and sets the results of the futures.
HTTP handlers call all other methods, which only change queues. If the wire to the ranks fails, because a rank has died
or the hub was restarted, every run is created again from its saved state, and the requests since are computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import EngineError, StrettoError, WireError
from stretto.base.secret import Secret
from stretto.transports.engine.api import Refusal
from stretto_service.access import check_bytes
from stretto_service.config import ServeConfig
from stretto_service.futures import Future, Futures, Result, without_paths
from stretto_service.store import Audit, Run, Store
from stretto_service.training.checkpoints import Checkpoints
from stretto_service.training.jobs import WRITES, Job, Limits, assign, operation, passes_of, read_job
from stretto_service.training.place import Tenant, check_place, creation_answer
from stretto_service.training.places import Places
from stretto_service.training.ranks import connected_ranks
from stretto_service.training.scheduler import Share, TrainQueue
from stretto_service.training.suspects import KILLS, Suspects
from stretto_service.usage import Meter
from stretto_service.wires.operations import CreateTenant, Done, DropGradients, RemoveTenant, TenantResult
from stretto_service.wires.tenants import TenantServer

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_PAUSE_S = 0.5  # between two tries to reach the ranks
FROZEN = 423
SAVE_REQUESTS = 256
"""A run that makes no steps is saved after so many requests, which the journal then deletes."""
STEP_BODIES = 4
"""The passes of a step, which are kept until the step, have at most so many times service.max_waiting_bytes."""


@contextlib.contextmanager
def _refusing(places: Places, tenant: Tenant, seq: int) -> Iterator[None]:
    """Use up the number of a request that is not valid. Raises: Refusal instead of every other error of ours."""
    try:
        yield
    except StrettoError as error:
        if places.tenants.get(tenant.run.id) is tenant:
            places.push_all(tenant.accept(seq, None))
        raise error if isinstance(error, Refusal) else Refusal(str(error), 400) from error


class Training:
    """The training half of the hub."""

    def __init__(
        self, cfg: ServeConfig, secret: Secret, store: Store, futures: Futures, audit: Audit, limits: Limits
    ) -> None:
        self._cfg, self._secret = cfg, secret
        self._store, self._futures, self._audit = store, futures, audit
        self.limits = limits
        self.directory = cfg.run_dir.path / "service" / "runs"
        self.checkpoints = Checkpoints(
            store,
            audit,
            self.directory,
            kept_versions=cfg.service.kept_versions,
            max_user_bytes=cfg.service.max_checkpoint_bytes,
        )
        self.meter = Meter(store)
        self.queue = TrainQueue(quantum=cfg.seq_len, max_tokens=cfg.service.max_tokens_per_turn)
        self.is_ready = False
        self.num_turns = self.num_tokens = self.num_recoveries = 0
        self._suspects = Suspects()
        self._server: TenantServer | None = None
        self._removals: set[asyncio.Task[None]] = set()
        self._reading: dict[str, asyncio.Task[Future]] = {}
        """Requests that are being read, by the names of their futures."""
        self.places = Places(self.directory, self.queue, store, futures, limits)

    # -- what handlers call --

    def create(self, run: Run) -> Future:
        """Give a new or evicted run a place in the trainer. Raises: Refusal 403 if there is none."""
        self.check_place(run.owner)
        self.places.admit(run)
        run.state, run.reason = "creating", ""
        self._store.put(run)
        return self._futures.open(f"{run.id}/0", run.owner, run=run.id)

    def created(self, run: Run) -> Future:
        """The future of a run's creation; a new one if its result was deleted or lost by a restart."""
        future = self._futures.open(f"{run.id}/0", run.owner, run=run.id)
        if future.result is None and run.state != "creating":
            failed = Result.failed(f"{run.id}: {run.reason}")
            future.set(failed if run.state == "failed" else Result.of(creation_answer(run)))
        return future

    def check_place(self, owner: str) -> None:
        """Raises: Refusal 403 if there is no place for one more run of this user."""
        check_place(self._cfg.service, [tenant.run.owner for tenant in self.places.tenants.values()], owner)

    async def receive(self, run: Run, kind: str, seq: int, body: bytes) -> Future:
        """Accept a request; returns its future, the same one if it is sent again.

        The body is read, and written to the journal, in a thread, so that no other user waits for it.

        Raises: Refusal 400 if it is not valid or its number was used, 423 if the run is frozen, 429 if too many wait.
        """
        _, known = self._check(run, seq, len(body))
        if known is not None:
            return known
        name = f"{run.id}/{seq}"
        if (reading := self._reading.get(name)) is None:
            reading = self._reading[name] = asyncio.ensure_future(self._receive(run, kind, seq, body))

            def done(task: asyncio.Task[Future]) -> None:
                self._reading.pop(name, None)
                task.cancelled() or task.exception()  # known, even if the client has gone

            reading.add_done_callback(done)
        return await asyncio.shield(reading)

    async def _receive(self, run: Run, kind: str, seq: int, body: bytes) -> Future:
        first = self.places.tenants[run.id]

        def prepare() -> tuple[Job, Path]:
            job = read_job(run, kind, body, self.limits, seq=seq)
            return job, first.journal.prepare(seq, kind, body)

        try:
            with _refusing(self.places, first, seq):
                job, part = await asyncio.to_thread(prepare)
        except FileNotFoundError:  # the run has ended, and its files are deleted
            self._check(run, seq, len(body))
            raise
        try:
            tenant, known = self._check(run, seq, len(body))  # again: much may have happened meanwhile
            if known is not None:
                return known
            with _refusing(self.places, tenant, seq):
                self._check_job(tenant, job)
            tenant.journal.put(part, seq, kind)
        finally:
            part.unlink(missing_ok=True)
        future = self._accept(tenant, job, len(body))
        await asyncio.to_thread(tenant.journal.settle)
        return future

    def _check(self, run: Run, seq: int, num_bytes: int) -> tuple[Tenant, Future | None]:
        """The place of the run and, if this request was sent before, its future. Raises: as `submit`."""
        tenant = self._tenant(run)
        run.last_request_at = time.time()
        if seq < 1:
            raise Refusal(f"seq_id = {seq}: requests of a run are numbered from 1")
        if (known := self._futures.find(f"{run.id}/{seq}")) is not None:
            return tenant, known
        if seq < tenant.next_seq or seq in tenant.early:
            raise Refusal(f"seq_id = {seq}: this request was made before; the next is {tenant.next_seq}")
        waiting = self.queue.waiting(run.id)
        if waiting + seq - tenant.next_seq >= self._cfg.service.max_waiting_requests:
            raise Refusal(
                f"{run.id} has {waiting} requests waiting, and the next is {tenant.next_seq}; send this later", 429
            )
        if waiting or seq > tenant.next_seq:  # there is always room for the next
            waiting_bytes = self.places.waiting_bytes(run.owner, with_early=True)
            check_bytes(waiting_bytes, num_bytes, self._cfg.service.max_waiting_bytes)
        if run.state == "frozen":
            self.places.push_all(tenant.accept(seq, None))
            raise Refusal(f"{run.id} is frozen: {run.reason}; resume it, or end it", FROZEN)
        return tenant, None

    def _check_job(self, tenant: Tenant, job: Job) -> None:
        """Raises: Refusal for a checkpoint's name or path that is not allowed, or too many passes without a step."""
        self.checkpoints.check(job)
        tenant.check_gradients(job, STEP_BODIES * self._cfg.service.max_waiting_bytes)

    def _accept(self, tenant: Tenant, job: Job, num_bytes: int) -> Future:
        """Put a request that is in the journal into the queue."""
        assert job.seq is not None, "a request has a number"
        name = f"{job.run.id}/{job.seq}"
        future = job.future = self._futures.open(name, job.run.owner, run=job.run.id)
        job.num_bytes = num_bytes
        self.places.push_all(tenant.accept(job.seq, job))
        return future

    def end(self, run: Run) -> Future:
        """End a run; its checkpoints stay."""
        future = self._futures.open(f"{run.id}/end", run.owner)
        if run.id in self.places.tenants:
            self._drop(run, "ended", "it was ended")
            self._spawn_removal(run)
        else:
            run.state = "ended"
            self._store.put(run)
        future.set(Result.of({"model_id": run.id, "type": "unload_model"}))
        return future

    def freeze(
        self, run: Run, reason: str, *, by_admin: bool = False, by_file: bool = False, since: int | None = None
    ) -> None:
        """Accept no more requests of this run; those without a result, from number `since` on, fail.

        Only the admin resumes a run that the admin has frozen; by_file: its evicted.txt has. Requests that are computed
        again after a restart continue, because the run's client has their results. Raises: Refusal 400 if the run has
        ended.
        """
        if run.state in ("ended", "failed"):
            raise Refusal(f"{run.id} has {run.state}: there is nothing to freeze")
        if run.state in ("frozen", "evicted") and not (by_admin or by_file):
            return
        run.is_held |= by_admin or by_file
        run.is_held_by_file = by_file
        run.reason = without_paths(reason)
        if run.state != "evicted":  # else it stays away
            run.state = "frozen"
        self._store.put(run)
        self._audit.write(None, "freeze", run.id, reason=reason)
        logger.warning("%s is frozen: %s", run.id, reason)
        if (tenant := self.places.tenants.get(run.id)) is not None:
            self.places.refuse_waiting(tenant, since or 0)

    def resume(self, run: Run, *, by_admin: bool = False) -> None:
        """Let a frozen run continue. Raises: Refusal 403 if only the admin may do that, 400 if it is not frozen."""
        if run.is_held and not by_admin:
            raise Refusal(f"{run.id} is frozen: {run.reason}; only the admin resumes it", 403)
        if run.state != "frozen" and not run.is_held:
            raise Refusal(f"{run.id} is {run.state}, not frozen", 400)
        run.is_held, run.is_held_by_file, run.reason = False, False, ""
        if run.state == "frozen":
            tenant = self._tenant(run)
            run.state, tenant.failures = "active", 0
            self.places.push(Job(run, "drop", None))
        self._store.put(run)

    def evict(self, run: Run, reason: str) -> None:
        """Save a run and free its place; it comes back with its next request."""
        if run.id not in self.places.tenants:
            raise Refusal(f"{run.id} is {run.state}: it has no place to give back", 400)
        jobs = [request.payload for request in self.queue.requests(run.id)]
        if any(job.kind == "save_state" and job.on_done is not None for job in jobs):
            return  # it is being evicted
        on_done = lambda result: self._evicted(run, reason, result)
        self.places.push(Job(run, "save_state", None, on_done=on_done))

    def save_all(self) -> asyncio.Future[list[Any]]:
        """Save every active run with unsaved steps; the future is done when all are saved."""
        waits = []
        for tenant in self.places.tenants.values():
            if tenant.unsaved_steps and tenant.run.state == "active":
                done = asyncio.get_running_loop().create_future()
                self.places.push(Job(tenant.run, "save_state", None, on_done=done.set_result))
                waits.append(done)
        return asyncio.gather(*waits)

    # -- the task --

    async def work(self) -> None:
        """Give work to the trainer for ever, through any number of its restarts."""
        ticker = asyncio.create_task(self._tick())
        try:
            while True:
                try:
                    async with connected_ranks(self._cfg, self._secret) as self._server:
                        self.is_ready = True
                        await self._serve()
                except (EngineError, WireError) as error:
                    self.is_ready = False
                    logger.warning("the trainer is gone (%s); runs continue from their saved states", error)
                    self._audit.write(None, "trainer lost", reason=str(error))
                    self.num_recoveries += 1
                    for job in self._suspects.died():
                        self._give_up(job, str(error))
                    self.places.rebuild()
                    await asyncio.sleep(_PAUSE_S)
                finally:
                    self.is_ready, self._server = False, None
        finally:
            ticker.cancel()

    async def _serve(self) -> None:
        while True:
            self.places.changed.clear()
            now = time.monotonic()
            if shares := self.queue.next(now):
                for group in self._suspects.groups(shares):
                    self._suspects.begin(group)
                    await self._turn(group)
                    self._suspects.end()
                continue
            wake = self.queue.next_at(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S if wake is None else max(0.0, wake - now)):
                    await self.places.changed.wait()
            assert self._server is not None
            self._server.check()

    async def _turn(self, shares: Sequence[Share]) -> None:
        """Send the operations of a turn to the ranks, and hand out their results."""
        assert self._server is not None
        server = self._server
        passes = [share for share in shares if share.request.is_pass]
        sent: list[tuple[Sequence[Share], list[dict[str, list[int]]], asyncio.Future[list[Done]]]] = []
        if passes:
            units = assign(passes, self._cfg.trainer.num_ranks, self._cfg.model.cp)
            max_tokens = self._cfg.service.max_tokens_per_pass or self._cfg.seq_len
            sent.append((passes, units, await server.submit(passes_of(passes, units, max_tokens))))
        for share in shares:
            if not share.request.is_pass:
                if (op := self._operation(share.request.payload)) is not None:
                    sent.append(([share], [], await server.submit(op)))
                else:
                    self._complete(share, None)
        for group, units, future in sent:
            answers = await future
            for share in group:
                self._add_results(share, units, answers)
        self.num_turns += 1
        for share in passes:
            run, num_tokens = share.request.payload.run, sum(share.request.units[share.start : share.stop])
            self.num_tokens += num_tokens
            self.meter.add(run.owner, run.session, training=num_tokens)

    def _operation(self, job: Job) -> Any:
        """The operation of a job without data; None if the job has failed already."""
        run = job.run
        match job.kind:
            case "create":
                path = run.saved or run.start
                is_loaded = run.saved is not None or run.start_optimizer
                return CreateTenant(number=0, spec=run.spec, path=path, with_optimizer=is_loaded)
            case "drop":
                return DropGradients(number=0, tenant=run.spec.name)
            case "remove":
                return RemoveTenant(number=0, tenant=run.spec.name)
        tenant = self.places.tenants.get(run.id)
        if job.kind in ("optim_step", "step") and tenant is not None and tenant.spoiled is not None:
            job.error = f"a pass since the last step failed, and the gradients are dropped: {tenant.spoiled}"
            return None
        try:
            job.directory = self.checkpoints.directory_of(job)
            return operation(job, None if job.directory is None else str(job.directory))
        except StrettoError as error:
            job.error = str(error)
        except Exception as error:  # the boundary of one request: it must not end the whole service
            logger.exception("%s: %s %s", run.id, job.kind, job.seq)
            job.error = f"{type(error).__name__}: {error}"
        return None

    def _add_results(self, share: Share, units: list[dict[str, list[int]]], answers: list[Done]) -> None:
        """Add the results of all ranks for a share to its request."""
        job: Job = share.request.payload
        results = [answer.results.get(job.run.spec.name, TenantResult()) for answer in answers]
        if share.request.is_pass:
            for rank, result in enumerate(results):
                job.add(result, units[rank][job.run.id], is_first=rank == 0)
        else:
            job.error = next((result.error for result in results if result.error), job.error)
        self._complete(share, results[0])

    def _complete(self, share: Share, result: TenantResult | None) -> None:
        """Mark a share as done, and answer its request if that was the last one."""
        job: Job = share.request.payload
        tenant = self.places.tenants.get(job.run.id)
        # While this was computed, the run may have been ended and another one made with its id.
        if not self.queue.finish(share) or tenant is None or tenant.run is not job.run:
            return
        self._suspects.clear(job)
        result = result or TenantResult(error=job.error)
        tenant.update(job)
        if job.on_done is not None:
            job.on_done(result)
        if job.error is not None:
            self._failed(tenant, job)
        else:
            self._done(tenant, job, result)
        tenant.unsaved_requests += job.seq is not None
        if tenant.unsaved_requests >= SAVE_REQUESTS and not tenant.has_gradients:
            self._save_soon(tenant)

    def _save_soon(self, tenant: Tenant) -> None:
        """Save a run before its next request."""
        tenant.unsaved_requests = 0
        self.places.push(Job(tenant.run, "save_state", None), is_first=True)

    def _failed(self, tenant: Tenant, job: Job) -> None:
        run = job.run
        self.places.answer(job, Result.failed(job.error or ""))
        logger.info("%s: %s %s failed: %s", run.id, job.kind, job.seq, job.error)
        if job.kind == "create":
            self._drop(run, "failed", job.error or "")
            return
        if job.adds_gradients:
            tenant.spoiled = job.error
        if job.kind in ("optim_step", "step") or job.adds_gradients:
            self.places.push(Job(run, "drop", None), is_first=True)
        if job.kind in ("optim_step", "step", "pass", "batch"):
            tenant.failures += 1
            if tenant.failures >= self._cfg.service.max_failures:
                self.freeze(run, f"{tenant.failures} requests failed in a row, the last with: {job.error}")

    def _done(self, tenant: Tenant, job: Job, result: TenantResult) -> None:
        run = job.run
        match job.kind:
            case "create":
                if run.state == "creating":
                    run.state = "active"
                run.step = int(result.metrics.get("step", run.step))
                self._store.put(run)
                answer = creation_answer(run)
                if run.start is not None and run.saved is None:
                    self._save_soon(tenant)  # the owner of the checkpoint with which it began may delete that
            case "pass":
                self.places.answer(job, Result(job.outputs(), is_protobuf=True))
                return
            case "batch":
                answer = {"metrics": job.sums}
            case "optim_step" | "step":
                tenant.failures = 0
                tenant.unsaved_steps += 1
                run.step = int(result.metrics.get("step", run.step + 1))
                if tenant.unsaved_steps >= self._cfg.service.save_steps:
                    self._save_soon(tenant)
                suffix = ":mean" if job.kind == "optim_step" else ""
                answer = {"metrics": {f"{name}{suffix}": value for name, value in result.metrics.items()}}
            case "save_state":
                self._saved(tenant, job)
                return
            case kind if kind in WRITES:
                try:
                    answer = self.checkpoints.record(job)
                except OSError as error:  # its files were deleted meanwhile
                    self.places.answer(job, Result.failed(f"{job.kind}: {error.strerror or error}"))
                    return
                self.meter.add(run.owner, run.session, checkpoints=1)
            case "load":
                run.step = int(result.metrics.get("step", 0))
                self._save_soon(tenant)  # so that it is not loaded again: the checkpoint may be replaced
                answer = {"step": run.step, "progress": result.progress}
            case "load_weights":
                self._save_soon(tenant)
                answer = {"path": job.body.path, "model_id": run.id, "type": "load_weights"}
            case _:
                answer = {}
        self.places.answer(job, Result.of(answer))

    # -- places --

    def _tenant(self, run: Run) -> Tenant:
        """The place of a run; an evicted one gets a place again. Raises: Refusal if it has ended or there is none."""
        if (tenant := self.places.tenants.get(run.id)) is not None:
            return tenant
        if run.state == "evicted" and run.is_held:
            raise Refusal(f"{run.id} is frozen: {run.reason}; only the admin resumes it", FROZEN)
        if run.state == "evicted":
            self.create(run)
            return self.places.tenants[run.id]
        raise Refusal(f"{run.id} has {run.state}{f': {run.reason}' if run.reason else ''}", 410)

    def _give_up(self, job: Job, error: str) -> None:
        """Freeze the run of a request that makes the trainer die; this request and later ones of the run fail."""
        tenant, run = self.places.tenants.get(job.run.id), job.run
        if tenant is None or tenant.run is not run:
            return
        what = job.kind if job.seq is None else f"request {job.seq} ({job.kind})"
        reason = f"{what} ended the trainer {KILLS} times, the last time alone: {error}"
        logger.error("%s is given up: %s", run.id, reason)
        if job.kind == "create":
            run.is_held = run.saved is not None
            run.reason = without_paths(reason)
            self.places.answer(job, Result.failed(f"{run.id}: {reason}"))
            self._drop(run, "evicted" if run.is_held else "failed", reason)
            return
        if job.on_done is not None:
            job.on_done(TenantResult(error=reason))
            job.on_done = None
        if job.seq is not None:
            tenant.journal.refuse(job.seq)
            self.places.answer(job, Result.failed(reason))
        self.freeze(run, reason, since=job.seq)

    def _drop(self, run: Run, state: Any, reason: str) -> None:
        self.places.drop(run.id, state, reason)
        self._suspects.forget(run.id)

    def _spawn_removal(self, run: Run) -> None:
        """Have the ranks remove a run that the queue no longer has."""
        server = self._server

        async def remove() -> None:
            if server is not None:
                with contextlib.suppress(StrettoError):
                    await server.execute(RemoveTenant(number=0, tenant=run.spec.name))

        task = asyncio.get_running_loop().create_task(remove())
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    def _evicted(self, run: Run, reason: str, result: TenantResult) -> None:
        if result.error is not None:
            logger.warning(
                "%s was not saved; its earlier state and the requests since are kept: %s", run.id, result.error
            )

        def drop() -> None:
            tenant = self.places.tenants.get(run.id)
            if tenant is None or self.queue.waiting(run.id) or tenant.early:
                return  # its client is back
            self._drop(run, "evicted", reason)
            self._audit.write(None, "evict", run.id, reason=reason)
            self._spawn_removal(run)

        asyncio.get_running_loop().call_soon(drop)  # after its save is recorded

    def _saved(self, tenant: Tenant, job: Job) -> None:
        """Record that the state of a run is on disk, and delete earlier requests and states."""
        run, newest = tenant.run, job.directory
        assert newest is not None, "a state is saved into a directory"
        run.saved, run.saved_seq = str(newest), tenant.clean_seq
        tenant.unsaved_steps = 0
        self._store.put(run)
        unsent = {
            seq
            for seq in tenant.journal.results()
            if (future := self._futures.find(f"{run.id}/{seq}")) is not None and future.sent_at is None
        }
        older, up_to = [path for path in newest.parent.iterdir() if path != newest], run.saved_seq

        def forget() -> None:
            tenant.journal.forget(up_to, unsent=unsent)
            for path in older:
                shutil.rmtree(path, ignore_errors=True)

        self._store.after(forget)

    async def _tick(self) -> None:
        """Fail requests that wait for too long for one with a lower number."""
        while True:
            await asyncio.sleep(_TICK_S)
            now, section = time.monotonic(), self._cfg.service
            for tenant in list(self.places.tenants.values()):
                if tenant.gap_since is not None and now - tenant.gap_since > section.gap_timeout_s:
                    self.places.close_gap(tenant)
