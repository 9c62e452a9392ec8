"""Writes the ledger of a run; only the orchestrator does.

Every call is one row or one transaction, committed before it returns. Call it before what it records takes effect. A
commit is a write to the WAL file, not a disk flush: it takes tens of microseconds, and a killed process loses nothing;
`flush` protects against power cuts. `with ledger.transaction():` makes several calls one commit. What a resume does
with the rows is in `reuse.py`; states and tables are in `schema.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stretto.base.errors import ConfigError, EngineError, StrettoError
from stretto.base.files import flush, flush_parents, try_lock
from stretto.base.paths import KEPT, RunDir
from stretto.ledger import reuse, schema, stored_images
from stretto.ledger.kept import Limits, deletable_segments, keep_samples, mark_deleted
from stretto.ledger.token_file import Place, SegmentWriter
from stretto.records.outcomes import Reason
from stretto.records.partial import PartialRollout, Turn
from stretto.records.rollout import Group, Rollout, Task

logger = logging.getLogger(__name__)

_NO_PLACE = (None, None, None, None)
_INSERT_RUNNING = (
    "INSERT INTO rollouts (row, group_id, member, incarnation, status, version, started_at, "
    "segment, offset, length, crc) VALUES (?, ?, ?, ?, 'running', ?, ?, ?, ?, ?, ?)"
)
USED = "used"
"""The event that says what a run has used over all its starts; a resumed run goes on from the last one."""
TURN_COMMIT_INTERVAL_S = 0.05  # turns that end within it are one commit
_COLUMNS = (
    "row, group_id, member, incarnation, status, version, first_version, last_version, reward, advantage, "
    "num_turns, num_tokens, num_sampled_tokens, started_at, finished_at, error, metrics, "
    "segment, offset, length, crc, dropped_by, reason, turns"
)
_WRITTEN_AT_START = ("row", "group_id", "member", "incarnation", "version")
_LATER = [name for name in _COLUMNS.split(", ") if name not in _WRITTEN_AT_START]
_FINISH = (
    f"INSERT INTO rollouts ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))}) "
    f"ON CONFLICT (row) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _LATER)}"
)
"""A member that has started has a row; replacing it would also write the indexes anew that stay as they are."""


class _Start(NamedTuple):
    """The row of a running member, and the version and time of its start."""

    row: int
    version: int | None
    started_at: float | None


class GroupStart(NamedTuple):
    """A group that starts: its draw, its task if that was drawn just now, its members, and their version."""

    group_id: int
    task: Task | None
    members: Sequence[int]
    version: int


class Ledger:
    """The writing end of the ledger. One process and one thread write."""

    def __init__(self, run_dir: RunDir, *, limits: Limits | None = None, segment_bytes: int = 64_000_000) -> None:
        """Open the run's ledger, or create it.

        Raises: EngineError if another process writes it, DataError if it is damaged or of another version.
        """
        self._run_dir = run_dir
        self._limits = limits or Limits()
        self._segment_bytes = segment_bytes
        self._lock = _lock(run_dir)
        try:
            self._db = schema.open_for_writing(run_dir.ledger)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            with schema.guarded(run_dir.ledger):
                self._begin()
        except BaseException:
            self._db.close()
            os.close(self._lock)
            raise

    def _begin(self) -> None:
        """Continue where the database ends."""
        self._depth = 0
        self._running: dict[int, dict[int, _Start]] = {}  # group -> member -> its row
        self._turns: dict[tuple[int, int], Place] = {}  # unfinished member -> its newest turn
        self._unwritten: dict[int, tuple[tuple[int, int], list[Turn]]] = {}  # row -> its member, turns not written yet
        self._timer: asyncio.TimerHandle | None = None  # until they are written
        self._next_row = self._scalar("SELECT coalesce(max(row), 0) + 1 FROM rollouts")
        self._incarnation: int = self._scalar("SELECT coalesce(max(incarnation), 0) FROM incarnations")
        self._step = self._scalar("SELECT coalesce(max(step), 0) FROM batches WHERE state != 'undone'")
        self._segments = self._open_segment()
        self._flushed_segment = self._segments.segment  # all segments before it are on the disk
        with self.transaction():
            stored_images.forget_damaged(self._db, self._run_dir, self._segments.segment)
        self._stored_images = stored_images.hashes_in(self._db, self._segments.segment)  # in the open segment

    def close(self) -> None:
        """Write what is not written yet, and let another process write the ledger.

        Raises: EngineError if the disk refuses it.
        """
        try:
            self.write_turns()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._segments.close()
            self._db.close()
            os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything written inside together; after an exception, nothing of it."""
        if self._depth:
            yield
            return
        self._depth = 1
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise schema.to_error(self._run_dir.ledger, error) from error
            raise
        finally:
            self._depth = 0

    # -- what happens --

    def run_started(self, info: Mapping[str, Any], *, resumed_step: int | None = None) -> int:
        """Record a new incarnation of the run and return its number, from 1.

        info must be JSON-able; `audit` checks staleness against its `max_off_policy_steps`.
        """
        with self.transaction():
            self._db.execute("UPDATE rollouts SET status = 'lost' WHERE status = 'running'")
            self._incarnation += 1
            self._insert("incarnations", self._incarnation, time.time(), resumed_step, _json(info))
        self._running.clear()
        return self._incarnation

    def groups_started(self, starts: Sequence[GroupStart]) -> None:
        """Record in one commit which tasks were drawn, and that the members of their groups start."""
        with self.transaction():
            for group_id, task, members, version in starts:
                if task is not None:
                    self.task_drawn(group_id, task)
                self.rollouts_started(group_id, members, version)

    def task_drawn(self, group_id: int, task: Task) -> None:
        """Record that draw `group_id` is this task; not to be called for a draw that is run again."""
        with self.transaction():
            row = (group_id, task.env, task.task_id, _json(task.data), "drawn", None, None, time.time(), None)
            self._insert("draws", *row, self._incarnation)

    def rollouts_started(self, group_id: int, members: Sequence[int], version: int) -> None:
        """Record in one commit that members of a group start, or continue from their stored turns."""
        now = time.time()
        rows = []
        for member in members:
            place = self._turns.get((group_id, member), _NO_PLACE)
            rows.append((self._next_row, group_id, member, self._incarnation, version, now, *place))
            self._running.setdefault(group_id, {})[member] = _Start(self._next_row, version, now)
            self._next_row += 1
        with self.transaction():
            self._db.executemany(_INSERT_RUNNING, rows)

    def turn_played(self, group_id: int, member: int, turn: Turn) -> None:
        """Store a turn of a running member, for `reuse.partial_rollouts` if it is interrupted.

        Inside an event loop turns are written together, after TURN_COMMIT_INTERVAL_S. A process that is killed
        meanwhile loses them, and plays them again. Those that the disk refuses are kept, and written with later ones.
        """
        start = self._running.get(group_id, {}).get(member)
        if start is None:
            return  # its group was dropped meanwhile
        self._add_turn((group_id, member), start.row, turn)

    def forget_turns(self, group_id: int, member: int) -> None:
        """Do not use the stored turns of a member; call it before the member starts."""
        self._turns.pop((group_id, member), None)

    def groups_finished(self, groups: Sequence[Group]) -> None:
        """Record finished groups: payloads to the segment in one write, then all rows in one transaction.

        Their advantages must be assigned. A group must not be recorded twice.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        new_images = self._append_images(rollouts)
        places = self._segments.append(rollouts)
        sizes = [(r.first_version, r.num_tokens, r.num_sampled_tokens) for r in rollouts]
        now = time.time()
        ends = [("finished" if any(r.is_counted for r in g.rollouts) else "failed", now, g.group_id) for g in groups]
        members = [(group, member) for group in groups for member in range(len(group.rollouts))]
        rows = [self._row(*of, size, place) for of, size, place in zip(members, sizes, places)]
        with self.transaction():
            self._db.executemany(_FINISH, rows)
            self._db.executemany(stored_images.INSERT, new_images)
            self._db.executemany("UPDATE draws SET state = ?, finished_at = ?, reason = NULL WHERE group_id = ?", ends)
        if self._segments.end >= self._segment_bytes:
            self._rotate()

    def group_dropped(self, group_id: int, reason: str) -> None:
        """Record that a finished or running group will not be trained on, unless a rewind undoes this."""
        with self.transaction():
            self._db.execute(
                "UPDATE draws SET state = 'dropped', reason = ?, dropped_at_step = ? WHERE group_id = ?",
                (str(reason), self._step, group_id),
            )
            # The plus makes SQLite use the index of the group, which has few rows, not that of all running ones.
            self._db.execute(
                "UPDATE rollouts SET status = 'dropped', reason = ? WHERE group_id = ? AND +status = 'running'",
                (str(Reason.CANCELLED), group_id),
            )
        for member, start in self._running.pop(group_id, {}).items():
            self._turns.pop((group_id, member), None)
            self._unwritten.pop(start.row, None)

    def batch_shipped(self, step: int, group_ids: Sequence[int]) -> None:
        """Record that the valid rollouts of these groups are the batch of `step`."""
        with self.transaction():
            cursor = self._db.execute(
                "INSERT INTO batches (step, incarnation, state, shipped_at) VALUES (?, ?, 'shipped', ?)",
                (step, self._incarnation, time.time()),
            )
            groups = [(group_id,) for group_id in group_ids]
            self._db.executemany(
                f"INSERT INTO batch_rollouts SELECT {cursor.lastrowid}, row FROM ({reuse.NEWEST_ROWS}) "
                "WHERE status IN ('finished', 'truncated') AND dropped_by IS NULL",
                groups,
            )
            self._db.executemany("UPDATE draws SET state = 'shipped' WHERE group_id = ?", groups)
        self._step = max(self._step, step)

    def step_trained(self, step: int, metrics: Mapping[str, float], used: Mapping[str, float] | None = None) -> None:
        """Record that the trainer has done `step`; its rollouts will never be trained on again.

        used: what the run has used up to now, as the event USED.
        """
        with self.transaction():
            if used is not None:
                self._insert_row("events", None, time.time(), self._incarnation, USED, _json(used))
            self._db.execute(
                "UPDATE batches SET state = 'trained', trained_at = ?, metrics = ? "
                "WHERE step = ? AND state = 'shipped' AND state != 'undone'",
                (time.time(), _json(metrics), step),
            )
            self._db.execute(reuse.MARK_TRAINED, (step,))

    def version_published(self, version: int, fingerprint: str | None = None) -> None:
        """Record that the weights of `version` exist, and the fingerprint of what is sent to engines if it is known."""
        with self.transaction():
            self._insert_row("versions", None, version, self._incarnation, "published", time.time(), None)
            if fingerprint is not None:
                self.event("weights", {"version": version, "fingerprint": fingerprint})

    def version_loaded(self, version: int) -> None:
        """Record that every engine samples from `version`."""
        with self.transaction():
            self._db.execute(
                "UPDATE versions SET state = 'loaded', loaded_at = ? WHERE version = ? AND state = 'published'",
                (time.time(), version),
            )

    def checkpoint_saved(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete."""
        self._insert_row("checkpoints", None, step, self._incarnation, "saved", time.time())

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of any other kind."""
        self._insert_row("events", None, time.time(), self._incarnation, kind, _json(data))

    async def flush(self) -> None:
        """Wait until all rows and payloads so far are on the disk, safe from a power cut.

        Raises: EngineError if the disk refuses them.
        """
        self.write_turns()
        first, last = self._flushed_segment, self._segments.segment
        segments = [self._run_dir.segment(number) for number in range(first, last + 1)]
        await asyncio.to_thread(_flush, self._run_dir, segments)
        self._flushed_segment = last

    # -- resume: call in this order, before run_started --

    def rewind(self, step: int) -> int:
        """Undo everything after `step`; see `reuse.rewind`."""
        with self.transaction():
            rewound = reuse.rewind(self._db, step)
        self._running.clear()
        self._step = step
        return rewound

    def lost_steps(self, step: int) -> list[int]:
        """Steps up to `step` whose rollouts the ledger has lost; call it after `rewind`."""
        with schema.guarded(self._run_dir.ledger):
            return reuse.lost_steps(self._db, step)

    def missing_draws(self, next_draw: int) -> list[int]:
        """Draws below the checkpoint's next_draw that the ledger has lost."""
        with schema.guarded(self._run_dir.ledger):
            return reuse.missing_draws(self._db, next_draw)

    def give_up(self, step: int, draws: Iterable[int], steps: Iterable[int]) -> None:
        """Never train these draws again: the ledger lost them, the checkpoint of `step` counts them."""
        with self.transaction():
            reuse.give_up(self._db, step, draws, steps)

    def resumable(self, step: int, oldest_version: int) -> list[Group]:
        """Finished groups that the next step may train on; see `reuse.resumable`."""
        with self.transaction():
            return reuse.resumable(self._db, self._run_dir, step, oldest_version)

    def partial_rollouts(self, step: int, oldest_version: int) -> dict[tuple[int, int], PartialRollout]:
        """The stored turns of unfinished draws, by group and member; see `reuse.partial_rollouts`."""
        with self.transaction():
            partials = reuse.partial_rollouts(self._db, self._run_dir, step, oldest_version)
            self._turns = {key: each.place for key, each in partials.items()}
            for key, each in partials.items():
                if each.is_cut:  # stored anew without undone tokens: their versions will be other weights
                    del self._turns[key]
                    self._unwritten[each.row] = key, list(each.rollout.turns)
            self._store_turns()
        return {key: each.rollout for key, each in partials.items()}

    def unfinished_draws(self) -> list[tuple[int, Task]]:
        """Draws to run again under their number, in draw order; call it after `resumable`."""
        with schema.guarded(self._run_dir.ledger):
            return reuse.unfinished_draws(self._db)

    def next_draw(self) -> int:
        """The first draw number that was never used."""
        return int(self._scalar("SELECT coalesce(max(group_id) + 1, 0) FROM draws"))

    def open_draws(self) -> list[int]:
        """Draws that are neither trained nor dropped nor failed, in order."""
        query = "SELECT group_id FROM draws WHERE state IN ('drawn', 'finished', 'shipped') ORDER BY group_id"
        with schema.guarded(self._run_dir.ledger):
            return schema.column(self._db, query)

    @property
    def is_new(self) -> bool:
        """Is there no incarnation of the run yet?"""
        return self._incarnation == 0

    def begin_after(self, step: int) -> None:
        """Let a new ledger begin after `step`: the run continues another one, or lost its ledger.

        Call it before `run_started`.

        Raises: ConfigError if the ledger is not new.
        """
        if not self.is_new:
            raise ConfigError(
                f"the run in {self._run_dir} has begun before; continue it with --resume alone, or give this run "
                "another run.name."
            )
        self._step = step

    # -- inside --

    def _scalar(self, query: str, *values: Any) -> Any:
        with schema.guarded(self._run_dir.ledger):
            return schema.scalar(self._db, query, *values)

    def _insert(self, table: str, *values: Any) -> None:
        self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def _insert_row(self, table: str, *values: Any) -> None:
        with self.transaction():
            self._insert(table, *values)

    def _add_turn(self, key: tuple[int, int], row: int, turn: Turn) -> None:
        self._unwritten.setdefault(row, (key, []))[1].append(turn)
        if self._timer is not None:
            return
        try:
            self._timer = asyncio.get_running_loop().call_later(TURN_COMMIT_INTERVAL_S, self._write_in_time)
        except RuntimeError:
            self.write_turns()

    def _write_in_time(self) -> None:
        self._timer = None
        try:
            self.write_turns()
        except StrettoError as error:  # a finished group that is refused ends the run
            logger.warning("turns of %d unfinished rollouts are not stored yet: %s", len(self._unwritten), error)

    def write_turns(self) -> None:
        """Write the turns that are not written yet, in one commit; those of rollouts that have ended are not needed."""
        if self._unwritten:
            self._store_turns()
            if self._segments.end >= self._segment_bytes:
                self._rotate()

    def _store_turns(self) -> None:
        if not self._unwritten:
            return
        waiting = list(self._unwritten.items())
        places: dict[tuple[int, int], Place] = {}
        for at in range(max(len(turns) for _, (_, turns) in waiting)):  # each names the place of the one before it
            late = [(key, turns[at]) for _, (key, turns) in waiting if at < len(turns)]
            written = self._segments.append_turns([(turn, places.get(key, self._turns.get(key))) for key, turn in late])
            places.update(zip((key for key, _ in late), written))
        with self.transaction():
            self._db.executemany(schema.SET_PLACE, [(*places[key], row) for row, (key, _) in waiting])
        self._turns.update(places)
        self._unwritten.clear()

    def _pop_start(self, group_id: int, member: int) -> _Start:
        """The start of a member that has ended; a new row if its start was not recorded."""
        self._turns.pop((group_id, member), None)
        members = self._running.get(group_id, {})
        if start := members.pop(member, None):
            if not members:
                del self._running[group_id]
            self._unwritten.pop(start.row, None)
            return start
        self._next_row += 1
        return _Start(self._next_row - 1, None, None)

    def _row(self, group: Group, member: int, sizes: tuple[int | None, int, int], place: Place) -> tuple[Any, ...]:
        """The row of a finished rollout; sizes: its first version, its numbers of tokens and of sampled ones."""
        rollout, (first_version, num_tokens, num_sampled_tokens) = group.rollouts[member], sizes
        row, version, started = self._pop_start(rollout.group_id, rollout.member)
        versions = [span.version for branch in rollout.branches for span in branch.versions]
        advantage = group.advantages[member] if group.advantages else 0.0
        return (
            row, rollout.group_id, rollout.member, self._incarnation, str(rollout.status), version,
            first_version, max(versions, default=None), float(rollout.reward), float(advantage),
            rollout.num_turns, num_tokens, num_sampled_tokens,
            rollout.started_at or started, rollout.finished_at, rollout.error, _json(_with_env_s(rollout)), *place,
            rollout.dropped_by, rollout.reason and str(rollout.reason),
            _turns_of(group, rollout) if rollout.turns else None,
        )  # fmt: skip

    def _append_images(self, rollouts: Sequence[Rollout]) -> list[tuple[Any, ...]]:
        """Write the images of rollouts that the open segment does not have yet; the rows to commit."""
        if not any(branch.images for rollout in rollouts for branch in rollout.branches):
            return []
        new = [image for image in stored_images.images_of(rollouts) if image.hash not in self._stored_images]
        self._stored_images.update(image.hash for image in new)
        return [(image.hash, *place) for image, place in zip(new, self._segments.append_images(new))]

    def _open_segment(self) -> SegmentWriter:
        """Continue where the last row ends; delete segments whose deletion a kill interrupted."""
        for segment in schema.column(self._db, "SELECT segment FROM segments WHERE deleted_at IS NOT NULL"):
            self._run_dir.segment(segment).unlink(missing_ok=True)
        newest = self._scalar("SELECT coalesce(max(segment), 0) FROM rollouts")
        after_closed = self._scalar("SELECT coalesce(max(segment) + 1, 0) FROM segments")
        segment = max(newest, after_closed)
        end = self._scalar("SELECT coalesce(max(offset + length), 0) FROM rollouts WHERE segment = ?", segment)
        return SegmentWriter(self._run_dir, segment, end)

    def _rotate(self) -> None:
        with self.transaction():
            self._insert("segments", self._segments.segment, self._step, self._segments.end, None)
        self._segments.rotate()
        self._stored_images.clear()
        self._delete_old_segments()

    def _delete_old_segments(self) -> None:
        """Delete segments beyond the limits, but for the samples of each step that are kept for ever."""
        for segment, horizon in list(deletable_segments(self._db, self._limits)):
            with self.transaction():
                kept = keep_samples(self._db, self._run_dir, segment, self._limits.samples)
                mark_deleted(self._db, segment)
            _flush(self._run_dir, [self._run_dir.segment(KEPT)])  # the copies, before the originals go
            self._run_dir.segment(segment).unlink(missing_ok=True)
            logger.info(
                "deleted token payloads of segment %d: all of step %d or older; kept=%d", segment, horizon, kept
            )


def _flush(run_dir: RunDir, segments: Sequence[Path]) -> None:
    # SQLite itself flushes the database before it reuses the WAL, so flushing the WAL is enough.
    wal = run_dir.ledger.with_name(run_dir.ledger.name + "-wal")
    try:
        for path in (*segments, wal):
            with suppress(FileNotFoundError):  # a deleted segment, or a WAL that is empty
                flush(path)
        flush_parents(run_dir.segment(0), run_dir.path.parent)
    except OSError as cause:
        raise EngineError(f"{run_dir.ledger}: {cause}; the ledger cannot be written to the disk.") from cause


def _lock(run_dir: RunDir) -> int:
    """Make this process the only writer; the kernel releases the lock when the process ends."""
    try:
        run_dir.tokens.mkdir(parents=True, exist_ok=True)
        fd = os.open(run_dir.tokens, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as cause:
        raise ConfigError(
            f"{run_dir.tokens}: {cause.strerror}; it must be a directory of this run, or not exist."
        ) from cause
    if not try_lock(fd):
        os.close(fd)
        raise EngineError(f"{run_dir.ledger}: another process writes this ledger; end it first.")
    return fd


def _with_env_s(rollout: Rollout) -> dict[str, float]:
    return rollout.metrics | ({schema.ENV_S: rollout.env_s} if rollout.env_s else {})


def _turns_of(group: Group, rollout: Rollout) -> str:
    """The column `turns` of a rollout."""
    rows = [
        {key: value for key, value in msgspec.structs.asdict(turn).items() if value is not None}
        for turn in rollout.turns
    ]
    if group.turn_advantages:
        for row, advantage in zip(rows, group.turn_advantages[rollout.member]):
            row["advantage"] = advantage
    return _json(rows)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_number).decode()


def _number(value: Any) -> Any:
    """Convert numpy scalars to numbers."""
    return value.item()
