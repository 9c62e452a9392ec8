"""Questions to a run's ledger, from any process, while the run lives or after."""

from __future__ import annotations

import sqlite3
from types import TracebackType
from typing import Any

import msgspec

from stretto.base.paths import RunDir
from stretto.ledger import resume, schema
from stretto.records.rollout import Group


class LedgerReader:
    """A read-only connection. Rows come as dicts; JSON columns are decoded."""

    def __init__(self, run_dir: RunDir) -> None:
        """Raises: DataError when there is no ledger, or it is damaged or of another version."""
        self._run_dir = run_dir
        self._db = schema.open_for_reading(run_dir.ledger)

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Any query over the tables of `schema.py`."""
        return [_decoded(row) for row in self._db.execute(query, values)]

    def incarnations(self) -> list[dict[str, Any]]:
        """The lives of the run, in order."""
        return self.rows("SELECT * FROM incarnations ORDER BY incarnation")

    def draws_by_state(self) -> dict[str, int]:
        """How many draws there are in each state."""
        return dict(map(tuple, self._db.execute("SELECT state, count(*) FROM draws GROUP BY state")))

    def drops_by_reason(self) -> dict[str, int]:
        """How many groups were dropped, for each reason."""
        query = "SELECT reason, count(*) FROM draws WHERE state = 'dropped' GROUP BY reason"
        return dict(map(tuple, self._db.execute(query)))

    def rollouts_by_status(self) -> dict[str, int]:
        """How many rollouts (every try) there are in each status."""
        return dict(map(tuple, self._db.execute("SELECT status, count(*) FROM rollouts GROUP BY status")))

    def batches(self) -> list[dict[str, Any]]:
        """The batches of the surviving lineage, by step."""
        return self.rows("SELECT * FROM batches WHERE state != 'undone' ORDER BY step")

    def trained_rollouts(self, step: int) -> list[dict[str, Any]]:
        """The rollout rows of the batch of `step`, in the surviving lineage."""
        query = "SELECT * FROM live_rollouts WHERE step = ? ORDER BY group_id, member"
        return self.rows(query, step)

    def num_reused(self) -> int:
        """Rollouts trained in a later life of the run than the one that sampled them."""
        query = (
            "SELECT count(*) FROM live_rollouts WHERE batch_state = 'trained' AND incarnation < shipped_in"
        )
        return self._db.execute(query).fetchone()[0]

    def group(self, group_id: int) -> Group:
        """A finished group with its tokens.

        Raises: DataError when its payload is no longer kept or damaged.
        """
        return resume.load_group(self._db, self._run_dir, group_id)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return self.rows("SELECT * FROM events WHERE kind = ? ORDER BY id", kind)


def _decoded(row: sqlite3.Row) -> dict[str, Any]:
    values = dict(row)
    for name in ("info", "data", "metrics"):
        if isinstance(values.get(name), str):
            values[name] = msgspec.json.decode(values[name])
    return values
