"""The orchestrator's pen: every call is one row or one transaction, committed before it returns.

Call a method before what it records takes effect. A commit is a write to the WAL file, not a disk flush: tens
of microseconds, and a killed process has lost nothing. `with ledger.transaction():` joins several calls into
one commit. What a resume does with the rows is in `resume.py`; states and tables are in `schema.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from stretto.base.errors import ConfigError, EngineError
from stretto.base.paths import RunDir
from stretto.ledger import resume, schema
from stretto.ledger.segments import Place, SegmentWriter
from stretto.records.partial import Kept, Turn
from stretto.records.rollout import Group, Rollout, RolloutStatus, Task

logger = logging.getLogger(__name__)

_NOWHERE = (None, None, None, None)
_VALID = (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED)
_INSERT_RUNNING = (
    "INSERT INTO rollouts (row, group_id, member, incarnation, status, version, started_at, "
    "segment, offset, length, crc) VALUES (?, ?, ?, ?, 'running', ?, ?, ?, ?, ?, ?)"
)
_UPDATE_TURN = "UPDATE rollouts SET segment = ?, offset = ?, length = ?, crc = ? WHERE row = ?"
TURNS_EVERY_S = 0.05  # turns played meanwhile are one commit
_COLUMNS = (
    "row, group_id, member, incarnation, status, version, first_version, last_version, reward, advantage, "
    "num_turns, num_tokens, num_sampled_tokens, started_at, finished_at, error, metrics, "
    "segment, offset, length, crc"
)
_FINISH = (
    f"INSERT OR REPLACE INTO rollouts ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))})"
)


class Ledger:
    """Open it with `Ledger.open`. One process and one thread write."""

    @classmethod
    def open(cls, run_dir: RunDir, *, keep_steps: int | None = 50, segment_bytes: int = 64_000_000) -> Ledger:
        """Open the run's ledger, or begin it.

        Raises: EngineError when another process writes it, DataError when it is damaged or of another
        version.
        """
        return cls(run_dir, keep_steps, segment_bytes)

    def __init__(self, run_dir: RunDir, keep_steps: int | None, segment_bytes: int) -> None:
        self._run_dir = run_dir
        self._keep_steps = keep_steps
        self._segment_bytes = segment_bytes
        self._lock = _lock(run_dir)
        try:
            self._db = schema.open_for_writing(run_dir.ledger)
        except BaseException:
            os.close(self._lock)
            raise
        self._depth = 0
        self._running: dict[
            tuple[int, int], tuple[int, int, float]
        ] = {}  # member -> row, version, started_at
        self._turns: dict[tuple[int, int], Place] = {}  # member -> its newest turn, while it is not done
        self._unwritten: dict[
            int, Place
        ] = {}  # row -> its newest turn, where the database does not know it yet
        self._next_row = self._scalar("SELECT coalesce(max(row), 0) + 1 FROM rollouts")
        self._incarnation = self._scalar("SELECT coalesce(max(incarnation), 0) FROM incarnations")
        self._step = self._scalar("SELECT coalesce(max(step), 0) FROM batches WHERE state != 'undone'")
        self._segments = self._open_segment()

    def close(self) -> None:
        self.write_turns()
        self._segments.close()
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything written inside is one commit, or nothing is."""
        if self._depth:
            yield
            return
        self._depth = 1
        try:
            self._db.execute("BEGIN IMMEDIATE")
            if turns := [(*place, row) for row, place in self._unwritten.items()]:
                self._db.executemany(_UPDATE_TURN, turns)
            yield
            self._db.execute("COMMIT")
            self._unwritten.clear()
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise schema.failed(self._run_dir.ledger, error) from error
            raise
        finally:
            self._depth = 0

    # -- what happens --

    def run_started(self, info: Mapping[str, Any], *, resumed_step: int | None = None) -> int:
        """A process takes over the run; the number of its life, from 1.

        info is JSON-able; `max_off_policy_steps` in it is what `audit` checks staleness against.
        """
        with self.transaction():
            self._db.execute("UPDATE rollouts SET status = 'lost' WHERE status = 'running'")
            self._incarnation += 1
            self._insert("incarnations", self._incarnation, time.time(), resumed_step, _json(info))
        self._running.clear()
        return self._incarnation

    def task_drawn(self, group_id: int, task: Task) -> None:
        """Draw `group_id` is this task. A draw that is run again is not drawn again."""
        with self.transaction():
            row = (group_id, task.env, task.task_id, _json(task.data), "drawn", None, None, time.time(), None)
            self._insert("draws", *row, self._incarnation)

    def rollout_started(self, rollout_id: str, group_id: int, member: int, version: int) -> None:
        """A member begins while `version` is loaded."""
        assert rollout_id == f"g{group_id}.{member}", rollout_id
        self.rollouts_started(group_id, [member], version)

    def rollouts_started(self, group_id: int, members: Sequence[int], version: int) -> None:
        """Several members of a group begin, in one commit; those of which turns are kept go on from them."""
        now = time.time()
        rows = []
        for member in members:
            place = self._turns.get((group_id, member), _NOWHERE)
            rows.append((self._next_row, group_id, member, self._incarnation, version, now, *place))
            self._running[group_id, member] = (self._next_row, version, now)
            self._next_row += 1
        with self.transaction():
            self._db.executemany(_INSERT_RUNNING, rows)

    def turn_played(self, group_id: int, member: int, turn: Turn) -> None:
        """A turn of a running member, kept in case the rollout is interrupted; see `resume.kept_rollouts`.

        Inside an event loop turns are committed together, TURNS_EVERY_S later or with what comes before that: a process
        that is killed meanwhile has lost them, and plays them again.
        """
        key = (group_id, member)
        if key not in self._running:
            return  # its group was dropped meanwhile
        self._add_turn(key, self._running[key][0], turn)
        if self._segments.end >= self._segment_bytes:
            self._rotate()

    def forget_turns(self, group_id: int, member: int) -> None:
        """The turns that are kept of a member are of no use; call it before the member is started."""
        self._turns.pop((group_id, member), None)

    def rollout_failed(self, rollout_id: str, group_id: int, member: int, error: str) -> None:
        """A try of a member failed; start it again before the next try."""
        assert rollout_id == f"g{group_id}.{member}", rollout_id
        row, version, started = self._take_row(group_id, member)
        values = (row, group_id, member, self._incarnation, "failed", version, started, time.time(), error)
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO rollouts (row, group_id, member, incarnation, status, version, "
                "started_at, finished_at, error) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )

    def group_finished(self, group: Group) -> None:
        """All members are done: payloads to the segment, then all rows in one transaction.

        Call it with advantages assigned; again (with the same rollouts) is an error of the caller.
        """
        places = self._segments.append(group.rollouts)
        advantages = group.advantages or (0.0,) * len(group.rollouts)
        rows = [self._row(*each) for each in zip(group.rollouts, advantages, places)]
        state = "finished" if any(rollout.status in _VALID for rollout in group.rollouts) else "failed"
        with self.transaction():
            self._db.executemany(_FINISH, rows)
            self._db.execute(
                "UPDATE draws SET state = ?, finished_at = ?, reason = NULL WHERE group_id = ?",
                (state, time.time(), group.group_id),
            )
        if self._segments.end >= self._segment_bytes:
            self._rotate()

    def group_dropped(self, group_id: int, reason: str) -> None:
        """The group, finished or still running, will not be trained on (unless a rewind takes this back)."""
        with self.transaction():
            self._db.execute(
                "UPDATE draws SET state = 'dropped', reason = ?, dropped_at_step = ? WHERE group_id = ?",
                (str(reason), self._step, group_id),
            )
            self._db.execute(
                "UPDATE rollouts SET status = 'dropped' WHERE group_id = ? AND status = 'running'",
                (group_id,),
            )
        for key in [key for key in self._running if key[0] == group_id]:
            del self._running[key]
            self._turns.pop(key, None)

    def batch_shipped(self, step: int, group_ids: Sequence[int]) -> None:
        """These groups' valid rollouts are the batch of `step`."""
        with self.transaction():
            cursor = self._db.execute(
                "INSERT INTO batches (step, incarnation, state, shipped_at) VALUES (?, ?, 'shipped', ?)",
                (step, self._incarnation, time.time()),
            )
            groups = [(group_id,) for group_id in group_ids]
            self._db.executemany(
                f"INSERT INTO batch_rollouts SELECT {cursor.lastrowid}, row FROM ({resume.NEWEST_ROWS}) "
                "WHERE status IN ('finished', 'truncated')",
                groups,
            )
            self._db.executemany("UPDATE draws SET state = 'shipped' WHERE group_id = ?", groups)
        self._step = max(self._step, step)

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer has done `step`; its rollouts will never be trained on again."""
        with self.transaction():
            self._db.execute(
                "UPDATE batches SET state = 'trained', trained_at = ?, metrics = ? "
                "WHERE step = ? AND state = 'shipped'",
                (time.time(), _json(metrics), step),
            )
            resume.mark_trained(self._db, step)

    def version_published(self, version: int) -> None:
        """The weights of `version` exist."""
        self._insert_row("versions", None, version, self._incarnation, "published", time.time(), None)

    def version_loaded(self, version: int) -> None:
        """Every engine samples from `version`."""
        with self.transaction():
            self._db.execute(
                "UPDATE versions SET state = 'loaded', loaded_at = ? "
                "WHERE version = ? AND state = 'published'",
                (time.time(), version),
            )

    def checkpoint_saved(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        self._insert_row("checkpoints", None, step, self._incarnation, "saved", time.time())

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Anything else worth keeping."""
        self._insert_row("events", None, time.time(), self._incarnation, kind, _json(data))

    # -- resume: call in this order, before run_started --

    def rewind(self, step: int) -> resume.Rewound:
        """Take back everything after `step`; see `resume.rewind`."""
        with self.transaction():
            rewound = resume.rewind(self._db, step)
        self._running.clear()
        self._step = step
        return rewound

    def resumable(self, step: int, oldest_version: int) -> list[Group]:
        """Finished groups that the next step may train on; see `resume.resumable`."""
        with self.transaction():
            return resume.resumable(self._db, self._run_dir, step, oldest_version)

    def kept_rollouts(self, step: int, oldest_version: int) -> dict[tuple[int, int], Kept]:
        """What unfinished draws have already played, by group and member; see `resume.kept_rollouts`."""
        with self.transaction():
            found = resume.kept_rollouts(self._db, self._run_dir, step, oldest_version)
            self._turns = {key: each.place for key, each in found.items()}
            for key, each in found.items():
                if each.is_cut:  # written down without what is undone, whose versions will be other weights
                    del self._turns[key]
                    for turn in each.kept.turns:
                        self._add_turn(key, each.row, turn)
        return {key: each.kept for key, each in found.items()}

    def unfinished_draws(self) -> list[tuple[int, Task]]:
        """Draws to run again under their number, in draw order; call it after `resumable`."""
        return resume.unfinished_draws(self._db)

    def next_draw(self) -> int:
        """The first draw number that was never used."""
        return self._scalar("SELECT coalesce(max(group_id) + 1, 0) FROM draws")

    def open_draws(self) -> list[int]:
        """Draws that are neither trained nor given up, in order."""
        query = "SELECT group_id FROM draws WHERE state IN ('drawn', 'finished', 'shipped') ORDER BY group_id"
        return [group_id for (group_id,) in self._db.execute(query)]

    def began_at(self, step: int) -> None:
        """This run begins after `step` of another one; call it before `run_started`.

        Raises: ConfigError when it has begun before.
        """
        if self._incarnation:
            raise ConfigError(
                f"resume.dir: the run in {self._run_dir} has begun before; continue it with --resume alone, or "
                "give this one another run.name."
            )
        self._step = step

    # -- inside --

    def _scalar(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()[0]

    def _insert(self, table: str, *values: Any) -> None:
        self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def _insert_row(self, table: str, *values: Any) -> None:
        with self.transaction():
            self._insert(table, *values)

    def _add_turn(self, key: tuple[int, int], row: int, turn: Turn) -> None:
        self._turns[key] = self._unwritten[row] = self._segments.append_turn(turn, self._turns.get(key))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.write_turns()
            return
        if len(self._unwritten) == 1:
            loop.call_later(TURNS_EVERY_S, self.write_turns)

    def write_turns(self) -> None:
        """Commit the turns that wait for it."""
        if self._unwritten:
            with self.transaction():
                pass

    def _take_row(self, group_id: int, member: int) -> tuple[int, int | None, float | None]:
        """The row of a running member, or a new one for a member that was never said to start."""
        self._turns.pop((group_id, member), None)
        if (group_id, member) in self._running:
            row, *rest = self._running.pop((group_id, member))
            self._unwritten.pop(row, None)
            return row, *rest
        self._next_row += 1
        return self._next_row - 1, None, None

    def _row(self, rollout: Rollout, advantage: float, place: Place) -> tuple[Any, ...]:
        row, version, started = self._take_row(rollout.group_id, rollout.member)
        versions = [span.version for branch in rollout.branches for span in branch.versions]
        return (
            row, rollout.group_id, rollout.member, self._incarnation, str(rollout.status), version,
            rollout.first_version, max(versions, default=None), float(rollout.reward), float(advantage),
            rollout.num_turns, rollout.num_tokens, rollout.num_sampled_tokens,
            rollout.started_at or started, rollout.finished_at, rollout.error, _json(rollout.metrics), *place,
        )  # fmt: skip

    def _open_segment(self) -> SegmentWriter:
        """Go on where the last row ends; what a killed process was about to delete goes now."""
        for (segment,) in self._db.execute("SELECT segment FROM segments WHERE deleted_at IS NOT NULL"):
            self._run_dir.segment(segment).unlink(missing_ok=True)
        newest = self._scalar("SELECT coalesce(max(segment), 0) FROM rollouts")
        after_closed = self._scalar("SELECT coalesce(max(segment) + 1, 0) FROM segments")
        segment = max(newest, after_closed)
        end = self._scalar(
            "SELECT coalesce(max(offset + length), 0) FROM rollouts WHERE segment = ?", segment
        )
        return SegmentWriter(self._run_dir, segment, end)

    def _rotate(self) -> None:
        with self.transaction():
            self._insert("segments", self._segments.segment, self._step, self._segments.end, None)
        self._segments.rotate()
        if self._keep_steps is not None:
            self._delete_old_segments(self._keep_steps)

    def _delete_old_segments(self, keep_steps: int) -> None:
        """Delete segments whose every rollout was trained or given up `keep_steps` ago, and before a
        checkpoint.

        What lies after the newest checkpoint stays, whatever its age: a resume may need it.
        """
        horizon = (
            self._scalar("SELECT coalesce(max(step), 0) FROM batches WHERE state = 'trained'") - keep_steps
        )
        saved = self._scalar("SELECT max(step) FROM checkpoints WHERE state = 'saved'")
        horizon = horizon if saved is None else min(horizon, saved)
        closed = self._db.execute(
            "SELECT segment FROM segments WHERE deleted_at IS NULL AND closed_at_step <= ? ORDER BY segment",
            (horizon,),
        ).fetchall()
        for (segment,) in closed:
            if resume.is_needed(self._db, segment, horizon):
                continue
            with (
                self.transaction()
            ):  # first the row: a file that outlives a kill is removed at the next opening
                deleted = "UPDATE segments SET deleted_at = ? WHERE segment = ?"
                self._db.execute(deleted, (time.time(), segment))
            self._run_dir.segment(segment).unlink(missing_ok=True)
            logger.info("deleted token payloads of segment %d: all older than step %d", segment, horizon)


def _lock(run_dir: RunDir) -> int:
    """Make this process the only writer; the kernel ends that when the process ends, however it does."""
    run_dir.tokens.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir.tokens, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise EngineError(f"{run_dir.ledger}: another process writes this ledger; end it first.") from None
    return fd


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_number).decode()


def _number(value: Any) -> Any:
    """numpy scalars as numbers."""
    return value.item()
