"""Reads a run's ledger, from any process, during the run or after it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from stretto.base.errors import DataError
from stretto.base.paths import RunDir
from stretto.ledger import reuse, schema, stored_images
from stretto.ledger.token_file import Place, load_payload, load_turns
from stretto.records.images import Image
from stretto.records.partial import Turn, latest_turns
from stretto.records.rollout import Branch, Group


class LedgerReader:
    """A read-only connection. Rows are dicts with decoded JSON columns."""

    def __init__(self, run_dir: RunDir) -> None:
        """Raises: DataError if there is no ledger, or if it is damaged or of another version."""
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
        """The rows of any query over the tables of `schema.py`. Raises: DataError for a damaged one."""
        found = self._all(query, *values)
        try:
            return [_decoded(row) for row in found]
        except ValueError as cause:
            raise DataError(f"{self._run_dir.ledger}: a row is damaged: {cause}") from cause

    def drops_by_reason(self) -> dict[str, int]:
        """Number of dropped groups for each reason."""
        query = "SELECT reason, count(*) FROM draws WHERE state = 'dropped' GROUP BY reason"
        return dict(map(tuple, self._all(query)))

    def rollouts_by_status(self) -> dict[str, int]:
        """Number of rollouts in each status; every attempt counts."""
        query = f"SELECT {schema.SHOWN_STATUS} AS shown, count(*) FROM rollouts r GROUP BY shown"
        return dict(map(tuple, self._all(query)))

    def batches(self) -> list[dict[str, Any]]:
        """The batches of the surviving lineage, by step."""
        return self.rows("SELECT * FROM batches WHERE state != 'undone' ORDER BY step")

    def trained_rollouts(self, step: int) -> list[dict[str, Any]]:
        """The rollout rows of the batch of `step`, in the surviving lineage."""
        query = "SELECT * FROM live_rollouts WHERE step = ? ORDER BY group_id, member"
        return self.rows(query, step)

    def group(self, group_id: int) -> Group:
        """A finished group with its tokens.

        Raises: DataError if its payload is damaged or was deleted.
        """
        with schema.guarded(self._run_dir.ledger):
            return reuse.load_group(self._db, self._run_dir, group_id)

    def branches(self, row: Mapping[str, Any]) -> tuple[Branch, ...]:
        """The tokens of a row of `rollouts` that has ended, images without pixels; () if it has none.

        Raises: DataError if its payload is damaged or was deleted.
        """
        if row["segment"] is None:
            return ()
        return load_payload(self._run_dir, *_place(row)).branches

    def turns(self, row: Mapping[str, Any]) -> list[Turn]:
        """The turns so far of a row of `rollouts` that has not ended; [] before its first one ends.

        Raises: DataError if one is damaged or was deleted.
        """
        return [] if row["segment"] is None else latest_turns(load_turns(self._run_dir, *_place(row)))

    def image(self, name: str) -> Image:
        """The image of this hash, with its pixels.

        Raises: DataError if it is damaged, or no rollout that is kept shows it.
        """
        with schema.guarded(self._run_dir.ledger):
            return stored_images.find_image(self._db, self._run_dir, name)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return self.rows("SELECT * FROM events WHERE kind = ? ORDER BY id", kind)

    def events_up_to(self, kind: str, step: int) -> list[dict[str, Any]]:
        """Those whose data have a `step` up to this one that no later start of the run has undone."""
        query = "SELECT incarnation, coalesce(resumed_step, 0) FROM incarnations"
        starts = [tuple(row) for row in self._all(query)]

        def is_kept(event: dict[str, Any]) -> bool:
            later = (resumed for incarnation, resumed in starts if incarnation > event["incarnation"])
            return bool(event["data"]["step"] <= min((step, *later)))

        return list(filter(is_kept, self.events(kind)))

    def _all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with schema.guarded(self._run_dir.ledger):
            return self._db.execute(query, values).fetchall()


def _place(row: Mapping[str, Any]) -> tuple[Place, str]:
    place = Place(row["segment"], row["offset"], row["length"], row["crc"])
    return place, f"g{row['group_id']}.{row['member']}"


def _decoded(row: sqlite3.Row) -> dict[str, Any]:
    values = dict(row)
    for name in ("info", "data", "metrics"):
        if isinstance(values.get(name), str):
            values[name] = msgspec.json.decode(values[name])
    return values
