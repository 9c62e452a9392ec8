"""The hub's records in one SQLite database: sessions, runs, checkpoints, samplers, usage; and the audit log beside it.

A row is one record as JSON under its kind and id. All rows are read at the start and kept in memory. A change is
written before it is answered, so that a restarted hub knows everything that its clients know. A thread of its own
writes (`Store.settled` waits for it), because a commit waits for the disk, and other users are served meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from stretto.base.errors import ConfigError
from stretto_service.wires.operations import TenantSpec

logger = logging.getLogger(__name__)

RunState = Literal["creating", "active", "frozen", "evicted", "ended", "failed"]
Kind = Literal["training", "sampler", "external"]
SEGMENTS: dict[str, str] = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""By kind, the second part of a checkpoint's path, tinker://<run>/<segment>/<name>."""
KEEP_S = 30 * 86400.0
"""Sessions, and samplers and ended runs without files, are deleted when they were unused for so long."""
KEEP_USAGE_S = 400 * 86400.0
MAX_RECORD_BYTES = 16 << 10
"""Largest size of one record as JSON: what a client may say about a session, a run or a checkpoint."""
MAX_USER_BYTES = 64 << 20
"""Largest size of all records of one user: they are kept in memory, and are all read at the start."""
MAX_RECORDS = 10_000
"""Largest number of a user's unused records of one kind; the newest stay."""
AUDIT_BYTES = 4 << 20
"""How much of the end of the audit log is read; reading all of it would delay the requests of all users."""


class Session(msgspec.Struct, kw_only=True):
    """One client object of a user: its runs and samplers belong to it."""

    id: str
    owner: str
    created_at: float
    last_seen_at: float
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    display_name: str | None = None
    project: str = ""
    """A label of its user; it gives no rights."""
    finished: str | None = None
    """How it ended, as its client reported: success, errored or interrupted; None: it has not ended."""


class Run(msgspec.Struct, kw_only=True):
    """A tenant. States: creating -> active <-> frozen; any -> evicted (comes back with its next request) or ended.

    saved: directory of its newest state, which includes all requests up to saved_seq; None: it was never saved.
    """

    id: str
    owner: str
    spec: TenantSpec
    base_model: str
    created_at: float
    session: str | None = None
    state: RunState = "creating"
    reason: str = ""
    weight: float = 1.0
    priority: int = 0
    tokens_per_minute: float | None = None
    user_metadata: dict[str, Any] = {}
    start: str | None = None
    """Directory of the state with which it began; None: fresh weights."""
    start_optimizer: bool = False
    saved: str | None = None
    saved_seq: int = 0
    step: int = 0
    last_request_at: float = 0.0
    is_held: bool = False
    """The admin has frozen it; only the admin resumes it."""
    is_held_by_file: bool = False
    """Its evicted.txt holds it (runs/directory.py): it continues when the file is deleted."""
    key: str | None = None
    """Chosen by its client for the request that made it: a repeated request with this key gets this run."""
    directory: str | None = None
    """The directory that registered it (runs/directory.py); None: a request did."""
    is_prepared: bool = False
    """A directory registered it, and its orchestrator has not made a request yet."""
    published: str | None = None
    """Path of the version of its adapter from which its engine requests are sampled."""

    @property
    def is_placed(self) -> bool:
        """Whether it occupies a place in the trainer."""
        return self.state in ("creating", "active", "frozen")


class Checkpoint(msgspec.Struct, kw_only=True):
    """Saved weights. directory: of its files; path: its name for users."""

    path: str
    run: str
    owner: str
    kind: Kind
    name: str
    directory: str
    created_at: float
    size_bytes: int = 0
    is_public: bool = False
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def id(self) -> str:
        return self.path


class Sampler(msgspec.Struct, kw_only=True):
    """A sampling session: the base model, or one version of an adapter, which never changes."""

    id: str
    owner: str
    base_model: str
    session: str | None = None
    model_path: str | None = None
    directory: str | None = None
    """Directory of the adapter; None: the base model."""
    run: str | None = None
    num_clients: int = 0
    used_at: float = 0.0
    """Time of its last sample as far as it was written, seconds since 1970."""


class Usage(msgspec.Struct, kw_only=True):
    """Usage of a user in one hour, counted since 1970 in UTC. counts: by the kinds of usage.py."""

    id: str
    owner: str
    session: str | None
    hour: int
    counts: dict[str, int] = {}


Record = Session | Run | Checkpoint | Sampler | Usage
KINDS: tuple[type[Record], ...] = (Session, Run, Checkpoint, Sampler, Usage)
T = TypeVar("T", Session, Run, Checkpoint, Sampler, Usage)


class Store:
    """Records by kind and id."""

    def __init__(self, directory: Path) -> None:
        """Raises: ConfigError if the database is damaged, or is new although there are files of runs."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "service.sqlite"
        self._db = sqlite3.connect(self._path, check_same_thread=False)
        self._writer = ThreadPoolExecutor(1, "store")
        self._lock = threading.Lock()
        self._changes: list[tuple[str, tuple[Any, ...]]] = []
        self._last: Future[None] | None = None
        self._sizes: dict[tuple[type[Any], str], tuple[str, int]] = {}
        """Owner and bytes of each record."""
        self._user_bytes: Counter[str] = Counter()
        self._records: dict[type[Any], dict[str, Any]] = {kind: {} for kind in KINDS}
        try:
            self._read()
        except (sqlite3.Error, ValueError) as error:
            self._db.close()
            raise ConfigError(
                f"{self._path} cannot be read ({error}): it has the records of all runs; restore it from "
                f"a copy, or move {directory} away and begin anew"
            ) from error
        found = sum(path.is_dir() for path in (directory / "runs").glob("*/*weights"))
        if found and not self._records[Run]:  # files without a record would be deleted
            self._db.close()
            raise ConfigError(
                f"{self._path} knows no run, but {directory / 'runs'} has weights of {found}: it was lost; "
                "restore it from a copy, or move the directory of weights away"
            )

    def _read(self) -> None:
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("create table if not exists records (kind text, id text, doc blob, primary key (kind, id))")
        self._db.commit()
        for kind in KINDS:
            rows = self._db.execute("select id, doc from records where kind = ?", (kind.__name__,))
            for name, doc in rows:
                record = self._records[kind][name] = msgspec.json.decode(doc, type=kind)
                self._count(record, len(doc))

    def get(self, kind: type[T], name: str) -> T | None:
        return self._records[kind].get(name)

    def all(self, kind: type[T]) -> Iterator[T]:
        """All records of a kind, in the order of their creation."""
        return iter(list(self._records[kind].values()))

    def put(self, record: Record) -> None:
        """Have a record written, new or changed."""
        kind, name, doc = type(record), record.id, msgspec.json.encode(record)
        self._count(record, len(doc))
        self._records[kind][name] = record
        sql = "insert into records values (?, ?, ?) on conflict do update set doc = excluded.doc"
        self._change((sql, (kind.__name__, name, doc)))

    def delete(self, *records: Record) -> None:
        for record in records:
            self._count(record, 0)
            self._records[type(record)].pop(record.id, None)
        sql = "delete from records where kind = ? and id = ?"
        self._change(*((sql, (type(record).__name__, record.id)) for record in records))

    def _count(self, record: Record, num_bytes: int) -> None:
        owner, before = self._sizes.pop((type(record), record.id), (record.owner, 0))
        self._user_bytes[owner] -= before
        if num_bytes:
            self._sizes[type(record), record.id] = (record.owner, num_bytes)
            self._user_bytes[record.owner] += num_bytes

    def user_bytes(self, owner: str) -> int:
        """Size of all records of a user as JSON."""
        return self._user_bytes[owner]

    # -- the thread that writes --

    def _change(self, *changes: tuple[str, tuple[Any, ...]]) -> None:
        with self._lock:
            self._changes += changes
        self._last = self._writer.submit(self._commit)

    def _commit(self) -> None:
        """Write all changes so far; those that cannot be written are tried again with the next ones."""
        with self._lock:
            changes, self._changes = self._changes, []
        try:
            with self._db:
                for sql, values in changes:
                    self._db.execute(sql, values)
        except BaseException:
            with self._lock:
                self._changes[:0] = changes
            raise

    def after(self, act: Callable[[], object]) -> None:
        """Call this in the writer's thread once all changes so far are on the disk; not if they cannot be written."""

        def both() -> None:
            self._commit()
            try:
                act()
            except OSError as error:
                logger.warning("files that are no longer needed could not be deleted: %s", error)

        self._last = self._writer.submit(both)

    async def settled(self) -> None:
        """Wait until all changes so far are on the disk. Raises: sqlite3.Error if they cannot be written."""
        if self._last is None or (self._last.done() and self._last.exception() is None):
            return
        if self._last.done():  # the disk may have room again
            self._last = self._writer.submit(self._commit)
        await asyncio.shield(asyncio.wrap_future(self._last))

    def flush(self) -> None:
        """`settled` for callers that may block."""
        if self._last is not None:
            self._last.result()

    def unneeded(self, *, now: float, since: float) -> list[Record]:
        """Records that can be deleted: too old, or too many of one user's kind. since: time from which uses are known.

        Runs stay if they continue or may come back, or have checkpoints, samplers or a directory that registered them;
        so do the sessions of these runs.
        """
        samplers = list(self.all(Sampler))
        checkpoints = {each.directory: each.run for each in self.all(Checkpoint)}
        needed: set[str | None] = set(checkpoints.values())
        needed |= {each.run for each in samplers if each.directory is not None}
        is_over = lambda run: run.state in ("ended", "failed") and run.id not in needed and run.directory is None
        runs = list(self.all(Run))
        sessions = {run.session for run in runs if not is_over(run)}
        idle: list[tuple[float, float, Record]] = []
        """Time of the last use, seconds for which the record is kept after that, and the record."""
        idle += [
            (max(run.last_request_at, run.created_at), KEEP_S, run) for run in runs if is_over(run) and not run.is_held
        ]
        idle += [
            (max(each.used_at, since), KEEP_S, each)
            for each in samplers
            if each.directory is None or each.directory in checkpoints
        ]
        idle += [(max(each.last_seen_at, since), KEEP_S, each) for each in self.all(Session) if each.id not in sessions]
        idle += [(each.hour * 3600.0, KEEP_USAGE_S, each) for each in self.all(Usage)]
        counts: Counter[tuple[type[Any], str]] = Counter()
        found = []
        for last, keep_s, record in sorted(idle, key=lambda each: each[0], reverse=True):
            counts[type(record), record.owner] += 1
            is_usage = isinstance(record, Usage)
            if now - last > keep_s or (counts[type(record), record.owner] > MAX_RECORDS and not is_usage):
                found.append(record)
        return found

    def close(self) -> None:
        self._writer.submit(self._commit).result()
        self._writer.shutdown()
        self._db.close()


MOST_STRANGERS = 1000
"""Addresses per minute whose refused requests are written."""


class Audit:
    """The audit log, one JSON object per line: time, user, action, target and HTTP status.

    Once the file has half of max_bytes, it is renamed to `audit.1.jsonl` and replaces the earlier file of that name.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._max_bytes = path, max_bytes
        self._older = path.with_suffix(f".1{path.suffix}")
        self._of_strangers: Audit | None = None
        self._strangers: dict[str, tuple[int | None, int]] = {}  # address -> minute of its last request, left out
        self._minute = 0
        self._open()

    def _open(self) -> None:
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._size = self.path.stat().st_size

    def write(self, user: str | None, action: str, target: str = "", **details: Any) -> None:
        entry = {"time": round(time.time(), 3), "user": user, "action": action, "target": target}
        line = json.dumps(entry | details, default=str) + "\n"  # ASCII
        self._file.write(line)
        self._size += len(line)
        if self._size > self._max_bytes // 2:
            self._file.close()
            self.path.replace(self._older)
            self._open()

    def write_stranger(self, action: str, address: str, **details: Any) -> None:
        """Record a refused request of nobody we know: the first of each address and minute, in a file of its own.

        A later entry of the address has the number of requests that were left out before it, as `left_out`.
        """
        minute = int(time.time() // 60)
        if minute != self._minute and len(self._strangers) > MOST_STRANGERS:
            self._strangers.clear()
        self._minute = minute
        last, left_out = self._strangers.get(address, (None, 0))
        if last is None and len(self._strangers) > MOST_STRANGERS:
            return
        if last == minute:
            self._strangers[address] = (minute, left_out + 1)
            return
        self._strangers[address] = (minute, 0)
        more = {"left_out": left_out} if left_out else {}
        if self._of_strangers is None:
            path = self.path.with_name(f"{self.path.stem}.strangers{self.path.suffix}")
            self._of_strangers = Audit(path, max_bytes=self._max_bytes // 8)
        self._of_strangers.write(None, action, address, **details, **more)

    def read(self, user: str | None = None, *, most: int = 1000) -> list[dict[str, Any]]:
        """The newest entries of one user or of all, oldest first, within the last `AUDIT_BYTES`."""
        end = _end(self.path, AUDIT_BYTES)
        if len(end) < AUDIT_BYTES and self._older.exists():
            end = _end(self._older, AUDIT_BYTES - len(end)) + end
        lines = end.splitlines()
        found: list[dict[str, Any]] = []
        for line in reversed(lines):
            if len(found) == most:
                break
            if not (line.startswith(b"{") and line.endswith(b"}")):  # a part of an entry
                continue
            entry = json.loads(line)
            if user is None or entry.get("user") == user:
                found.append(entry)
        entries = found[::-1]
        if user is None and self._of_strangers is not None:
            entries = sorted([*entries, *self._of_strangers.read(most=most)], key=lambda each: each["time"])[-most:]
        return entries

    def close(self) -> None:
        self._file.close()
        if self._of_strangers is not None:
            self._of_strangers.close()


def _end(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        return file.read()
