"""What the hub knows, in one SQLite database: sessions, runs, checkpoints, samplers; and the audit log beside it.

A row is one record as JSON under its kind and id. Everything is read at the start and kept in memory; a change is
written before it is answered, so that a hub that is started again knows what its clients were told.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from stretto.records.tenants import TenantSpec

RunState = Literal["creating", "active", "frozen", "evicted", "ended", "failed"]
Kind = Literal["training", "sampler", "external"]
SEGMENTS: dict[str, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
"""Second part of the path of a checkpoint, tinker://<run>/<segment>/<name>, by kind."""
AUDIT_BYTES = 4 << 20
"""How much of the end of the audit log is read: all of it would hold up everybody's requests."""


class Session(msgspec.Struct, kw_only=True):
    """What one client object of a user does."""

    id: str
    owner: str
    created_at: float
    last_seen_at: float
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    display_name: str | None = None
    project: str = ""
    """What its user files it under; it gives nobody any right."""
    finished: str | None = None
    """How the client said it ended: success, errored or interrupted."""


class Run(msgspec.Struct, kw_only=True):
    """A tenant. States: creating -> active <-> frozen; any -> evicted (comes back when asked for) or ended.

    saved: directory of its newest state, with all requests up to saved_seq; None: it was never saved.
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
    """Directory of the state it began with, if not with fresh weights."""
    start_optimizer: bool = False
    saved: str | None = None
    saved_seq: int = 0
    step: int = 0
    last_request_at: float = 0.0
    is_held: bool = False
    """The admin has frozen it: only the admin resumes it."""
    key: str | None = None
    """What its client chose for the request that made it: the same request again gets the same run."""
    directory: str | None = None
    """The directory that has registered it (runs/directory.py); None: a request has."""
    is_prepared: bool = False
    """A directory has registered it, and its orchestrator has not come yet."""
    published: str | None = None
    """Path of the version of its adapter that its engine requests are answered with."""

    @property
    def is_placed(self) -> bool:
        """Whether it takes a place in the trainer."""
        return self.state in ("creating", "active", "frozen")


class Checkpoint(msgspec.Struct, kw_only=True):
    """Saved weights. directory: its files; path: what users call it."""

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
    """Where the adapter is; None: the base model."""
    run: str | None = None
    num_clients: int = 0
    used_at: float = 0.0
    """When it was last asked for a sample, as far as that was written."""


class Usage(msgspec.Struct, kw_only=True):
    """What a user had computed in one hour (since 1970, UTC). counts: by kind, as usage.py names them."""

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
        directory.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(directory / "service.sqlite")
        self._db.execute("pragma journal_mode = wal")
        self._db.execute(
            "create table if not exists records (kind text, id text, doc blob, primary key (kind, id))"
        )
        self._db.commit()
        self._records: dict[type[Any], dict[str, Any]] = {kind: {} for kind in KINDS}
        for kind in KINDS:
            rows = self._db.execute("select id, doc from records where kind = ?", (kind.__name__,))
            self._records[kind] = {name: msgspec.json.decode(doc, type=kind) for name, doc in rows}

    def get(self, kind: type[T], name: str) -> T | None:
        return self._records[kind].get(name)

    def all(self, kind: type[T]) -> Iterator[T]:
        """All records of a kind, in the order of their creation."""
        return iter(list(self._records[kind].values()))

    def put(self, record: Record) -> None:
        """Write a record, new or changed."""
        kind, name = type(record), record.id
        self._db.execute(
            "insert into records values (?, ?, ?) on conflict do update set doc = excluded.doc",
            (kind.__name__, name, msgspec.json.encode(record)),
        )
        self._db.commit()
        self._records[kind][name] = record

    def delete(self, record: Record) -> None:
        self._db.execute("delete from records where kind = ? and id = ?", (type(record).__name__, record.id))
        self._db.commit()
        self._records[type(record)].pop(record.id, None)

    def close(self) -> None:
        self._db.close()


class Audit:
    """Who did what, a JSON object per line: time, user, action, what it was done to, and the HTTP status."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, user: str | None, action: str, target: str = "", **details: Any) -> None:
        entry = {"time": round(time.time(), 3), "user": user, "action": action, "target": target}
        self._file.write(json.dumps(entry | details, default=str) + "\n")

    def read(self, user: str | None = None, *, most: int = 1000) -> list[dict[str, Any]]:
        """The newest entries, of one user or of all, oldest first; none that lies before the last `AUDIT_BYTES`."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - AUDIT_BYTES))
            lines = file.read().splitlines()
        found: list[dict[str, Any]] = []
        for line in reversed(lines):
            if len(found) == most:
                break
            if not (line.startswith(b"{") and line.endswith(b"}")):  # a part of one
                continue
            entry = json.loads(line)
            if user is None or entry.get("user") == user:
                found.append(entry)
        return found[::-1]

    def close(self) -> None:
        self._file.close()
