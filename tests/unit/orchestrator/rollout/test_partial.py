"""Partial rollouts: what is saved of them, and that they continue as if never interrupted."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3

import msgspec
import numpy as np
import orchestrator_runs
import partial_envs
import pytest
from fakes import CharRenderer, FakeEngine, FakeTrainer
from hypothesis import given
from hypothesis import strategies as st
from ledger_runs import turn

from stretto.config.root import OrchestratorConfig
from stretto.config.sections.deployment import ResumeSection
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.token_file import Place, load_turns
from stretto.orchestrator.batch import trained_tokens
from stretto.records.generate import Completion, VersionSpan
from stretto.records.partial import PartialRollout, concat_completions, cut_completion, latest_turns, turns_up_to
from stretto.records.rollout import Branch

STEPS = 4


def teller(prompt, rng, version):
    """Replies with a dozen random letters and the last word of the prompt."""
    return "".join(rng.choice("abcdefgh") for _ in range(12))


def config(path, **settings):
    base = {
        "env": [{"id": "fakes:GuessEnv", "name": "guess", "args": {"num_turns": 3}}],
        "batch_size": 8, "group_size": 4, "seq_len": 200, "max_steps": STEPS, "max_async_level": 0,
        "filter_zero_advantages": False, "output_dir": path, "run": {"name": "test"},
    }  # fmt: skip
    return OrchestratorConfig.model_validate(base | settings)


def run_once(cfg, *, resume=None, stop_at=None, kill_at=None, step_s=0.0, is_slow=False):
    """Run one incarnation from step `resume`, stop or kill it at a time in s; its trainer and engine."""
    if resume is not None:
        cfg = cfg.model_copy(update={"resume": ResumeSection(step=resume)})
    start = resume or 0
    trainer = FakeTrainer(max_steps=STEPS, start=start, checkpoint_every=1, step_delay=lambda step: step_s)

    def delay(request):
        return 60.0 if is_slow and request.request_id.startswith(("test-g2", "test-g3")) else 1.0

    engine = FakeEngine(teller, delay=delay)
    engine.version = start
    orchestrator_runs.run_once(cfg, engine, trainer, CharRenderer(), stop_at=stop_at, kill_at=kill_at)
    return trainer, engine


def trained(trainer):
    return [
        (m.sample_ids, m.token_ids.tolist(), m.logprobs.tolist(), m.advantages.tolist(), m.loss_mask.tolist())
        for step in trainer.batches
        for batch in step
        for m in batch.micro_batches
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return trained(run_once(config(tmp_path_factory.mktemp("unbroken")))[0])


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["stop_at", "kill_at"])
@pytest.mark.parametrize("moment", [3.5, 4.5, 5.25, 8.75])
def test_a_resumed_run_trains_what_an_uninterrupted_one_does(tmp_path, unbroken, end, moment):
    """A step takes three turns of a second each: moments lie within a first, a second and a third turn."""
    cfg = config(tmp_path)
    first, _ = run_once(cfg, **{end: moment})
    second, engine = run_once(cfg, resume=first.step)
    assert trained(first) + trained(second) == unbroken
    assert audit(cfg.run_dir) == []
    with sqlite3.connect(cfg.run_dir.ledger) as db:
        (kept,) = db.execute("SELECT count(*) FROM rollouts WHERE segment IS NOT NULL AND status = 'lost'").fetchone()
    assert kept == (0 if end == "kill_at" and moment < 4 else 8)
    turns_left = 3 * 8 * (STEPS - first.step)
    turns_done = {3.5: 0, 4.5: 8, 5.25: 16, 8.75: 16}[moment]
    assert engine.num_requests == turns_left - turns_done


def test_tokens_logprobs_and_versions_of_an_interrupted_reply_are_in_the_rollout(tmp_path):
    """Groups 4 and 5 begin under version 1 at 3.6 s, version 2 is loaded at 4.2 s, the stop comes at 4.5 s."""
    cfg = config(tmp_path, max_async_level=1)
    first, _ = run_once(cfg, stop_at=4.5, step_s=0.6)
    assert first.step == 2
    before = kept_turns(cfg)
    assert sorted(before) == [(group, member) for group in (4, 5, 6, 7) for member in range(4)]
    run_once(cfg, resume=2)
    with LedgerReader(cfg.run_dir) as ledger:
        for group_id, member in before:
            (branch,) = ledger.group(group_id).rollouts[member].branches
            assert branch.is_sampled.sum() == 3 * 13 and (branch.logprobs[branch.is_sampled] < 0).all()
            (turn,) = before[group_id, member]
            start, length = len(turn.prompt_ids), len(turn.completion.token_ids)
            assert 0 < length < 13 and not turn.is_done
            span = slice(start, start + length)
            assert branch.token_ids[span].tolist() == turn.completion.token_ids.tolist()
            assert branch.logprobs[span].tolist() == turn.completion.logprobs.tolist()
            first_span = turn.completion.versions[0]
            assert branch.versions[0].version == first_span.version == (1 if group_id < 6 else 2)
            assert sum(each.end - each.start for each in branch.versions) == 3 * 13
    assert audit(cfg.run_dir) == []


def kept_turns(cfg):
    """Turns of rollouts that are not done, by group and member."""
    with LedgerReader(cfg.run_dir) as ledger:
        rows = ledger.rows("SELECT * FROM rollouts WHERE status = 'running' AND segment IS NOT NULL")
    places = {(r["group_id"], r["member"]): Place(r["segment"], r["offset"], r["length"], r["crc"]) for r in rows}
    return {key: load_turns(cfg.run_dir, place, "test") for key, place in places.items()}


@pytest.mark.parametrize("is_masked", [False, True])
def test_tokens_of_older_weights_are_masked_if_configured(tmp_path, is_masked):
    cfg = config(tmp_path, max_async_level=1, mask_offpolicy_in_partial_rollout=is_masked)
    run_once(cfg, stop_at=4.5, step_s=0.6)
    second, _ = run_once(cfg, resume=2)
    micros = [m for batch in second.batches[0] for m in batch.micro_batches]
    num_trained = sum(int(m.loss_mask.sum()) for m in micros)
    with LedgerReader(cfg.run_dir) as ledger:
        num_old = 0
        for row in ledger.trained_rollouts(3):
            (branch,) = ledger.group(row["group_id"]).rollouts[row["member"]].branches
            version = np.full(len(branch.token_ids), -1)
            for span in branch.versions:
                version[span.start : span.end] = span.version
            is_old = branch.is_sampled & (version < 2)
            num_old += is_old.sum()
            assert branch.trained_from == (2 if is_masked else None)
            assert np.array_equal(trained_tokens(branch), branch.is_sampled & ~(is_old & is_masked))
    assert num_old > 0 and num_trained == 8 * 3 * 13 - (num_old if is_masked else 0)


def test_without_partial_rollout_nothing_is_kept(tmp_path, unbroken):
    cfg = config(tmp_path, partial_rollout=False)
    first, _ = run_once(cfg, stop_at=4.5)
    second, engine = run_once(cfg, resume=first.step)
    assert trained(first) + trained(second) == unbroken
    assert engine.num_requests == 3 * 8 * (STEPS - first.step)


def test_turns_with_another_prompt_are_discarded_with_a_reason(tmp_path, caplog):
    cfg = config(tmp_path, env=[{"id": "partial_envs:Moody", "name": "moody"}])
    partial_envs.Moody.incarnation = 1
    first, _ = run_once(cfg, stop_at=5.25)
    partial_envs.Moody.incarnation = 2
    with caplog.at_level("WARNING"):
        second, engine = run_once(cfg, resume=first.step)
    assert "the environment sends another prompt now; " in caplog.text
    assert engine.num_requests == 3 * 8 * (STEPS - first.step) - 8  # of each rollout the first turn was kept
    assert second.step == STEPS and audit(cfg.run_dir) == []


def test_a_single_turn_group_continues_sample_by_sample(tmp_path):
    settings = {"env": [{"id": "fakes:EchoEnv", "name": "echo"}]}
    whole = trained(run_once(config(tmp_path / "a", **settings))[0])
    cfg = config(tmp_path / "b", **settings)
    first, _ = run_once(cfg, stop_at=1.5)
    second, engine = run_once(cfg, resume=first.step)
    assert trained(first) + trained(second) == whole
    # Samples by themselves, later groups as one.
    assert engine.num_requests == 8 + 2 * (STEPS - first.step - 1)
    assert audit(cfg.run_dir) == []


def test_a_run_that_is_stopped_again_and_again_still_trains_the_same(tmp_path, unbroken):
    cfg, seen, step = config(tmp_path), [], None
    for moment in (3.4, 0.4, 0.9, 1.3, 0.7, 2.2):
        trainer, _ = run_once(cfg, resume=step, stop_at=moment)
        seen += trained(trainer)
        step = trainer.step or None
    trainer, _ = run_once(cfg, resume=step)
    assert seen + trained(trainer) == unbroken
    assert audit(cfg.run_dir) == []


def test_tokens_of_versions_that_are_undone_are_not_kept(tmp_path):
    """Stopped after step 2, resumed from step 1: what version 2 sampled never was."""
    cfg = config(tmp_path, max_async_level=1)
    first, _ = run_once(cfg, stop_at=4.5, step_s=0.6)
    assert first.step == 2
    second, _ = run_once(cfg, resume=1)
    with LedgerReader(cfg.run_dir) as ledger:
        incarnations = ledger.rows("SELECT * FROM incarnations")
        rows = ledger.rows("SELECT * FROM live_rollouts WHERE shipped_in = ?", incarnations[-1]["incarnation"])
        assert {row["step"] for row in rows} == {2, 3, 4}
        assert all(row["first_version"] <= row["step"] - 1 for row in rows)
    assert second.step == STEPS and audit(cfg.run_dir) == []


def test_what_is_undone_is_forgotten_for_good(tmp_path):
    """Resumed from step 1 and killed at once: tokens of the undone version 2 must not pass for the new one's."""
    cfg = config(tmp_path, max_async_level=1)
    run_once(cfg, stop_at=4.5, step_s=0.6)
    assert {
        span.version for turns in kept_turns(cfg).values() for turn in turns for span in turn.completion.versions
    } == {1, 2}
    run_once(cfg, resume=1, kill_at=0.01)
    with LedgerReader(cfg.run_dir) as ledger:
        rows = ledger.rows(
            "SELECT *, max(row) FROM rollouts JOIN draws USING (group_id) WHERE state = 'drawn' "
            "GROUP BY group_id, member"
        )
    places = [Place(r["segment"], r["offset"], r["length"], r["crc"]) for r in rows if r["segment"] is not None]
    turns = [turn for place in places for turn in load_turns(cfg.run_dir, place, "test")]
    assert turns and {span.version for turn in turns for span in turn.completion.versions} == {1}
    second, _ = run_once(cfg, resume=1)
    assert second.step == STEPS and audit(cfg.run_dir) == []


def test_a_rollout_that_times_out_during_a_stop_continues(tmp_path, unbroken, monkeypatch):
    """If engines do not answer in time, the rollouts have not failed: they start again."""
    cfg = config(tmp_path, rollout_timeout_s=6.0)

    async def deaf(self, request_ids=None):
        await asyncio.sleep(0)

    monkeypatch.setattr(FakeEngine, "abort", deaf)
    first, _ = run_once(cfg, stop_at=4.9, is_slow=True)
    monkeypatch.undo()
    assert first.step == 1
    second, _ = run_once(cfg, resume=1)
    assert trained(first) + trained(second) == unbroken


# -- records --


def test_a_turn_replaces_its_agents_from_its_index_on():
    a0, a1, b0, a1_again = turn(0), turn(1), turn(0, agent="other"), turn(1, spans=((1, 0, 9),))
    assert latest_turns([a0, b0, a1, a1_again]) == [a0, b0, a1_again]
    assert latest_turns([a0, b0, a1, turn(0, attempt=1)])[0].attempt == 1
    assert len(latest_turns([a0, b0, a1, turn(0, attempt=1)])) == 1


def test_turns_end_where_a_later_version_begins():
    turns = [turn(0), turn(1, spans=((0, 0, 2), (1, 2, 5), (2, 5, 6))), turn(2)]
    assert turns_up_to(turns, 2) == turns
    first, second = turns_up_to(turns, 1)
    assert first is turns[0] and not second.is_done
    assert second.completion.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert [(s.version, s.start, s.end) for s in second.completion.versions] == [(0, 0, 2), (1, 2, 5)]
    assert turns_up_to([turn(0, spans=((3, 0, 4),))], 2) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_completion_that_is_cut_and_concatenated_is_unchanged(lengths, data):
    edges = np.cumsum([0, *lengths]).tolist()
    spans = tuple(VersionSpan(v, a, b) for v, (a, b) in enumerate(itertools.pairwise(edges)))
    n = edges[-1]
    whole = Completion(
        token_ids=np.arange(n, dtype=np.int32), logprobs=-np.arange(n).astype(np.float32), finish_reason="stop",
        versions=spans,
    )  # fmt: skip
    at = data.draw(st.integers(0, n))
    head = cut_completion(whole, at)
    rest = msgspec.structs.replace(
        whole, token_ids=whole.token_ids[at:], logprobs=whole.logprobs[at:],
        versions=tuple(
            VersionSpan(s.version, max(s.start, at) - at, s.end - at) for s in spans if s.end > at
        ),
    )  # fmt: skip
    again = concat_completions(head, rest)
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    assert again.logprobs.tolist() == whole.logprobs.tolist()
    assert again.versions == whole.versions and again.finish_reason == "stop"


def test_a_branch_of_masked_tokens_alone_makes_no_sample():
    branch = Branch(
        token_ids=np.arange(4, dtype=np.int32), is_sampled=np.array([False, True, True, True]),
        logprobs=np.zeros(4, np.float32), temperature=1.0, versions=(VersionSpan(0, 1, 4),), trained_from=1,
    )  # fmt: skip
    assert not trained_tokens(branch).any()
    assert PartialRollout(turns=(turn(0),)).num_tokens == 4
