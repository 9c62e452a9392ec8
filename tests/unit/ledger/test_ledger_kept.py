"""Which token payloads of a long run stay: a budget of bytes, and samples of every step for ever."""

from __future__ import annotations

import os

import pytest
from ledger_runs import MEMBERS, Run

from stretto.base.errors import DataError
from stretto.base.paths import KEPT, RunDir
from stretto.ledger import LedgerReader, Limits, audit

STEPS = 12


def play(run_dir: RunDir, limits: Limits, *, first: int = 1, last: int = STEPS) -> None:
    resumed = first - 1 or None
    run = Run(run_dir, limits=limits, segment_bytes=1000, resumed_step=resumed).begin(resumed)
    for step in range(first, last + 1):
        run.roll(step - 1)
        run.train(step, [step - 1])
    run.close()


def kept_by_step(run_dir: RunDir) -> dict[int, int]:
    """The rollouts of each step whose tokens can be read."""
    with LedgerReader(run_dir) as reader:
        rows = reader.rows(
            "SELECT step, count(*) AS n FROM live_rollouts LEFT JOIN segments USING (segment) "
            "WHERE deleted_at IS NULL GROUP BY step"
        )
    return {row["step"]: row["n"] for row in rows}


def test_of_every_step_some_samples_are_kept_for_ever(run_dir: RunDir) -> None:
    play(run_dir, Limits(steps=2, samples=2))
    kept = kept_by_step(run_dir)
    assert set(kept) == set(range(1, STEPS + 1)), "a step has no text left"
    assert kept[1] == kept[5] == 2 and kept[STEPS] == MEMBERS
    assert audit(run_dir) == [], "the copies are whole"


def test_best_and_worst_are_among_the_kept(run_dir: RunDir) -> None:
    play(run_dir, Limits(steps=2, samples=4))
    with LedgerReader(run_dir) as reader:
        for order in ("reward DESC, row", "reward, row"):
            [row] = reader.rows(f"SELECT segment FROM live_rollouts WHERE step = 1 ORDER BY {order} LIMIT 1")
            assert row["segment"] == KEPT


def test_without_samples_old_tokens_are_gone(run_dir: RunDir) -> None:
    play(run_dir, Limits(steps=2, samples=0))
    assert 1 not in kept_by_step(run_dir)
    with LedgerReader(run_dir) as reader, pytest.raises(DataError, match="keep_bytes, keep_steps"):
        reader.group(0)


def test_tokens_stay_until_the_budget_of_bytes_is_used_up(run_dir: RunDir) -> None:
    play(run_dir, Limits(num_bytes=1_000_000, samples=0))
    assert kept_by_step(run_dir) == dict.fromkeys(range(1, STEPS + 1), MEMBERS)


def test_beyond_the_budget_the_oldest_go(run_dir: RunDir) -> None:
    budget = 3000
    play(run_dir, Limits(num_bytes=budget, samples=0))
    kept = kept_by_step(run_dir)
    assert 1 not in kept and STEPS in kept
    assert sum(os.path.getsize(file) for file in run_dir.tokens.iterdir()) <= budget + 2 * 2000
    assert audit(run_dir) == []


def test_a_continued_run_adds_to_what_is_kept(run_dir: RunDir) -> None:
    limits = Limits(steps=1, samples=1)
    play(run_dir, limits, last=6)
    with run_dir.segment(KEPT).open("ab") as file:
        file.write(b"left by a killed process")
    play(run_dir, limits, first=7)
    assert set(kept_by_step(run_dir)) == set(range(1, STEPS + 1))
    assert audit(run_dir) == []
