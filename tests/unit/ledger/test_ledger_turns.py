"""Scored turns in the ledger: what the environment said, what was made of it, and what a resume finds again."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3

import ledger_runs
import msgspec
import pytest
from ledger_runs import Run, turn

from stretto.base.errors import EngineError
from stretto.base.paths import RunDir
from stretto.ledger import LedgerReader, writer
from stretto.ledger.schema import open_for_reading, open_for_writing
from stretto.records.rollout import ScoredTurn, TurnSpan

TURNS = (ScoredTurn(agent="policy", reward=0.5, value=0.25, state="a"), ScoredTurn(agent="other", reward=0.0))


def scored_group(draw=0):
    group = ledger_runs.group(draw, 0)
    first, *others = group.rollouts
    branch = msgspec.structs.replace(first.branches[0], turns=(TurnSpan(0, 0, 2), TurnSpan(1, 2, 3)))
    first = msgspec.structs.replace(first, branches=(branch,), turns=TURNS)
    return msgspec.structs.replace(group, rollouts=(first, *others), turn_advantages=((0.1, -0.2), (), (), ()))


def test_turns_are_a_column_and_come_back_with_the_group(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run = ledger_runs.Run(run_dir).begin()
    run.start(0)
    run.ledger.groups_finished([scored_group()])
    run.ledger.close()
    with LedgerReader(run_dir) as reader:
        rows = reader.rows("SELECT turns FROM rollouts ORDER BY member")
        group = reader.group(0)
    assert json.loads(rows[0]["turns"]) == [
        {"agent": "policy", "reward": 0.5, "value": 0.25, "state": "a", "advantage": 0.1},
        {"agent": "other", "reward": 0.0, "advantage": -0.2},
    ]
    assert [row["turns"] for row in rows[1:]] == [None] * 3
    assert group.rollouts[0].turns == TURNS
    assert group.rollouts[0].branches[0].turns == (TurnSpan(0, 0, 2), TurnSpan(1, 2, 3))
    assert group.rollouts[1].turns == () and group.rollouts[1].branches[0].turns == ()


def test_a_ledger_without_the_column_is_read_and_continued(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run = ledger_runs.Run(run_dir).begin()
    run.roll(0)
    run.ledger.close()
    with sqlite3.connect(run_dir.ledger) as db:
        db.execute("DROP VIEW live_rollouts")
        db.execute("ALTER TABLE rollouts DROP COLUMN turns")
        view = "SELECT b.step, b.state AS batch_state, b.incarnation AS shipped_in, rollouts.* FROM batches b"
        joins = "JOIN batch_rollouts USING (batch) JOIN rollouts USING (row) WHERE b.state != 'undone'"
        db.execute(f"CREATE VIEW live_rollouts AS {view} {joins}")
    db.close()
    assert open_for_reading(run_dir.ledger).execute("SELECT turns FROM rollouts").fetchone()["turns"] is None
    with LedgerReader(run_dir) as reader:
        assert reader.group(0).rollouts[0].turns == ()
    assert (
        "turns"
        in open_for_writing(run_dir.ledger)
        .execute("SELECT group_concat(name) FROM pragma_table_info('rollouts')")
        .fetchone()[0]
    )


def chains_of(run: Run) -> dict[tuple[int, int], list[int]]:
    """The numbers of the turns that are stored for each member."""
    found = run.ledger.partial_rollouts(run.version, 0)
    return {key: [each.index for each in partial.turns] for key, partial in found.items()}


async def test_turns_that_the_disk_refuses_are_stored_once_it_takes_them(tmp_path, monkeypatch, caplog):
    run = Run(RunDir(tmp_path)).begin()
    run.start(0)
    monkeypatch.setattr(writer, "TURN_COMMIT_INTERVAL_S", 0.01)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        for index in range(2):
            run.ledger.turn_played(0, 0, turn(index))
        await asyncio.sleep(0.05)
    [said] = [record.getMessage() for record in caplog.records]
    assert "turns of 1 unfinished rollouts are not stored yet" in said and "free some space" in said
    run.ledger.turn_played(0, 1, turn(0))
    run.ledger.turn_played(0, 0, turn(2))
    await asyncio.sleep(0.05)
    assert run.ledger._scalar("SELECT count(*) FROM rollouts WHERE segment IS NOT NULL") == 2
    run.close()
    run = Run(RunDir(tmp_path))
    assert chains_of(run) == {(0, 0): [0, 1, 2], (0, 1): [0]}
    run.close()


def refuse(*_):
    raise OSError(errno.ENOSPC, "no space left on device")


async def test_a_ledger_that_cannot_be_written_at_the_end_is_free_for_another_process(tmp_path, monkeypatch):
    run = Run(RunDir(tmp_path)).begin()
    run.start(0)
    run.ledger.turn_played(0, 0, turn(0))
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        with pytest.raises(EngineError, match="free some space"):
            run.close()
    Run(RunDir(tmp_path)).close()


def test_no_segment_is_deleted_before_what_stands_in_its_place_is_committed(tmp_path, monkeypatch):
    run = Run(RunDir(tmp_path)).begin()
    run.start(0)
    run.ledger.turn_played(0, 0, turn(0, spans=((0, 0, 4), (1, 4, 8)), reason="abort"))
    run.close()
    run = Run(RunDir(tmp_path), segment_bytes=1)
    monkeypatch.setattr(run.ledger, "_rotate", lambda: pytest.fail("a segment ends inside a transaction"))
    assert chains_of(run) == {(0, 0): [0]}
    run.close()
