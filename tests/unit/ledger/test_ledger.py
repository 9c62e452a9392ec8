"""The ledger: what it records, what a resume may use again, and what its audit finds."""

from __future__ import annotations

import sqlite3

import msgspec
import pytest
from ledger_runs import MEMBERS, Run, group, num_reused, steps, task, turn

from stretto.base.errors import ConfigError, DataError, EngineError
from stretto.base.paths import RunDir
from stretto.ledger import Ledger, LedgerReader, Limits, audit, schema
from stretto.ledger.audit import report_of
from stretto.records.generate import VersionSpan
from stretto.records.outcomes import Reason
from stretto.records.rollout import Group, RolloutStatus


def same_group(a: Group, b: Group) -> bool:
    def plain(g: Group) -> list:
        return [
            (r.rollout_id, r.status, r.dropped_by, r.reason, r.reward, r.metrics, r.error, r.num_turns, r.started_at,
             r.finished_at, r.task,
             [(x.token_ids.tolist(), x.is_sampled.tolist(), x.logprobs.tolist(), x.temperature, x.versions)
              for x in r.branches])
            for r in g.rollouts
        ]  # fmt: skip

    return plain(a) == plain(b) and (a.group_id, a.task, a.advantages) == (b.group_id, b.task, b.advantages)


def test_a_clean_run_passes_its_audit_and_its_rows_can_be_read(run_dir: RunDir) -> None:
    steps(run_dir, 3).close()
    assert audit(run_dir) == []
    with LedgerReader(run_dir) as reader:
        assert [row["state"] for row in reader.rows("SELECT state FROM draws")] == ["trained"] * 6
        assert reader.rollouts_by_status() == {"finished": 6 * MEMBERS}
        assert [batch["step"] for batch in reader.batches()] == [1, 2, 3]
        assert reader.batches()[0]["metrics"] == {"loss": 1.0}
        assert [row["first_version"] for row in reader.trained_rollouts(3)] == [2] * 2 * MEMBERS
        assert num_reused(reader) == 0


def test_a_group_is_loaded_as_it_was_written(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    sent = [group(0, 0), group(1, 0, 1, status=RolloutStatus.TRUNCATED), group(2, 0, failed=(0, 2))]
    for each in sent:
        run.start(each.group_id)
        run.ledger.groups_finished([each])
    run.close()
    with LedgerReader(run_dir) as reader:
        assert all(same_group(reader.group(each.group_id), each) for each in sent)


def test_groups_that_end_together_are_one_commit(run_dir: RunDir) -> None:
    run, statements = Run(run_dir).begin(), []
    sent = [group(0, 0), group(1, 0, failed=(0, 2))]
    for each in sent:
        run.start(each.group_id)
    run.ledger._db.set_trace_callback(statements.append)
    run.ledger.groups_finished(sent)
    assert statements.count("COMMIT") == 1
    run.close()
    with LedgerReader(run_dir) as reader:
        assert all(same_group(reader.group(each.group_id), each) for each in sent)


def test_what_a_filter_dropped_is_a_column_and_is_not_trained(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    sent = group(0, 0, status=RolloutStatus.TRUNCATED)
    dropped = msgspec.structs.replace(sent.rollouts[1], dropped_by="repetition", reason=Reason.TURN_LIMIT)
    sent = msgspec.structs.replace(sent, rollouts=(sent.rollouts[0], dropped, *sent.rollouts[2:]))
    run.start(0)
    run.ledger.groups_finished([sent])
    run.ledger.batch_shipped(1, [0])
    run.close()
    with LedgerReader(run_dir) as reader:
        assert same_group(reader.group(0), sent)
        assert reader.rollouts_by_status() == {"truncated": MEMBERS - 1, "dropped": 1}
        assert [row["member"] for row in reader.trained_rollouts(1)] == [m for m in range(MEMBERS) if m != 1]
    assert audit(run_dir) == []
    with sqlite3.connect(run_dir.ledger) as db:
        db.execute("UPDATE rollouts SET dropped_by = 'truncated' WHERE member = 0")
    assert any("dropped by filter truncated" in fault for fault in audit(run_dir))


@pytest.mark.parametrize("missing", [("dropped_by", "reason"), ("reason",)], ids=" and ".join)
def test_a_ledger_from_before_a_column_is_read_and_continued(run_dir: RunDir, missing: tuple[str, ...]) -> None:
    steps(run_dir, 2).close()
    with sqlite3.connect(run_dir.ledger) as db:
        for name in missing:
            db.execute(f"ALTER TABLE rollouts DROP COLUMN {name}")
    with LedgerReader(run_dir) as reader:
        assert reader.rollouts_by_status() == {"finished": 4 * MEMBERS}
        assert all(r.dropped_by is None and r.reason is None for r in reader.group(0).rollouts)
    assert audit(run_dir) == []
    Run(run_dir).begin().close()
    with sqlite3.connect(run_dir.ledger) as db:
        assert set(schema.LATER_COLUMNS) <= {row[1] for row in db.execute("PRAGMA table_info(rollouts)")}


def test_a_reader_sees_rows_during_the_run(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    run.start(0)
    with LedgerReader(run_dir) as reader:
        assert reader.rollouts_by_status() == {"running": MEMBERS}
        run.ledger.groups_finished([group(0, 0)])
        assert reader.rollouts_by_status() == {"finished": MEMBERS}
    run.close()


def test_failed_members_are_not_in_the_batch(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    run.start(0)
    run.ledger.groups_finished([group(0, 0, failed=(3,))])
    run.train(1, [0])
    run.close()
    with LedgerReader(run_dir) as reader:
        assert [row["member"] for row in reader.trained_rollouts(1)] == [0, 1, 2]


def test_a_transaction_is_all_or_nothing(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    with pytest.raises(ZeroDivisionError), run.ledger.transaction():
        run.ledger.task_drawn(0, task(0))
        raise ZeroDivisionError
    assert run.ledger.next_draw() == 0
    run.start(0)
    assert run.ledger.next_draw() == 1
    run.close()


# -- resume --


def test_a_resume_reuses_finished_groups_and_undoes_later_steps(run_dir: RunDir) -> None:
    run = steps(run_dir, 3)  # draw d began under version d // 2
    run.roll(6)
    run.start(7)
    run.close()  # killed here; the checkpoint is that of step 2

    run = Run(run_dir, resumed_step=2)
    assert run.ledger.rewind(2) == 2 * MEMBERS
    reusable = run.ledger.resumable(2, oldest_version=0)
    assert [g.group_id for g in reusable] == [4, 5]  # trained in the undone step 3, sampled from version 2
    assert all(same_group(g, group(g.group_id, 2)) for g in reusable)
    # Draws 6 and 7 began under version 3, which does not exist any more.
    assert run.ledger.unfinished_draws() == [(6, task(6)), (7, task(7))]
    assert run.ledger.next_draw() == 8

    run.begin(resumed_step=2)
    run.train(3, [4, 5])
    for draw in (6, 7):
        run.roll(draw, is_new=False)
    run.train(4, [6, 7])
    run.close()
    assert audit(run_dir) == []
    with LedgerReader(run_dir) as reader:
        assert num_reused(reader) == 2 * MEMBERS
        assert [i["resumed_step"] for i in reader.rows("SELECT * FROM incarnations")] == [None, 2]
        assert len(reader.rows("SELECT * FROM batches WHERE state = 'undone'")) == 1


def test_groups_finished_before_the_checkpoint_but_not_trained_are_reused(run_dir: RunDir) -> None:
    run = steps(run_dir, 1)
    run.roll(2)
    run.close()
    run = Run(run_dir)
    run.ledger.rewind(1)
    assert [g.group_id for g in run.ledger.resumable(1, 0)] == [2]
    run.close()


def test_undone_tokens_are_cut_for_good_even_if_their_draw_has_not_started_again(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    run.start(0)
    run.publish(1)
    run.ledger.turn_played(0, 0, turn(0, spans=((0, 0, 4), (1, 4, 8)), reason="abort"))
    run.close()
    for step in (0, 1):  # version 1 of the first incarnation is undone, and another one is made
        run = Run(run_dir, resumed_step=step)
        run.ledger.rewind(step)
        [partial] = run.ledger.partial_rollouts(step, 0).values()
        assert partial.num_tokens == 4 and partial.turns[0].completion.versions == (VersionSpan(0, 0, 4),)
        run.begin(resumed_step=step)
        run.close()


def test_groups_that_are_too_old_are_dropped_and_not_drawn_again(run_dir: RunDir) -> None:
    run = steps(run_dir, 3)
    run.close()
    run = Run(run_dir)
    run.ledger.rewind(0)  # everything is undone, versions 1 and 2 too
    assert [g.group_id for g in run.ledger.resumable(0, 0)] == [0, 1]
    run.close()

    run = Run(run_dir)
    run.ledger.rewind(0)
    assert run.ledger.resumable(0, oldest_version=1) == []
    assert [draw for draw, _ in run.ledger.unfinished_draws()] == [2, 3, 4, 5]
    run.close()
    with LedgerReader(run_dir) as reader:
        assert reader.drops_by_reason() == {"stale": 2}


def test_groups_trained_up_to_the_checkpoint_are_not_reused(run_dir: RunDir) -> None:
    steps(run_dir, 4).close()
    run = Run(run_dir)
    run.ledger.rewind(4)
    assert run.ledger.resumable(4, 0) == [] and run.ledger.unfinished_draws() == []
    run.close()


def test_a_step_in_the_checkpoint_is_trained_even_if_that_was_not_reported(run_dir: RunDir) -> None:
    run = steps(run_dir, 1)
    run.roll(2)
    run.ledger.batch_shipped(2, [2])
    run.close()  # killed after the trainer's checkpoint of step 2, before it reported the step
    run = Run(run_dir)
    run.ledger.rewind(2)
    assert run.ledger.resumable(2, 0) == []
    run.close()
    with LedgerReader(run_dir) as reader:
        assert [batch["state"] for batch in reader.batches()] == ["trained", "trained"]


@pytest.mark.parametrize("reason", ["zero_signal", "stale", "cancelled"])
def test_drops_after_the_checkpoint_are_undone_and_earlier_ones_are_not(run_dir: RunDir, reason: str) -> None:
    run = Run(run_dir).begin()
    for draw in range(4):
        run.roll(draw)
    run.start(4)
    run.ledger.batch_shipped(1, [0])
    run.ledger.group_dropped(1, reason)
    run.ledger.step_trained(1, {})
    run.ledger.batch_shipped(2, [2])
    run.ledger.group_dropped(3, reason)
    run.ledger.group_dropped(4, reason)
    run.close()

    run = Run(run_dir)
    run.ledger.rewind(1)
    assert [g.group_id for g in run.ledger.resumable(1, 0)] == [2, 3]
    assert [draw for draw, _ in run.ledger.unfinished_draws()] == [4]
    run.close()


def test_failed_groups_stay_failed_unless_their_weights_were_undone(run_dir: RunDir) -> None:
    run = steps(run_dir, 1)
    run.start(2)  # under version 1
    run.ledger.groups_finished([group(2, 1, failed=(0, 1, 2, 3))])
    run.close()
    run = Run(run_dir)
    run.ledger.rewind(1)
    assert run.ledger.unfinished_draws() == []
    run.ledger.rewind(0)
    assert [draw for draw, _ in run.ledger.unfinished_draws()] == [2]
    run.close()


def test_a_group_with_a_damaged_payload_is_run_again(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    for draw in range(3):
        run.roll(draw)
    run.close()
    path = run_dir.segment(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert any("damaged" in line for line in audit(run_dir))
    run = Run(run_dir)
    run.ledger.rewind(0)
    assert [g.group_id for g in run.ledger.resumable(0, 0)] == [0, 2]
    assert [draw for draw, _ in run.ledger.unfinished_draws()] == [1]
    run.close()


def test_a_second_rewind_changes_nothing(run_dir: RunDir) -> None:
    steps(run_dir, 3).close()
    run = Run(run_dir)
    run.ledger.rewind(1)
    first = [g.group_id for g in run.ledger.resumable(1, 0)]
    assert run.ledger.rewind(1) == 0
    assert [g.group_id for g in run.ledger.resumable(1, 0)] == first == [2, 3]
    run.close()


# -- payload files --


def test_bytes_without_a_row_are_cut_off_when_the_ledger_is_opened(run_dir: RunDir) -> None:
    run = Run(run_dir).begin()
    run.roll(0)
    run.close()
    good = run_dir.segment(0).read_bytes()
    run_dir.segment(0).write_bytes(good + b"torn record")
    run = Run(run_dir)
    assert run_dir.segment(0).read_bytes() == good
    run.roll(1)
    run.close()
    assert audit(run_dir) == []


def test_segments_are_rotated_and_deleted_once_trained_long_ago(run_dir: RunDir) -> None:
    run = Run(run_dir, limits=Limits(steps=2, samples=0), segment_bytes=1000).begin()
    for step in range(1, 11):
        draws = [2 * step - 2, 2 * step - 1]
        for draw in draws:
            run.roll(draw)
        run.train(step, draws)
    run.close()
    with LedgerReader(run_dir) as reader:
        assert reader.group(19).rollouts[0].branches
        with pytest.raises(DataError, match="went with the limits"):
            reader.group(0)
        kept = {row["step"] for row in reader.rows(
            "SELECT step FROM live_rollouts LEFT JOIN segments USING (segment) WHERE deleted_at IS NULL"
        )}  # fmt: skip
    assert kept >= {8, 9, 10} and min(kept) >= 7
    assert len(list(run_dir.tokens.iterdir())) < 10
    assert audit(run_dir) == []


def test_payloads_after_the_newest_checkpoint_are_kept_however_old(run_dir: RunDir) -> None:
    run = Run(run_dir, limits=Limits(steps=1, samples=0), segment_bytes=500).begin()
    for step in range(1, 11):
        run.roll(step - 1)
        run.train(step, [step - 1])
        if step == 4:
            run.ledger.checkpoint_saved(4)
    run.close()
    run = Run(run_dir)
    run.ledger.rewind(4)
    assert [g.group_id for g in run.ledger.resumable(4, 0)] == [4]
    run.close()


def test_segments_of_untrained_groups_are_kept(run_dir: RunDir) -> None:
    run = Run(run_dir, limits=Limits(steps=1, samples=0), segment_bytes=500).begin()
    run.roll(100)
    for step in range(1, 8):
        run.roll(step - 1)
        run.train(step, [step - 1])
    run.ledger.group_dropped(100, "stale")
    run.close()
    with LedgerReader(run_dir) as reader:
        assert reader.group(100).rollouts


# -- refusals, and the audit --


def test_a_second_writer_is_refused(run_dir: RunDir) -> None:
    run = Run(run_dir)
    with pytest.raises(EngineError, match="another process writes"):
        Ledger(run_dir)
    run.close()
    Ledger(run_dir).close()


@pytest.mark.heavy
def test_damaged_pages_give_one_message_in_every_method(run_dir: RunDir) -> None:
    steps(run_dir, 40).close()
    whole = run_dir.ledger.read_bytes()
    size, met = 4096, 0
    for page in range(1, len(whole) // size):
        damaged = bytearray(whole)
        damaged[page * size : (page + 1) * size] = b"\xff" * size
        run_dir.ledger.write_bytes(damaged)
        try:
            ledger = Ledger(run_dir)
            try:
                ledger.rewind(20)
                ledger.lost_steps(20), ledger.missing_draws(40), ledger.resumable(20, 18), ledger.next_draw()
                ledger.unfinished_draws(), ledger.open_draws()
            finally:
                ledger.close()
            audit(run_dir)
        except DataError as error:
            assert "ledger.sqlite" in str(error) and "move it" in str(error)
            met += 1
        for path in run_dir.path.glob("ledger.sqlite-*"):
            path.unlink()
    assert met > 5


def test_an_unusable_directory_for_tokens_is_refused(run_dir: RunDir) -> None:
    run_dir.path.mkdir()
    run_dir.tokens.touch()
    with pytest.raises(ConfigError, match=r"tokens: .*directory of this run"):
        Ledger(run_dir)
    run_dir.tokens.unlink()
    run_dir.segment(0).mkdir(parents=True)
    with pytest.raises(EngineError, match=r"segment_000000.bin: Is a directory"):
        Ledger(run_dir)


def test_no_ledger_a_damaged_one_and_one_of_another_version_are_refused(run_dir: RunDir) -> None:
    with pytest.raises(DataError, match="there is no ledger"):
        audit(run_dir)
    Run(run_dir).close()
    db = schema.open_for_writing(run_dir.ledger)
    db.execute(f"PRAGMA user_version = {schema.SCHEMA + 1}")
    db.close()
    for opened in (Ledger, LedgerReader):
        with pytest.raises(DataError, match="this stretto is older"):
            opened(run_dir)
    for path in run_dir.path.glob("ledger.sqlite*"):
        path.write_bytes(b"nonsense" * 1000)
    for opened in (Ledger, LedgerReader):
        with pytest.raises(DataError, match="damaged"):
            opened(run_dir)


def test_a_step_is_not_shipped_twice(run_dir: RunDir) -> None:
    run = steps(run_dir, 1)
    run.roll(2)
    with pytest.raises(EngineError, match="UNIQUE"):
        run.ledger.batch_shipped(1, [2])
    run.close()


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ("INSERT INTO batch_rollouts SELECT 2, row FROM rollouts WHERE group_id = 0", "in 2 batches"),
        ("UPDATE rollouts SET status = 'failed' WHERE group_id = 1 AND member = 0", "which is failed"),
        ("UPDATE draws SET state = 'dropped' WHERE group_id = 1", "group 1, which is dropped"),
        ("UPDATE rollouts SET first_version = 0 WHERE group_id = 9", "older than 2"),
        ("UPDATE rollouts SET first_version = 4 WHERE group_id = 0", "which came after it"),
        ("UPDATE batches SET state = 'undone' WHERE step = 3", "not 1, 2, 3"),
        ("DELETE FROM versions WHERE version = 2", "not 0, 1, 2"),
        ("UPDATE rollouts SET last_version = 77 WHERE row = 1", "never published"),
        ("INSERT INTO versions VALUES (NULL, 6, 1, 'loaded', 0, 0)", "only steps up to 5"),
        ("DELETE FROM draws WHERE group_id = 3", "gaps"),
        ("UPDATE draws SET finished_at = NULL WHERE group_id = 3", "never finished"),
        ("UPDATE rollouts SET crc = crc + 1 WHERE row = 5", "damaged"),
    ],
)
def test_the_audit_finds_every_broken_promise(run_dir: RunDir, change: str, finding: str) -> None:
    steps(run_dir, 5).close()
    assert audit(run_dir) == []
    db = schema.open_for_writing(run_dir.ledger)
    db.execute(change)
    db.close()
    assert any(finding in line for line in audit(run_dir)), audit(run_dir)


def test_the_report_of_an_audit_counts_promises_or_names_faults(run_dir: RunDir) -> None:
    steps(run_dir, 5).close()
    assert report_of(run_dir).startswith("7 promises kept") and "whole" not in report_of(run_dir)
    assert report_of(run_dir, payloads=True).endswith("all payloads are whole")
    db = schema.open_for_writing(run_dir.ledger)
    db.execute("UPDATE rollouts SET first_version = 4 WHERE group_id < 3")
    db.close()
    assert report_of(run_dir).startswith("12 faults: step 1 has rollout g0.0 of version 4, which came after it; ")
    assert report_of(run_dir).endswith("; and 7 more")
    run_dir.ledger.unlink()
    assert report_of(run_dir).startswith("cannot be checked: ")
