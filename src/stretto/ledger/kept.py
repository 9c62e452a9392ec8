"""Samples of every step that are kept for ever, and the deletion of the other token payloads.

Before a segment is deleted, the payloads of some rollouts per trained step move to a file of their own (`KEPT`), with
their images, so that one can still read what the policy said in step 20 of 10,000. Their rows then name that file. Rows
and payloads are on the disk before the segment goes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.base.errors import DataError, WireError
from stretto.base.paths import KEPT, RunDir
from stretto.ledger import reuse, schema, stored_images
from stretto.ledger.token_file import Place, SegmentWriter, load_payload


@dataclass(frozen=True)
class Limits:
    """Which token payloads stay; None: no limit."""

    steps: int | None = None
    num_bytes: int | None = 10_000_000_000
    samples: int = 16


def deletable_segments(db: sqlite3.Connection, limits: Limits) -> Iterator[tuple[int, int]]:
    """Segments beyond the limits, the oldest first, each with the last step that may be deleted.

    All rollouts of such a segment are trained or dropped. What came after the newest checkpoint stays at any age and
    size: a resume may need it.
    """
    # `state != 'undone'` lets SQLite use the index batches_live.
    query = "SELECT coalesce(max(step), 0) FROM batches WHERE state = 'trained' AND state != 'undone'"
    trained = schema.scalar(db, query)
    saved = schema.scalar(db, "SELECT max(step) FROM checkpoints WHERE state = 'saved'")
    newest = trained if saved is None else min(trained, saved)
    rows = db.execute(
        "SELECT segment, closed_at_step, num_bytes FROM segments WHERE deleted_at IS NULL ORDER BY segment"
    ).fetchall()
    excess = 0 if limits.num_bytes is None else sum(row[2] for row in rows) - limits.num_bytes
    for segment, closed_at_step, num_bytes in rows:
        is_old = limits.steps is not None and closed_at_step <= trained - limits.steps
        horizon = newest if excess > 0 or limits.steps is None else min(newest, trained - limits.steps)
        if not (is_old or excess > 0) or closed_at_step > newest or reuse.is_needed(db, segment, horizon):
            continue
        excess -= num_bytes
        yield segment, horizon


def keep_samples(db: sqlite3.Connection, run_dir: RunDir, segment: int, samples: int) -> int:
    """Copy the samples of a segment that are kept and let their rows name the copies; the number of samples.

    Call it inside a transaction. A damaged payload is left out: the segment goes with it.
    """
    rows = _chosen(db, segment, samples)
    if not rows:
        return 0
    writer = SegmentWriter(run_dir, KEPT, _end(db))
    known = stored_images.hashes_in(db, KEPT)
    try:
        for row, rollout_id, place in rows:
            try:
                payload = load_payload(run_dir, place, rollout_id)
                names = {image.hash for branch in payload.branches for image in branch.images} - known
                shown = [stored_images.load(db, run_dir, segment, name) for name in sorted(names)]
            except (DataError, WireError):
                continue
            places = writer.append_images(shown)
            db.executemany(stored_images.INSERT, [(image.hash, *at) for image, at in zip(shown, places)])
            known |= names
            db.execute(schema.SET_PLACE, (*writer.append_payload(payload), row))
    finally:
        writer.close()
    return len(rows)


def mark_deleted(db: sqlite3.Connection, segment: int) -> None:
    """Record that the file of a segment goes: an opening deletes it if a kill comes before that."""
    db.execute("UPDATE segments SET deleted_at = ? WHERE segment = ?", (time.time(), segment))


def _chosen(db: sqlite3.Connection, segment: int, samples: int) -> list[tuple[int, str, Place]]:
    """Rows of the segment whose payloads are kept: a quarter best, a quarter worst, the first ones of each step.

    The rank is among all rollouts of the step, so that a step in two segments does not keep more.
    """
    quarter = samples // 4
    query = """
        WITH steps AS (SELECT DISTINCT step FROM live_rollouts WHERE segment = ?),
        ranked AS (SELECT row, segment,
            row_number() OVER (PARTITION BY step ORDER BY reward DESC, row) AS best,
            row_number() OVER (PARTITION BY step ORDER BY reward, row) AS worst,
            row_number() OVER (PARTITION BY step ORDER BY row) AS first
            FROM live_rollouts WHERE step IN (SELECT step FROM steps))
        SELECT row, group_id, member, segment, offset, length, crc FROM rollouts WHERE row IN (
            SELECT row FROM ranked WHERE segment = ? AND (best <= ? OR worst <= ? OR first <= ?)) ORDER BY row
    """
    rows = db.execute(query, (segment, segment, quarter, quarter, samples - 2 * quarter)).fetchall()
    return [(row, f"g{group_id}.{member}", Place(*place)) for row, group_id, member, *place in rows]


def _end(db: sqlite3.Connection) -> int:
    """Where the rows of the kept file end."""
    ends: list[int] = [
        schema.scalar(db, f"SELECT coalesce(max(offset + length), 0) FROM {table} WHERE segment = ?", KEPT)
        for table in ("rollouts", "images")
    ]
    return max(ends)
