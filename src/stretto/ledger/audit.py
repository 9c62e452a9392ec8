"""Checks in the ledger whether a run kept its promises, even if processes died meanwhile.

Only the surviving lineage is checked: a resume may undo what was trained before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from stretto.base.errors import DataError, WireError
from stretto.base.paths import RunDir
from stretto.ledger import schema
from stretto.ledger.reuse import first_draw, first_step
from stretto.ledger.stored_images import damaged_images, hashes_in
from stretto.ledger.token_file import Place, load_payload, load_turns


def audit(run_dir: RunDir | Path | str, *, payloads: bool = True) -> list[str]:
    """Every promise that the run broke, one sentence each; [] if it broke none.

    payloads: also read and verify every payload that still exists; its time grows with the size of the segments.

    Raises: DataError if there is no ledger to read.
    """
    run_dir = run_dir if isinstance(run_dir, RunDir) else RunDir(Path(run_dir))
    db = schema.open_for_reading(run_dir.ledger)
    try:
        with schema.guarded(run_dir.ledger):
            broken = [line for check in PROMISES for line in check(db)]
            return broken + ([*_damaged(db, run_dir), *damaged_images(db, run_dir)] if payloads else [])
    finally:
        db.close()


def _trained_twice(db: sqlite3.Connection) -> Iterator[str]:
    query = (
        "SELECT group_id, member, count(*), group_concat(step) FROM live_rollouts "
        "GROUP BY group_id, member HAVING count(*) > 1"
    )
    for group_id, member, count, steps in db.execute(query):
        yield f"rollout g{group_id}.{member} is in {count} batches (steps {steps})"


def _never_finished(db: sqlite3.Connection) -> Iterator[str]:
    query = (
        "SELECT step, group_id, member, status || coalesce(', and dropped by filter ' || dropped_by, '') "
        "FROM live_rollouts WHERE status NOT IN ('finished', 'truncated') OR dropped_by IS NOT NULL"
    )
    for step, group_id, member, status in db.execute(query):
        yield f"step {step} has rollout g{group_id}.{member}, which is {status}"
    query = (
        "SELECT DISTINCT step, group_id, d.state FROM live_rollouts JOIN draws d USING (group_id) "
        "WHERE d.state NOT IN ('shipped', 'trained')"
    )
    for step, group_id, state in db.execute(query):
        yield f"step {step} has group {group_id}, which is {state}"


def _wrong_age(db: sqlite3.Connection) -> Iterator[str]:
    """Check staleness against the bound of the incarnation that shipped the batch."""
    bounds = {i: msgspec.json.decode(info) for i, info in db.execute("SELECT incarnation, info FROM incarnations")}
    query = (
        "SELECT step, shipped_in, group_id, member, first_version FROM live_rollouts WHERE first_version IS NOT NULL"
    )
    for step, incarnation, group_id, member, version in db.execute(query):
        bound = bounds.get(incarnation, {}).get("max_off_policy_steps")
        what = f"step {step} has rollout g{group_id}.{member} of version {version}"
        if bound is not None and version < step - 1 - bound:
            yield f"{what}, older than {step - 1 - bound}"
        if version > step - 1:
            yield f"{what}, which came after it"


def _step_gaps(db: sqlite3.Connection) -> Iterator[str]:
    first = first_step(db) + 1
    for what, condition in (("steps of the batches", "state != 'undone'"), ("trained steps", "state = 'trained'")):
        steps = schema.column(db, f"SELECT step FROM batches WHERE {condition} ORDER BY step")
        yield from _gaps(what, steps, first)


def _lost(db: sqlite3.Connection) -> Iterator[str]:
    """Steps that cannot be checked, because a resume did not find them in the ledger."""
    query = (
        "SELECT step FROM batches b WHERE state != 'undone' "
        "AND NOT EXISTS (SELECT 1 FROM batch_rollouts WHERE batch = b.batch) ORDER BY step"
    )
    if steps := schema.column(db, query):
        yield f"the rollouts of steps {_runs(steps)} are unknown: the end of the ledger was lost before a resume"


def _version_gaps(db: sqlite3.Connection) -> Iterator[str]:
    query = "SELECT DISTINCT version FROM versions WHERE state != 'undone' ORDER BY version"
    versions, first = schema.column(db, query), first_step(db)
    infos = (msgspec.json.decode(info) for info in schema.column(db, "SELECT info FROM incarnations"))
    interval = max((info.get("update_interval", 1) for info in infos), default=1)
    if versions and (versions[0] != first or any(after - before > interval for before, after in pairwise(versions))):
        each = f", at most {interval} apart" if interval > 1 else ""
        yield f"published versions are not {first}, {first + 1}, {first + 2}, ...{each}: {_runs(versions)}"
    query = "SELECT coalesce(max(step), ?) FROM batches WHERE state != 'undone'"
    shipped = schema.scalar(db, query, first)
    if versions and versions[-1] > shipped:
        yield f"version {versions[-1]} was published, but only steps up to {shipped} were shipped"
    query = "SELECT DISTINCT last_version FROM live_rollouts WHERE last_version NOT IN (SELECT version FROM versions)"
    for version in schema.column(db, query):
        yield f"rollouts were sampled from version {version}, which was never published"


def _gaps(what: str, numbers: list[int], first: int) -> Iterator[str]:
    if numbers != list(range(first, first + len(numbers))):
        yield f"{what} are not {first}, {first + 1}, {first + 2}, ...: {_runs(numbers)}"


def _open_ends(db: sqlite3.Connection) -> Iterator[str]:
    query = (
        "SELECT group_id, state FROM draws WHERE state IN ('finished', 'shipped', 'trained') AND finished_at IS NULL"
    )
    for group_id, state in db.execute(query):
        yield f"group {group_id} is {state} but never finished"
    first = first_draw(db)
    (draws, newest) = db.execute(
        "SELECT count(*), coalesce(max(group_id) + 1, ?) FROM draws WHERE group_id >= ?", (first, first)
    ).fetchone()
    if draws != newest - first:
        yield f"draw numbers have gaps: {draws} draws from {first} on, the next number is {newest}"


def _damaged(db: sqlite3.Connection, run_dir: RunDir) -> Iterator[str]:
    """Damaged payloads, but for those of lost rollouts: a resume has found these, and has played them again."""
    query = (
        "SELECT group_id, member, finished_at, segment, offset, length, crc FROM rollouts "
        "LEFT JOIN segments USING (segment) WHERE segment IS NOT NULL AND deleted_at IS NULL AND "
        "(finished_at IS NOT NULL AND status != 'lost' OR "
        "group_id IN (SELECT group_id FROM draws WHERE state = 'drawn'))"
    )
    for group_id, member, finished_at, *where in db.execute(query).fetchall():
        place, rollout_id = Place(*where), f"g{group_id}.{member}"
        try:
            if finished_at is None:
                load_turns(run_dir, place, rollout_id)
            else:
                branches = load_payload(run_dir, place, rollout_id).branches
                shown = {image.hash for branch in branches for image in branch.images}
                for name in shown - hashes_in(db, place.segment) if shown else ():
                    yield f"rollout {rollout_id} shows image {name}, which segment {place.segment} does not have"
        except (DataError, WireError) as error:
            yield str(error)


PROMISES = (_trained_twice, _never_finished, _wrong_age, _step_gaps, _lost, _version_gaps, _open_ends)
"""What is checked without reading payloads, one function for each promise."""
MOST_SHOWN = 5


def report_of(run_dir: RunDir, *, payloads: bool = False) -> str:
    """What `audit` found, as lines for a person."""
    try:
        broken = audit(run_dir, payloads=payloads)
    except DataError as error:
        return f"cannot be checked: {error}"
    if not broken:
        also = ", and all payloads are whole" if payloads else ""
        return f"{len(PROMISES)} promises kept (each rollout trained once, none too old, no gaps){also}"
    more = [f"and {len(broken) - MOST_SHOWN} more"] * (len(broken) > MOST_SHOWN)
    return "; ".join([f"{len(broken)} faults: {broken[0]}", *broken[1:MOST_SHOWN], *more])


def _runs(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
