"""Runs that begin at a checkpoint of another, as a user types them: they end with the other's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import MOVING, TINY, Ended, fine_tuned, has_moved, merged, rl, start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory):
    """A small synchronous run."""
    settings = {
        "max_steps": 4,
        "seq_len": 128,
        "model": {"name": untrained_model(tmp_path_factory.mktemp("warm-up"))},
        "ckpt": {"interval": 2, "weights": {"interval": 1}},
        "orchestrator": {
            "batch_size": 8,
            "group_size": 4,
            "max_async_level": 0,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
        "trainer": {"optim": {"lr": 1e-3}},
    }
    return merged(settings, MOVING)


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = rl(tmp_path_factory.mktemp("straight"), settings)
    assert has_moved(ended)
    return ended


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_an_rl_run_begun_in_the_middle_of_another_ends_with_its_bits(settings, straight: Ended, tmp_path):
    before = contents(straight.run.path)
    begun = rl(tmp_path, settings, "--resume.dir", str(straight.run.checkpoint(2)))
    assert f"resumed from step 2 of {straight.run.checkpoint(2)}" in begun.output
    assert begun.weights(4) == straight.weights(4)
    assert begun.column("reward/mean") == straight.column("reward/mean")[2:]
    assert begun.run.complete_checkpoints() == [4] and contents(straight.run.path) == before
    assert audit(begun.run) == [] and begun.summary()["origin"] == str(straight.run.checkpoint(2))
    again = rl(tmp_path, settings, "--resume.dir", str(straight.run), is_ok=False)
    assert again.code == 2 and "without resume.dir" in again.output


def test_an_rl_run_begins_anew_with_what_another_has_learned(settings, straight: Ended, tmp_path):
    words = ["--resume.dir", str(straight.run.checkpoint(4)), "--resume.skip-progress", "--max-steps", "2"]
    begun = rl(tmp_path, settings, *words)
    assert f"begins with what was learned up to step 4 of {straight.run.checkpoint(4)}" in begun.output
    assert begun.run.complete_checkpoints() == [2] and audit(begun.run) == []
    assert (begun.summary()["steps"], begun.summary()["origin"]) == (2, str(straight.run.checkpoint(4)))
    query = "SELECT group_id, task_id FROM draws WHERE group_id < 4 ORDER BY group_id"
    with begun.ledger() as own, straight.ledger() as first:
        assert own.rows(query) == first.rows(query)
    assert max(begun.column("mismatch_kl/mean")) < 1e-4, "engines play with the weights that were learned"
    assert begun.weights(2) not in (straight.weights(2), straight.weights(4))


def test_an_sft_run_begins_at_another_ones_newest_checkpoint(tmp_path: Path):
    fine_tuned(tmp_path, max_steps=1, seq_len=256, model={"scratch": TINY})
    words = ["@", "sft.toml", "--run.name", "second", "--resume.dir", "run", "--max-steps", "2"]
    code, output = wait(start("sft", words, tmp_path))
    assert code == 0, output
    assert "resumed from step 1 of" in output
    assert RunDir(tmp_path / "second").complete_checkpoints() == [2]
    assert RunDir(tmp_path / "run").complete_checkpoints() == [1]
