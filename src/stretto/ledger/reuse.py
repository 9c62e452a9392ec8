"""Rules for what a resumed run may use again; all run inside an open transaction of the writer.

A checkpoint at step s holds the weights of version s. What was trained after it is undone: its rollouts may be trained
again if no later version sampled them. Rollouts of later versions are lost, and their draws are run again under the
same number, so that the same tasks come in the same order.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.base.errors import DataError, WireError
from stretto.base.paths import RunDir
from stretto.ledger.schema import ENV_S, column, scalar
from stretto.ledger.stored_images import with_patches
from stretto.ledger.token_file import Payload, Place, load_payload, load_turns
from stretto.records.images import Image
from stretto.records.outcomes import Reason
from stretto.records.partial import PartialRollout, latest_turns, turns_up_to
from stretto.records.rollout import Group, Rollout, RolloutStatus, ScoredTurn, Task

logger = logging.getLogger(__name__)

# The rows of group ? that count: per member the newest that is not lost. A row that was dropped after it had finished
# counts too: a filter kept it out of the batch, but its reward belongs to the group.
NEWEST_ROWS = """
    SELECT *, max(row) FROM rollouts WHERE group_id = ? AND status NOT IN ('lost', 'running')
    AND (status != 'dropped' OR finished_at IS NOT NULL)
    GROUP BY member ORDER BY member
"""
# Marks the groups of a trained batch, by its step.
MARK_TRAINED = """
    UPDATE draws SET state = 'trained' WHERE group_id IN
    (SELECT group_id FROM live_rollouts WHERE step = ? AND batch_state = 'trained')
"""


def rewind(db: sqlite3.Connection, step: int) -> int:
    """Undo everything after `step`, as if the run had ended with its checkpoint; the number of rollouts that are lost.

    Rows stay. Later batches, versions and checkpoints become `undone`; their groups, and groups dropped since, are
    finished again. Groups with a rollout that began under a later version become `lost` and are drawn again; so are
    rollouts that were still running. A batch up to `step` counts as trained even if that was not reported: the
    checkpoint proves it.
    """
    undone = column(db, "SELECT batch FROM batches WHERE step > ? AND state != 'undone'", step)
    for trained in column(db, "SELECT step FROM batches WHERE step <= ? AND state = 'shipped'", step):
        db.execute("UPDATE batches SET state = 'trained' WHERE step = ? AND state = 'shipped'", (trained,))
        db.execute(MARK_TRAINED, (trained,))
    for batch in undone:
        db.execute(
            "UPDATE draws SET state = 'finished' WHERE group_id IN (SELECT group_id FROM batch_rollouts "
            "JOIN rollouts USING (row) WHERE batch = ?)",
            (batch,),
        )
        db.execute("UPDATE batches SET state = 'undone' WHERE batch = ?", (batch,))
    db.execute(
        "UPDATE draws SET state = iif(finished_at IS NULL, 'drawn', 'finished'), reason = NULL, "
        "dropped_at_step = NULL WHERE state = 'dropped' AND dropped_at_step > ?",
        (step,),
    )
    db.execute("UPDATE versions SET state = 'undone' WHERE version > ?", (step,))
    db.execute("UPDATE checkpoints SET state = 'undone' WHERE step > ?", (step,))
    lost = db.execute("UPDATE rollouts SET status = 'lost' WHERE status = 'running'").rowcount
    too_new = (
        "SELECT DISTINCT group_id FROM draws JOIN rollouts USING (group_id) WHERE status != 'lost' "
        "AND state IN ('drawn', 'finished', 'failed') AND coalesce(first_version, version) > ?"
    )
    for group_id in column(db, too_new, step):
        lost += _mark_lost(db, group_id)
    return lost


def lost_steps(db: sqlite3.Connection, step: int) -> list[int]:
    """Steps up to `step` whose rollouts are unknown, since the end of the ledger was lost."""
    query = (
        "SELECT step FROM batches b WHERE state != 'undone' "
        "AND EXISTS (SELECT 1 FROM batch_rollouts WHERE batch = b.batch)"
    )
    known = set(column(db, query))
    return [number for number in range(first_step(db) + 1, step + 1) if number not in known]


def missing_draws(db: sqlite3.Connection, next_draw: int) -> list[int]:
    """Draw numbers below next_draw that the ledger does not know, in order."""
    first = first_draw(db)
    count = "SELECT count(*) FROM draws WHERE group_id >= ? AND group_id < ?"
    if scalar(db, count, first, next_draw) == next_draw - first:
        return []
    known = set(column(db, "SELECT group_id FROM draws WHERE group_id >= ?", first))
    return [number for number in range(first, next_draw) if number not in known]


def give_up(db: sqlite3.Connection, step: int, draws: Iterable[int], steps: Iterable[int]) -> None:
    """Mark these draws as dropped and these steps as trained, with unknown rollouts.

    Versions up to `step`, that of a checkpoint, are marked as published.
    """
    db.executemany(
        "UPDATE draws SET state = 'dropped', reason = 'lost', dropped_at_step = ? WHERE group_id = ?",
        [(step, number) for number in draws],
    )
    now, incarnation = time.time(), scalar(db, "SELECT coalesce(max(incarnation), 0) FROM incarnations")
    db.executemany(
        "INSERT INTO batches (step, incarnation, state, shipped_at) SELECT ?1, ?2, 'trained', ?3 "
        "WHERE NOT EXISTS (SELECT 1 FROM batches WHERE step = ?1 AND state != 'undone')",
        [(number, incarnation, now) for number in steps],
    )
    newest = "SELECT coalesce(max(version), ?) FROM versions WHERE state != 'undone'"
    version = scalar(db, newest, first_step(db) - 1)
    db.executemany(
        "INSERT INTO versions (version, incarnation, state, published_at) VALUES (?, ?, 'published', ?)",
        [(number, incarnation, now) for number in range(version + 1, step + 1)],
    )


def first_step(db: sqlite3.Connection) -> int:
    """The step after which the ledger begins: 0, or that of the checkpoint it started from."""
    return int(scalar(db, "SELECT coalesce(min(coalesce(resumed_step, 0)), 0) FROM incarnations"))


def first_draw(db: sqlite3.Connection) -> int:
    """The first draw number: 0, or that of the checkpoint from which the run started."""
    infos = column(db, "SELECT info FROM incarnations ORDER BY incarnation LIMIT 1")
    return msgspec.json.decode(infos[0]).get("first_draw", 0) if infos else 0


def resumable(db: sqlite3.Connection, run_dir: RunDir, step: int, oldest_version: int) -> list[Group]:
    """Finished, untrained groups that the next step may train on, in draw order, verified.

    Their first tokens are of oldest_version..step; older groups are dropped. Groups whose payload is missing or damaged
    become lost and will be drawn again.
    """
    groups = []
    for group_id in column(db, "SELECT group_id FROM draws WHERE state = 'finished' ORDER BY group_id"):
        try:
            group = load_group(db, run_dir, group_id)
        except (DataError, WireError) as error:
            logger.warning("group %d will be run again: %s", group_id, error)
            _mark_lost(db, group_id)
            continue
        versions = [v for r in group.rollouts if (v := r.first_version) is not None]
        if min(versions, default=step) < oldest_version:
            query = "UPDATE draws SET state = 'dropped', reason = 'stale', dropped_at_step = ? WHERE group_id = ?"
            db.execute(query, (step, group_id))
        else:
            groups.append(group)
    return groups


@dataclass(frozen=True)
class StoredPartial:
    """A partial rollout, and where it is stored."""

    rollout: PartialRollout
    place: Place
    row: int
    is_cut: bool  # whether more is stored there: tokens of versions that are undone


def partial_rollouts(
    db: sqlite3.Connection, run_dir: RunDir, step: int, oldest_version: int
) -> dict[tuple[int, int], StoredPartial]:
    """Partial rollouts of draws that are played again, by group and member.

    Tokens of versions after `step` are cut off. A rollout that is older than oldest_version, missing or damaged is
    left out, and starts anew.
    """
    rows = db.execute(
        "SELECT group_id, member, r.finished_at, segment, offset, length, crc, max(row) FROM rollouts r "
        "JOIN draws d USING (group_id) WHERE d.state = 'drawn' GROUP BY group_id, member"
    ).fetchall()
    partials = {}
    for group_id, member, finished_at, *place, row in rows:
        if finished_at is not None or place[0] is None:
            continue
        rollout_id, at = f"g{group_id}.{member}", Place(*place)
        try:
            whole = latest_turns(load_turns(run_dir, at, rollout_id))
            turns = turns_up_to(whole, step)
            why = f"it was sampled after step {step}"
        except (DataError, WireError) as error:
            turns, why = [], str(error)
        rollout = PartialRollout(turns=tuple(turns))
        if turns and rollout.first_version < oldest_version:
            turns, why = [], f"version {rollout.first_version} is too old now"
        if not turns:
            logger.warning("rollout %s starts anew: %s", rollout_id, why)
            db.execute("UPDATE rollouts SET segment = NULL WHERE row = ?", (row,))
            continue
        is_cut = len(turns) < len(whole) or turns[-1] is not whole[-1]
        partials[group_id, member] = StoredPartial(rollout, at, row, is_cut=is_cut)
    return partials


def unfinished_draws(db: sqlite3.Connection) -> list[tuple[int, Task]]:
    """Draws that have no usable group, in draw order."""
    rows = db.execute("SELECT group_id, env, task_id, data FROM draws WHERE state = 'drawn' ORDER BY group_id")
    return [(group_id, _task(env, task_id, data)) for group_id, env, task_id, data in rows]


def load_group(db: sqlite3.Connection, run_dir: RunDir, group_id: int) -> Group:
    """Load a finished group as it was recorded.

    Raises: DataError if there is none, or if a payload is missing or damaged.
    """
    draw = db.execute("SELECT env, task_id, data FROM draws WHERE group_id = ?", (group_id,)).fetchone()
    cursor = db.execute(NEWEST_ROWS, (group_id,))
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row)) for row in cursor]
    if draw is None or not rows:
        raise DataError(f"group {group_id} is not in the ledger, or not finished.")
    task = _task(*draw)
    known: dict[str, Image] = {}
    rollouts = tuple(_rollout(db, run_dir, task, row, known) for row in rows)
    return Group(group_id=group_id, task=task, rollouts=rollouts, advantages=tuple(r["advantage"] or 0.0 for r in rows))


def is_needed(db: sqlite3.Connection, segment: int, horizon: int) -> bool:
    """May a payload in the segment still be used, or was one trained after step `horizon`?"""
    query = """
        SELECT 1 FROM rollouts r JOIN draws d USING (group_id)
        WHERE r.segment = ? AND (d.state = 'drawn' AND r.finished_at IS NULL OR r.status != 'lost' AND (
            d.state IN ('finished', 'shipped') OR (d.state = 'dropped' AND d.dropped_at_step > ?)
            OR EXISTS (SELECT 1 FROM live_rollouts WHERE row = r.row AND step > ?)
        )) LIMIT 1
    """
    return db.execute(query, (segment, horizon, horizon)).fetchone() is not None


def _mark_lost(db: sqlite3.Connection, group_id: int) -> int:
    """Mark the rollouts of a draw as lost and the draw as drawn; the number of rollouts."""
    cursor = db.execute("UPDATE rollouts SET status = 'lost' WHERE group_id = ? AND status != 'lost'", (group_id,))
    db.execute("UPDATE draws SET state = 'drawn', reason = NULL, finished_at = NULL WHERE group_id = ?", (group_id,))
    return cursor.rowcount


def _task(env: str, task_id: str, data: str) -> Task:
    return Task(env=env, task_id=task_id, data=msgspec.json.decode(data))


def _rollout(
    db: sqlite3.Connection, run_dir: RunDir, task: Task, row: dict[str, Any], known: dict[str, Image]
) -> Rollout:
    rollout_id = f"g{row['group_id']}.{row['member']}"
    payload = Payload(())
    if row["segment"] is not None:
        place = Place(row["segment"], row["offset"], row["length"], row["crc"])
        payload = load_payload(run_dir, place, rollout_id)
    branches = with_patches(db, run_dir, row["segment"], payload.branches, known)
    metrics = msgspec.json.decode(row["metrics"]) if row["metrics"] else {}
    return Rollout(
        rollout_id=rollout_id,
        group_id=row["group_id"],
        member=row["member"],
        task=task,
        status=RolloutStatus(row["status"]),
        branches=branches,
        reward=row["reward"] or 0.0,
        agent_rewards=payload.agent_rewards,
        env_s=metrics.pop(ENV_S, 0.0),
        metrics=metrics,
        num_turns=row["num_turns"] or 0,
        turns=msgspec.json.decode(row["turns"], type=tuple[ScoredTurn, ...]) if row["turns"] else (),
        started_at=row["started_at"] or 0.0,
        finished_at=row["finished_at"] or 0.0,
        error=row["error"],
        dropped_by=row["dropped_by"],
        reason=None if row["reason"] is None else Reason(row["reason"]),
    )
