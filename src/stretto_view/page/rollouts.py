"""Rollouts of a run, a page at a time, newest first: a million of them cost no more than fifty.

A ledger has no index by reward, length or status, and the page only reads, so it adds none. A request searches the
rows from the newest back, a stretch at a time, until it has a page or its time is used up. Its answer says where the
next request continues.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError
from stretto.ledger.reader import LedgerReader
from stretto.ledger.schema import SHOWN_STATUS

PAGE = 50
STATUSES = ("finished", "truncated", "failed", "dropped", "running")
_STRETCH = 10_000  # rows that are searched before the time is checked again
_BUDGET_S = 0.1
_COLUMNS = f"""
    r.row, r.group_id, r.member, {SHOWN_STATUS} AS status, r.dropped_by, r.reason, r.reward, r.advantage,
    r.first_version, r.last_version, r.num_turns, r.num_tokens, r.num_sampled_tokens, r.started_at, r.finished_at,
    r.error, d.env, d.task_id, d.state AS group_state, d.reason AS group_reason, r.segment, r.offset, r.length, r.crc
"""
_STEP = """
    (SELECT b.step FROM batch_rollouts x JOIN batches b USING (batch)
     WHERE x.row = r.row AND b.state != 'undone') AS step
"""
SORTS = {
    "newest": "r.row DESC",
    "best": "r.reward DESC, r.row",
    "worst": "r.reward, r.row",
    "longest": "r.num_sampled_tokens DESC, r.row",
}
"""Orders of one step's rollouts; rollouts of all steps are always listed newest first."""


@dataclass(frozen=True)
class Filters:
    """Conditions that rollouts must meet; None: no condition."""

    step: int | None = None
    env: str | None = None
    status: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    version: int | None = None
    task: str | None = None
    sort: str = "newest"

    def clauses(self) -> tuple[list[str], list[Any]]:
        """Conditions over `rollouts r` and `draws d`, and their values."""
        found = [
            ("d.env = ?", self.env),
            ("d.task_id = ?", self.task),
            (f"{SHOWN_STATUS} = ?", self.status),
            ("r.reward >= ?", self.min_reward),
            ("r.reward <= ?", self.max_reward),
            ("r.num_sampled_tokens >= ?", self.min_tokens),
            ("r.num_sampled_tokens <= ?", self.max_tokens),
            ("? BETWEEN r.first_version AND r.last_version", self.version),
        ]
        given = [(clause, value) for clause, value in found if value is not None]
        if self.status is None:
            given.append(("r.status NOT IN (?, 'lost')", "running"))
        return [clause for clause, _ in given], [value for _, value in given]


def page(ledger: LedgerReader, filters: Filters, *, before: int | None = None, limit: int = PAGE) -> dict[str, Any]:
    """The rows that meet the conditions, and `next`: where the next page begins, None after the last one.

    before: `next` of the previous page. `searched` is how many rows were searched for this page.

    Raises: ConfigError for an unknown sort, or one of a step without the step.
    """
    if filters.sort not in SORTS:
        raise ConfigError(f"sort {filters.sort!r}: the orders are {', '.join(SORTS)}.")
    if filters.step is None and filters.sort != "newest":
        raise ConfigError(f"sort {filters.sort!r} orders the rollouts of one step; give `step`, too.")
    if filters.step is not None:
        return _of_step(ledger, filters, before or 0, limit)
    if filters.status == "running":
        return _running(ledger, filters, before or 0, limit)
    clauses, values = filters.clauses()
    where = " AND ".join(["r.row < ?", "r.row >= ?", *clauses])
    query = f"""
        SELECT {_COLUMNS}, {_STEP} FROM rollouts r JOIN draws d USING (group_id)
        WHERE {where} ORDER BY r.row DESC LIMIT ?
    """
    [newest] = ledger.rows("SELECT max(row) AS row FROM rollouts")
    place = before if before is not None else (newest["row"] or 0) + 1
    rows: list[dict[str, Any]] = []
    began, first = time.monotonic(), place
    while place > 1 and len(rows) < limit and time.monotonic() - began < _BUDGET_S:
        low = max(1, place - _STRETCH)
        more = ledger.rows(query, place, low, *values, limit - len(rows))
        rows += more
        place = more[-1]["row"] if len(rows) == limit else low
    return {"rows": rows, "next": place if place > 1 else None, "searched": first - place}


def _running(ledger: LedgerReader, filters: Filters, skipped: int, limit: int) -> dict[str, Any]:
    """As `page`, for rollouts under way, the one that began first at the top; `next` counts the rows before."""
    clauses, values = filters.clauses()
    query = f"""
        SELECT {_COLUMNS}, NULL AS step FROM rollouts r JOIN draws d USING (group_id)
        WHERE r.status = 'running' AND {" AND ".join(clauses)} ORDER BY r.row LIMIT ? OFFSET ?
    """
    rows = ledger.rows(query, *values, limit + 1, skipped)
    following = skipped + limit if len(rows) > limit else None
    return {"rows": rows[:limit], "next": following, "searched": len(rows)}


def _of_step(ledger: LedgerReader, filters: Filters, skipped: int, limit: int) -> dict[str, Any]:
    """As `page`, for the batch of one step, in any order; here `next` counts the rows of earlier pages."""
    clauses, values = filters.clauses()
    where = " AND ".join(["b.step = ?", "b.state != 'undone'", *clauses])
    query = f"""
        SELECT {_COLUMNS}, b.step FROM batches b JOIN batch_rollouts x USING (batch) JOIN rollouts r USING (row)
        JOIN draws d USING (group_id) WHERE {where} ORDER BY {SORTS[filters.sort]} LIMIT ? OFFSET ?
    """
    rows = ledger.rows(query, filters.step, *values, limit + 1, skipped)
    is_more = len(rows) > limit
    return {"rows": rows[:limit], "next": skipped + limit if is_more else None, "searched": len(rows)}


def choices(ledger: LedgerReader) -> dict[str, Any]:
    """The values to filter by: environments, statuses, the first and the last step."""
    envs = [row["env"] for row in ledger.rows("SELECT env FROM draws GROUP BY env ORDER BY env LIMIT 200")]
    [steps] = ledger.rows("SELECT min(step) AS first, max(step) AS last FROM batches WHERE state != 'undone'")
    return {"envs": envs, "statuses": STATUSES, **steps}
