"""The work of the ledger per step grows neither with the steps before it, nor with the groups in flight."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from ledger_runs import MEMBERS, Run, group, steps, task, turn

from stretto.base.paths import RunDir
from stretto.ledger import Ledger, schema
from stretto.orchestrator.groups.bounds import Bounds
from stretto.orchestrator.groups.buffer import Buffer, SlotState

SCAN = re.compile(r"\bSCAN (\w+)")


def scanned(db: sqlite3.Connection, statement: str) -> list[str]:
    """The tables that a statement reads from end to end."""
    plan = [row[3] for row in db.execute("EXPLAIN QUERY PLAN " + statement)]
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return [name for line in plan for name in SCAN.findall(line) if name in tables]


def test_no_statement_of_a_step_reads_a_whole_table(tmp_path: Path) -> None:
    run = steps(RunDir(tmp_path / "run"), 3)
    statements: list[str] = []
    run.ledger._db.set_trace_callback(statements.append)
    for draw in (6, 7, 8):
        run.start(draw)
    run.ledger.turn_played(6, 0, turn(0))
    run.ledger.groups_finished([group(6, 3)])
    run.ledger.groups_finished([group(7, 3)])
    run.ledger.group_dropped(8, "stale")
    run.train(4, [6, 7])
    assert run.ledger.next_draw() == 9 and run.ledger.open_draws() == []
    run.ledger.checkpoint_saved(4)
    run.ledger._db.set_trace_callback(None)
    written = [text for text in statements if not text.startswith(("BEGIN", "COMMIT", "--"))]
    assert len(written) > 20
    assert {text: found for text in written if (found := scanned(run.ledger._db, text))} == {}
    # The check itself sees a scan.
    assert scanned(run.ledger._db, "SELECT * FROM batches WHERE step = 1 AND state = 'shipped'") == ["batches"]
    run.close()


def test_dropping_a_group_reads_only_its_own_rows(tmp_path: Path) -> None:
    run = Run(RunDir(tmp_path / "run")).begin()
    for draw in range(3):
        run.start(draw)
    run.ledger.group_dropped(1, "stale")
    running = run.ledger._db.execute("SELECT group_id, count(*) FROM rollouts WHERE status = 'running' GROUP BY 1")
    assert running.fetchall() == [(0, MEMBERS), (2, MEMBERS)]
    run.ledger.groups_finished([group(2, 0)])
    run.close()


def test_all_drops_of_a_batch_are_one_commit(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    ledger = Ledger(run_dir)
    ledger.run_started({})
    buffer = Buffer(Bounds(groups_per_batch=2, max_async_level=1, max_off_policy_steps=0), ledger)
    slots = []
    for draw in range(2):
        ledger.task_drawn(draw, task(draw))
        slots.append(buffer.start(draw, task(draw)))
    for each in slots:
        buffer.complete(each, group(each.group_id, 0), has_signal=True)
    late = Buffer(Bounds(groups_per_batch=8, max_async_level=1, max_off_policy_steps=0), ledger)
    for draw in range(2, 10):
        ledger.task_drawn(draw, task(draw))
        late.start(draw, task(draw))
    statements: list[str] = []
    ledger._db.set_trace_callback(statements.append)
    late.ship([], [])  # everything else is too old for the step after it
    ledger._db.set_trace_callback(None)
    assert statements.count("COMMIT") == 1
    assert late.slots == {} and slots[0].state is SlotState.READY
    states = ledger._db.execute("SELECT state, count(*) FROM draws GROUP BY state").fetchall()
    assert dict(states) == {"drawn": 2, "dropped": 8}
    ledger.close()


def test_a_missing_index_is_created(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    steps(run_dir, 1).close()
    db = sqlite3.connect(run_dir.ledger)
    db.execute("DROP INDEX versions_published")
    db.close()
    Ledger(run_dir).close()
    with schema.open_for_reading(run_dir.ledger) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'versions_published'").fetchone()[0] == 1
    db.close()
