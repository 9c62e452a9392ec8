"""`rl --from-ledger`: stored rollouts as the batches of another run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stored_runs import MEMBERS, write_run

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.records.rollout import Task
from stretto_review import from_ledger, scores
from stretto_vime.hooks.trained import rollout_of

CONFIG = ["--model.name", "x/y", "--orchestrator.env.0.id", "sort-letters", "--max-steps", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "words", 6)


def batch(run: Path, number: int = 0, steps: str = "1:", **more: str) -> list:
    args = SimpleNamespace(
        from_ledger=str(run), from_ledger_steps=steps, rollout_batch_size=4,
        **{f"from_ledger_{key}": value for key, value in more.items()},
    )  # fmt: skip
    return from_ledger.stored_rollouts(args, number, None).samples


def test_the_words_become_a_run_without_engines(run: Path) -> None:
    meant, words = from_ledger.parse("rl", ["--from-ledger", str(run), *CONFIG])
    cfg = load(RLConfig, words, verb="rl")
    assert meant is None and cfg.orchestrator.debug == "training"
    assert cfg.orchestrator.hooks.rollout_function == from_ledger.FUNCTION
    assert cfg.orchestrator.hooks.args == {"from_ledger": str(run), "from_ledger_steps": "1:"}


def test_batches_are_the_stored_groups_and_begin_again(run: Path) -> None:
    first, second = batch(run, 0), batch(run, 1)
    assert all(len(group) == MEMBERS for group in (*first, *second))
    numbers = [group[0][0].metadata["kind"] for group in (*first, *second)]
    assert numbers == [0, 1, 2, 3, 4, 5, 0, 1]
    assert [group[0][0].metadata["kind"] for group in batch(run, 1)] == numbers[4:]  # as a resumed run asks


def test_tokens_keep_the_log_probabilities_they_were_sampled_with(run: Path) -> None:
    [sample] = batch(run, steps="2")[0][0]
    rollout = rollout_of(
        [sample], Task(env="e", task_id="t", data={}), group_id=0, member=0, version=7, temperature=1.0,
        rewards=[sample.reward],
    )  # fmt: skip
    [branch] = rollout.branches
    assert branch.is_sampled.sum() == sample.response_length and np.all(branch.logprobs[branch.is_sampled] == -0.5)
    assert rollout.first_version == 7  # of the run that trains it, not of the one that played it


def test_scores_take_the_place_of_rewards(run: Path) -> None:
    lines = [scores.Line(g, member, 10.0 * g + member, 0.0) for g in (1, 3) for member in range(4)]
    scores.save(RunDir(run), "some", ["my:fn"], lines)
    groups = batch(run, scores="some")
    assert [[each[0].reward for each in group] for group in groups[:2]] == [[10, 11, 12, 13], [30, 31, 32, 33]]


def test_what_cannot_be_trained_is_refused(run: Path) -> None:
    for verb, words, message in (
        ("sft", ["--from-ledger", str(run)], "`sft` plays no rollouts"),
        ("rl", ["--from-ledger", str(run), "--from-ledger.score", "x"], "it has --from-ledger.scores"),
        ("rl", ["--from-ledger", str(run), "--from-ledger.scores", "none"], "no scores 'none'"),
        ("rl", ["--from-ledger", str(run / "nothing")], "nothing"),
        ("rl", ["--from-ledger", str(run), "--from-ledger.steps", "9:3"], r"--from-ledger.steps: '9:3' are no steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_ledger.parse(verb, words)
    cfg = load(RLConfig, [*CONFIG, "--trainer.loss.type", "reinforce"], verb="rl")
    with pytest.raises(ConfigError, match="no importance ratio"):
        from_ledger.run(cfg, None)
    teacher = ["--orchestrator.algo.type", "opd", "--orchestrator.teacher.base-url", "http://127.0.0.1:9/v1"]
    cfg = load(RLConfig, [*CONFIG, *teacher], verb="rl")
    with pytest.raises(ConfigError, match=r'the algo "opd" of .* learns from a teacher'):
        from_ledger.run(cfg, None)
