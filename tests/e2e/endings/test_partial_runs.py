"""Real runs that are interrupted in the middle of replies, and what becomes of the tokens."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from runs import MOVING, Ended, has_moved, merged, rl, start_rl, until, untrained_model, wait
from test_kill import kill, wait_for_child

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.token_file import Place, load_turns

NUM_STEPS = 4
BATCH_SIZE = 8
REPLY = 300  # tokens at most, three times per rollout


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A synchronous run on episodes of three turns, with a random network of a few thousand parameters."""
    settings = {
        "max_steps": NUM_STEPS,
        "seq_len": 2048,
        "model": {"name": untrained_model(tmp_path_factory.mktemp("model"))},
        "ckpt": {"interval": 1, "weights": {"interval": 1}},
        "orchestrator": {
            "batch_size": BATCH_SIZE,
            "group_size": 4,
            "max_async_level": 0,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": REPLY, "ignore_eos": True}},
            "env": [{"id": "envs:Dialogue", "args": {"max_tokens": REPLY}}],
        },
        "trainer": {"optim": {"lr": 1e-3}},
    }
    return merged(settings, MOVING)


@pytest.fixture(scope="module")
def unbroken(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = rl(tmp_path_factory.mktemp("unbroken"), settings)
    assert has_moved(ended)
    return ended


def running(run: RunDir) -> list:
    """The ledger's rows of rollouts that are not done."""
    with LedgerReader(run) as ledger:
        return ledger.rows("SELECT * FROM rollouts WHERE finished_at IS NULL")


def turns_kept(run: RunDir) -> list:
    """Every turn of every rollout that is not done."""
    rows = [row for row in running(run) if row["segment"] is not None]
    places = [Place(row["segment"], row["offset"], row["length"], row["crc"]) for row in rows]
    return [turn for place in places for turn in load_turns(run, place, "test")]


def gated(settings: dict[str, Any], gate: Path) -> dict[str, Any]:
    """The settings with rollouts of the third step and later that wait in the middle until the file `gate` exists."""
    args = {"max_tokens": REPLY, "gate": str(gate), "num_free": 2 * BATCH_SIZE}
    return merged(settings, {"orchestrator": {"env": [{"id": "envs:Dialogue", "args": args}]}})


def interrupted(directory: Path, settings: dict[str, Any], gate: Path, how: str) -> RunDir:
    """A run of `gated` settings that was stopped by Ctrl-C in the middle of replies of its third step, or whose
    orchestrator was killed between them."""
    run = RunDir(directory / "run")
    popen = start_rl(directory, settings)
    until(lambda: (run.latest_complete_checkpoint() or 0) >= 2, popen, "checkpoint of step 2")
    if settings["orchestrator"].get("partial_rollout", True):
        # One half waits before its second turn, the other before its third.
        until(lambda: len(turns_kept(run)) >= BATCH_SIZE * 3 // 2, popen, "turns of the third step")
    else:
        until(lambda: len(running(run)) >= BATCH_SIZE, popen, "rollouts of the third step")
    if how == "stopped":
        # The engine begins with the next replies and then stands still until the orchestrator has heard of the signal:
        # no reply ends meanwhile.
        engine = psutil.Process(wait_for_child(popen, "inference"))
        before = sum(engine.cpu_times()[:2])
        gate.touch()
        until(lambda: sum(engine.cpu_times()[:2]) >= before + 0.05, popen, "tokens of the next turns")
        engine.suspend()
        popen.send_signal(signal.SIGINT)
        until(lambda: "interrupted: " in run.log("orchestrator").read_text(), popen, "word of the signal")
        engine.resume()
    else:
        kill(popen, wait_for_child(popen, "orchestrator"))
        gate.touch()
    code, output = wait(popen)
    assert code == (0 if how == "stopped" else 1), output
    return run


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_from_its_tokens_and_ends_with_the_same_bits(
    settings: dict[str, Any], unbroken: Ended, tmp_path: Path, how: str
) -> None:
    settings = gated(settings, tmp_path / "gate")
    run = interrupted(tmp_path, settings, tmp_path / "gate", how)
    turns = turns_kept(run)
    cut = [turn for turn in turns if not turn.is_done]
    if how == "stopped":
        assert cut and all(0 < len(turn.completion.token_ids) < REPLY for turn in cut)
    ended = rl(tmp_path, settings, "--resume")
    assert "rollouts continue from" in ended.output, ended.output
    assert audit(run) == []
    for step in range(1, NUM_STEPS + 1):
        assert ended.weights(step) == unbroken.weights(step), step
    # What was kept is in the rollouts as it was, beside what was sampled since.
    with ended.ledger() as ledger:
        mine = [ledger.group(row["group_id"]) for row in ledger.trained_rollouts(3)]
    whole = [branch for group in mine for rollout in group.rollouts for branch in rollout.branches]
    for turn in turns:
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs
        long = [b for b in whole if len(b.token_ids) >= len(ids)]
        windows = [np.lib.stride_tricks.sliding_window_view(b.token_ids, len(ids)) for b in long]
        places = [(b, at) for b, view in zip(long, windows) for at in np.flatnonzero((view == ids).all(1))]
        assert any(np.array_equal(b.logprobs[at : at + len(ids)], logprobs) for b, at in places)


@pytest.mark.slow
def test_older_tokens_of_an_asynchronous_run_are_masked_after_a_stop(settings: dict[str, Any], tmp_path: Path) -> None:
    changes = {"orchestrator": {"max_async_level": 1, "mask_offpolicy_in_partial_rollout": True}}
    asynchronous = gated(merged(settings, changes, {"max_steps": 6}), tmp_path / "gate")
    run = interrupted(tmp_path, asynchronous, tmp_path / "gate", "stopped")
    ended = rl(tmp_path, asynchronous, "--resume")
    assert ended.summary()["steps"] == 6 and audit(run) == []
    with ended.ledger() as ledger:
        life = ledger.rows("SELECT * FROM incarnations")[-1]["incarnation"]
        step = ledger.rows("SELECT * FROM incarnations")[-1]["resumed_step"]
        rows = ledger.rows("SELECT * FROM live_rollouts WHERE incarnation = ?", life)
        branches = [b for row in rows for b in ledger.group(row["group_id"]).rollouts[row["member"]].branches]
    continued = [branch for branch in branches if branch.trained_from is not None]
    assert continued and {branch.trained_from for branch in continued} == {step}
    assert all(span.version <= NUM_STEPS + 2 for branch in continued for span in branch.versions)


@pytest.mark.slow
def test_a_stop_without_partial_rollouts_plays_them_again(
    settings: dict[str, Any], unbroken: Ended, tmp_path: Path
) -> None:
    off = gated(merged(settings, {"orchestrator": {"partial_rollout": False}}), tmp_path / "gate")
    run = interrupted(tmp_path, off, tmp_path / "gate", "stopped")
    assert turns_kept(run) == []
    ended = rl(tmp_path, off, "--resume")
    assert "rollouts continue from" not in ended.output
    assert ended.weights(NUM_STEPS) == unbroken.weights(NUM_STEPS)
