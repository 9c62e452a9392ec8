"""The tables of a run's ledger, and how its file is opened.

One writer (the orchestrator) and any number of readers: SQLite in WAL mode. Rows are never deleted; what a resume
undoes stays as a row in state `undone` or `lost`. All other rows are the surviving lineage.

States of a draw (a task and its group):

    drawn -> finished -> shipped -> trained
    drawn | finished -> dropped              stale, no signal, or cancelled
    drawn -> failed                          no member succeeded

A rewind moves shipped, dropped and failed draws of undone steps back to finished or drawn.

Status of a rollout row: running -> finished | truncated | failed | dropped (cancelled) | lost (its process died, or its
weights were undone). `reason` says why it ended (records/outcomes.py); NULL: by itself. A finished or truncated one
with `dropped_by` was dropped by that filter. `turns` has a JSON object per turn if the environment scored turns: agent,
reward, value, state, and the advantage that the turn has beside its rollout's. A rollout that is run again gets a new
row; the newest row that is not lost counts.

States of a batch: shipped -> trained, undone. States of a version: published -> loaded, undone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from stretto.base.errors import DataError, EngineError, StrettoError, meant_path
from stretto.ledger import stored_images

SCHEMA = 1
ENV_S = "env_s"
"""Key among the metrics of a rollout's row: `Rollout.env_s`, if it is at least 1 ms."""

TABLES = """
CREATE TABLE incarnations (
    incarnation INTEGER PRIMARY KEY, started_at REAL NOT NULL, resumed_step INTEGER, info TEXT NOT NULL
);
CREATE TABLE draws (
    group_id INTEGER PRIMARY KEY, env TEXT NOT NULL, task_id TEXT NOT NULL, data TEXT NOT NULL,
    state TEXT NOT NULL, reason TEXT, dropped_at_step INTEGER,
    drawn_at REAL NOT NULL, finished_at REAL, incarnation INTEGER NOT NULL
);
CREATE INDEX draws_open ON draws (state) WHERE state IN ('drawn', 'finished', 'shipped');
CREATE TABLE rollouts (
    row INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, member INTEGER NOT NULL, incarnation INTEGER NOT NULL,
    status TEXT NOT NULL, version INTEGER, first_version INTEGER, last_version INTEGER,
    reward REAL, advantage REAL, num_turns INTEGER, num_tokens INTEGER, num_sampled_tokens INTEGER,
    started_at REAL, finished_at REAL, error TEXT, metrics TEXT,
    segment INTEGER, offset INTEGER, length INTEGER, crc INTEGER, dropped_by TEXT, reason TEXT, turns TEXT
);
CREATE INDEX rollouts_of_group ON rollouts (group_id);
CREATE INDEX rollouts_of_segment ON rollouts (segment) WHERE segment IS NOT NULL;
CREATE INDEX rollouts_running ON rollouts (status) WHERE status = 'running';
CREATE TABLE batches (
    batch INTEGER PRIMARY KEY, step INTEGER NOT NULL, incarnation INTEGER NOT NULL, state TEXT NOT NULL,
    shipped_at REAL NOT NULL, trained_at REAL, metrics TEXT
);
CREATE UNIQUE INDEX batches_live ON batches (step) WHERE state != 'undone';
CREATE TABLE batch_rollouts (
    batch INTEGER NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (batch, row)
) WITHOUT ROWID;
CREATE INDEX batches_of_rollout ON batch_rollouts (row);
CREATE VIEW live_rollouts AS
    SELECT b.step, b.state AS batch_state, b.incarnation AS shipped_in, rollouts.*
    FROM batches b JOIN batch_rollouts USING (batch) JOIN rollouts USING (row) WHERE b.state != 'undone';
CREATE TABLE versions (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, incarnation INTEGER NOT NULL, state TEXT NOT NULL,
    published_at REAL NOT NULL, loaded_at REAL
);
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, incarnation INTEGER NOT NULL, state TEXT NOT NULL,
    saved_at REAL NOT NULL
);
CREATE TABLE segments (
    segment INTEGER PRIMARY KEY, closed_at_step INTEGER NOT NULL, num_bytes INTEGER NOT NULL, deleted_at REAL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, incarnation INTEGER NOT NULL, kind TEXT NOT NULL,
    data TEXT NOT NULL
);
"""

LATER_COLUMNS = ("dropped_by", "reason", "turns")
"""Columns of `rollouts` that a ledger of an older stretto does not have: NULL in its rows."""
SET_PLACE = "UPDATE rollouts SET segment = ?, offset = ?, length = ?, crc = ? WHERE row = ?"
"""Says where the payload of a row of `rollouts` is."""
SHOWN_STATUS = "CASE WHEN r.dropped_by IS NULL THEN r.status ELSE 'dropped' END"
"""The status of a row of `rollouts r` as people see it."""

# Not part of the schema: created when a ledger without them is opened.
INDEXES = "CREATE INDEX IF NOT EXISTS versions_published ON versions (version) WHERE state = 'published';"


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database; create it if there is none.

    Raises: DataError if it is damaged, or of another version of stretto.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None, timeout=30.0)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing; a power cut may lose the last rows, never their consistency.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        if scalar(connection, "SELECT count(*) FROM sqlite_master") == 0:
            connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
        _check_schema(connection, path)
        for name in _missing_columns(connection):
            connection.execute(f"ALTER TABLE rollouts ADD COLUMN {name} TEXT")
        connection.execute(INDEXES)
        connection.execute(stored_images.TABLE)
    except _FAULTS as cause:
        connection.close()
        raise to_error(path, cause) from cause
    except DataError:
        connection.close()
        raise
    return connection


def _no_ledger(path: Path) -> str:
    directory = path.parent
    if not directory.exists():
        return f"there is no ledger: there is no directory {directory}{meant_path(directory)}"
    return "there is no ledger; is this a run directory?"


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the database of a run, running or ended.

    Raises: DataError if there is none, or if it is damaged, or of another version of stretto.
    """
    if not path.exists():
        raise DataError(f"{path}: {_no_ledger(path)}")
    try:
        connection = sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, isolation_level=None, timeout=30.0)
        connection.row_factory = sqlite3.Row
        _check_schema(connection, path)
        if missing := _missing_columns(connection):
            nulls = ", ".join(f"NULL AS {name}" for name in missing)
            for table in ("rollouts", "live_rollouts"):  # a temporary view hides what it is named after
                connection.execute(f"CREATE TEMP VIEW {table} AS SELECT *, {nulls} FROM main.{table}")
    except _FAULTS as cause:
        raise to_error(path, cause) from cause
    return connection


def _missing_columns(connection: sqlite3.Connection) -> list[str]:
    known = column(connection, "SELECT name FROM pragma_table_info('rollouts')")
    return [name for name in LATER_COLUMNS if name not in known]


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    written = scalar(connection, "PRAGMA user_version")
    if written == 0 and not scalar(connection, "SELECT count(*) FROM sqlite_master"):
        raise DataError(f"{path}: the ledger is empty: the run ended before its first row, or the file was cut")
    if written != SCHEMA:
        remedy = "update stretto" if written > SCHEMA else "read it with the stretto that wrote it"
        older = "the ledger" if written < SCHEMA else "this stretto"
        raise DataError(
            f"{path}: has ledger schema {written}, this stretto reads schema {SCHEMA}; {older} is older: {remedy}."
        )


_FAULTS = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises; the second where its message quotes text that is damaged."""


def to_error(path: Path, cause: sqlite3.Error | UnicodeDecodeError) -> StrettoError:
    """The error to raise for an SQLite error: DataError for a damaged file, else EngineError."""
    if getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    ):
        return DataError(
            f"{path}: {cause}; the file is damaged or not a ledger. To continue from a checkpoint without it, move it "
            f"and the files {path.name}-* away and resume: draws up to the checkpoint count as trained."
        )
    return EngineError(f"{path}: {cause}; the run cannot go on without its ledger (is the disk full?).")


def is_damaged(path: Path) -> bool:
    """Whether SQLite finds a fault in the file of a ledger, all of which it reads; False if there is no file."""
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, timeout=30.0)) as connection:
            return str(scalar(connection, "PRAGMA quick_check(1)")) != "ok"
    except _FAULTS as cause:
        return isinstance(to_error(path, cause), DataError)


def column(db: sqlite3.Connection, query: str, *values: Any) -> list[Any]:
    """The first column of a query's rows."""
    return [row[0] for row in db.execute(query, values).fetchall()]


def scalar(db: sqlite3.Connection, query: str, *values: Any) -> Any:
    """The first value of a query's first row."""
    return db.execute(query, values).fetchone()[0]


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn SQLite errors that are raised inside into DataError or EngineError (`to_error`).

    Raises: DataError, EngineError.
    """
    try:
        yield
    except _FAULTS as cause:
        raise to_error(path, cause) from cause
