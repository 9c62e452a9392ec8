"""Checkpoints and samplers of runs: their names, records and files, who may read them, and when they are deleted.

A run writes `RUN/service/runs/<run>/{weights,sampler_weights,external_weights}/<name>`, or `<name>@<time>` while there
are older files of that name. The older files stay until the record of the new ones replaces theirs, and as long as a
sampler uses them. So a checkpoint that is deleted meanwhile deletes only its own files.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stretto.transports.engine.api import Refusal
from stretto_service.store import MAX_RECORD_BYTES, MAX_USER_BYTES, SEGMENTS, Audit, Checkpoint, Run, Sampler, Store
from stretto_service.training.jobs import WRITES, Job

LINK_S = 3600.0
"""Seconds for which a signed address of a file is valid."""
TRACES = "@traces"
"""Directory of exported traces, one directory per user; no run has this name."""
MAX_TRACES = 100
"""Largest number of traces that are kept per user."""
UNNAMED = "@"
"""Begins the directories of weights without a name; no name begins with it."""


class Checkpoints:
    """What runs have saved. directory: of all runs; kept_versions: how many published versions of a run are kept."""

    def __init__(self, store: Store, audit: Audit, directory: Path, *, kept_versions: int, max_user_bytes: int) -> None:
        self.directory, self._max_user_bytes = directory, max_user_bytes
        self._store, self._audit, self._kept_versions = store, audit, kept_versions
        self._replaced = self._leftovers()
        """Directories that belong to no checkpoint any more; each is deleted when no sample needs it."""

    def _leftovers(self) -> set[str]:
        """Directories that an earlier hub has left, or a save that it did not record."""
        found = {str(path) for segment in SEGMENTS.values() for path in self.directory.glob(f"*/{segment}/*")}
        return found - self._recorded() - {each.directory for each in self._store.all(Sampler)}

    def _recorded(self) -> set[str]:
        """Directories of checkpoints."""
        return {each.directory for each in self._store.all(Checkpoint)}

    def path_of(self, run: Run, kind: str, name: str) -> str:
        """The name of a checkpoint for users."""
        return f"tinker://{run.id}/{SEGMENTS[kind]}/{name}"

    def find(self, path: str, owner: str, kind: str | None = None) -> Checkpoint:
        """The checkpoint at a path. Raises: Refusal 404 if there is none that this user may read, 400 for its kind."""
        found = self._store.get(Checkpoint, path)
        if found is not None and found.expires_at is not None and found.expires_at < time.time():
            found = None
        if found is None or not (found.owner == owner or found.is_public):
            raise Refusal(f"{path}: you have no such checkpoint", 404)
        if kind is not None and found.kind != kind:
            raise Refusal(f"{path} is of kind {found.kind}; one of kind {kind} is needed", 400)
        return found

    # -- what jobs write and read --

    def check(self, job: Job) -> None:
        """Raises: Refusal for a name that is taken or not allowed, or a path that the user may not read."""
        if job.kind in WRITES:
            kind, name = _named(job)
            self.check_room(job.run.owner)
            if len(msgspec.json.encode(getattr(job.body, "user_metadata", None))) > MAX_RECORD_BYTES:
                raise Refusal(f"user_metadata: at most {MAX_RECORD_BYTES} bytes are kept; send less", 413)
            if job.kind in ("save", "publish") or job.body.path is not None:
                check_name(name)
            path = self.path_of(job.run, kind, name)
            may_replace = job.kind in ("save", "publish") or job.body.overwrite
            if self._store.get(Checkpoint, path) is not None and not may_replace:
                raise Refusal(f"path: there is {path} already; choose another name, or overwrite = true", 400)
            if getattr(job.body, "kind", "snapshot") != "snapshot":
                raise Refusal(f"kind = {job.body.kind!r}: samplers of this service keep their weights; use snapshot")
        elif job.kind in ("load_weights", "load"):
            self.find(self._loaded_path(job), job.run.owner, "training")

    def check_room(self, owner: str, num_bytes: int = 0) -> None:
        """Raises: Refusal 413 if a user has no room for one more checkpoint, on the disk or among the records."""
        saved = sum(each.size_bytes for each in self._store.all(Checkpoint) if each.owner == owner)
        if saved + num_bytes > self._max_user_bytes:
            raise Refusal(
                f"your checkpoints have {saved} bytes, and you may have {self._max_user_bytes} "
                "(service.max_checkpoint_bytes); delete some, or save them with a time to live",
                413,
            )
        if (kept := self._store.user_bytes(owner)) > MAX_USER_BYTES:
            raise Refusal(
                f"your records have {kept} bytes, and at most {MAX_USER_BYTES} are kept; delete checkpoints", 413
            )

    def _loaded_path(self, job: Job) -> str:
        if job.kind == "load_weights":
            return str(job.body.path)
        return self.path_of(job.run, "training", job.body.name)

    def directory_of(self, job: Job) -> Path | None:
        """Where a job reads or writes; None if it does neither. Raises: Refusal if its checkpoint is gone."""
        if job.kind in ("load_weights", "load"):
            return Path(self.find(self._loaded_path(job), job.run.owner, "training").directory)
        if job.kind in WRITES:
            return self._free_directory(job)
        if job.kind == "save_state":
            return self.directory / job.run.spec.name / "state" / str(time.time_ns())
        return None

    def _free_directory(self, job: Job) -> Path:
        kind, name = _named(job)
        path = self.directory / job.run.spec.name / SEGMENTS[kind] / name
        if not path.exists():
            self._replaced.discard(str(path))
            return path
        # A save that was not recorded, because the trainer died after it.
        if str(path) not in self._recorded():
            self._replaced.add(str(path))
        return path.with_name(f"{name}@{time.time_ns()}")

    def record(self, job: Job) -> dict[str, Any]:
        """Record what a job has written; returns the job's answer."""
        kind, name = _named(job)
        run, path, directory = job.run, self.path_of(job.run, kind, name), job.directory
        assert directory is not None, f"{job.kind} writes"
        ttl, now = getattr(job.body, "ttl_seconds", None), time.time()
        if not name.startswith(UNNAMED):
            before = self._store.get(Checkpoint, path)
            self._store.put(
                Checkpoint(
                    path=path,
                    run=run.id,
                    owner=run.owner,
                    kind=kind,  # type: ignore[arg-type]
                    name=name,
                    directory=str(directory),
                    created_at=now,
                    size_bytes=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
                    expires_at=None if ttl is None else now + ttl,
                    user_metadata=getattr(job.body, "user_metadata", None),
                )
            )
            if before is not None:
                self._replaced.add(before.directory)
            self._audit.write(run.owner, "save", path)
            if job.kind == "publish":
                return self._publish(run, job, path)
            return {"path": path, "type": job.kind}
        sampler = Sampler(
            id=f"{run.session}:sample:{job.body.sampling_session_seq_id}",
            owner=run.owner,
            base_model=run.base_model,
            session=run.session,
            directory=str(directory),
            run=run.id,
            used_at=now,
        )
        self._store.put(sampler)
        return {"sampling_session_id": sampler.id, "type": job.kind}

    def _publish(self, run: Run, job: Job, path: str) -> dict[str, Any]:
        """Let engine requests sample from this version, and delete versions older than the last few."""
        run.published = path
        self._store.put(run)
        own = [each for each in self._store.all(Checkpoint) if each.run == run.id]
        own = [each for each in own if published_version(each) is not None]
        own.sort(key=lambda each: each.created_at)
        for old in own[: -self._kept_versions]:
            if old.path != path:
                self._store.delete(old)
                self._replaced.add(old.directory)
        return {"version": job.body.version, "path": path}

    # -- deletion --

    async def delete(self, found: Checkpoint | Sampler) -> None:
        """Delete weights: the record first, so that no request gets half of the files."""
        self._store.delete(found)
        await self._store.settled()
        directory = found.directory or ""
        if isinstance(found, Sampler) and directory in {each.directory for each in self._store.all(Sampler)}:
            return  # another sampler has it too
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def sweep(self, is_used: Callable[[str], bool], *, since: float, sampler_timeout_s: float | None) -> int:
        """Delete what has expired, samplers with files of their own that were unused for long, and replaced files.

        Returns the number of deleted checkpoints and samplers.

        is_used: whether engines sample from a directory now; since: start of this hub, from which it knows uses.
        """
        now = time.time()
        gone: list[Checkpoint | Sampler] = [
            each
            for each in self._store.all(Checkpoint)
            if each.expires_at is not None and each.expires_at < now and not is_used(each.directory)
        ]
        recorded = self._recorded()
        for sampler in self._store.all(Sampler) if sampler_timeout_s is not None else ():
            is_idle = now - max(sampler.used_at, since) > (sampler_timeout_s or 0.0)
            owns_files = sampler.directory is not None and sampler.directory not in recorded
            if owns_files and is_idle and not is_used(sampler.directory or ""):
                gone.append(sampler)
        for record in gone:
            self._audit.write(None, "delete", record.id, reason="it has expired")
            await self.delete(record)
        await self._sweep_replaced(is_used)
        unneeded = self._store.unneeded(now=now, since=since)
        self._store.delete(*unneeded)
        await self._store.settled()
        for run in unneeded:
            if isinstance(run, Run):
                await asyncio.to_thread(shutil.rmtree, self.directory / run.spec.name, ignore_errors=True)
        return len(gone)

    async def _sweep_replaced(self, is_used: Callable[[str], bool]) -> None:
        sampled = {each.directory for each in self._store.all(Sampler)}
        free = {path for path in self._replaced if not is_used(path)} - sampled - self._recorded()
        self._replaced -= free
        for path in free:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def sweep_traces(self) -> None:
        """Delete exported traces whose links have expired, and all but a user's newest."""
        oldest = time.time() - LINK_S
        for folder in (self.directory / TRACES).glob("*"):
            files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            for i, path in enumerate(files):
                if i >= MAX_TRACES or path.stat().st_mtime < oldest:
                    path.unlink(missing_ok=True)


def published_version(checkpoint: Checkpoint) -> int | None:
    """The number of a version that a run has published for engines; None for other checkpoints."""
    letter, number = checkpoint.name[:1], checkpoint.name[1:]
    return int(number) if checkpoint.kind == "sampler" and letter == "v" and number.isdigit() else None


def check_name(name: str) -> None:
    """Raises: Refusal for a name that cannot be a plain file name."""
    is_plain = name.isascii() and all(c.isalnum() or c in "._-" for c in name)
    if not name or len(name) > 100 or name[0] == "." or not is_plain:
        raise Refusal(
            f"path: {name[:200]!r} must be up to 100 letters of ASCII, digits, '_', '-' and '.', the first not '.'"
        )


def _named(job: Job) -> tuple[str, str]:
    """Kind and name of the checkpoint that a job writes."""
    if job.kind == "publish":
        return "sampler", f"v{job.body.version}"
    if job.kind == "save":
        return "training", job.body.name
    return WRITES[job.kind], job.body.path or f"{UNNAMED}{job.seq}"
