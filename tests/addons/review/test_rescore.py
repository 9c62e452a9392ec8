"""`stretto rescore`: rewards of every kind over stored rollouts, in worker processes."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import pytest
from stored_runs import FLIPS, MEMBERS, write_run

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.ledger.reader import LedgerReader
from stretto_python.run import Run
from stretto_review import scores
from stretto_review.judging import Job, Judge
from stretto_review.rescore import groups_of, rescore, summary
from stretto_view.page.library import OpenRun
from stretto_view.page.routes import PER_RUN

GROUPS = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "words", GROUPS)


def judged(path: Path, *rewards: str) -> dict:
    """The report of `rescore`, without its processes."""
    run = Run(path)
    job = Job(path, tuple(f"stored_runs:{reward}" for reward in rewards), 30.0)
    with LedgerReader(run.dir) as ledger:
        judge = Judge(job, ledger)
        groups = [asyncio.run(judge.judged(number)) for number in groups_of(run, None)]
    return summary(run, groups, job)


def printed(run: Path, capsys: pytest.CaptureFixture[str], *rewards: str, more: tuple[str, ...] = ()) -> dict:
    words = [
        word for reward in rewards for word in ("--reward", f"stored_runs:{reward}" if ":" not in reward else reward)
    ]
    rescore([str(run), *words, "--workers", "2", "--json", *more])
    return json.loads(capsys.readouterr().out)


@pytest.mark.heavy
@pytest.mark.parametrize("reward", ["same", "same_of_completion", "same_of_group"])
def test_the_same_reward_changes_nothing(run: Path, reward: str) -> None:
    found = judged(run, reward)
    assert found["rollouts"] == GROUPS * MEMBERS and found["failed"] == 0
    assert found["sign_changes"] == found["muted"] == found["woken"] == 0
    assert found["rank_correlation"] == pytest.approx(1) and found["disagreements"] == []
    assert found["groups_gain_signal"] == found["groups_lose_signal"] == 0


def expected_sign_changes(share: float) -> float:
    """By enumeration: grpo, MEMBERS rewards that are 1 with probability `share`, each wrong with FLIPS."""
    total = 0.0
    for own, own_wrong, others, lost, won in product((0, 1), (0, 1), range(MEMBERS), range(MEMBERS), range(MEMBERS)):
        if lost > others or won > MEMBERS - 1 - others:
            continue
        p = (share if own else 1 - share) * (FLIPS if own_wrong else 1 - FLIPS)
        p *= _binomial(others, MEMBERS - 1, share)
        p *= _binomial(lost, others, FLIPS) * _binomial(won, MEMBERS - 1 - others, FLIPS)
        new, new_others = own ^ own_wrong, others - lost + won
        before, after = own - (own + others) / MEMBERS, new - (new + new_others) / MEMBERS
        total += p * (before * after < 0)
    return total


def _binomial(k: int, n: int, p: float) -> float:
    return comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.heavy
def test_noise_changes_as_many_signs_as_it_must(tmp_path: Path) -> None:
    found = judged(write_run(tmp_path / "words", 400), "noisy")
    share = found["mean"]["old"]
    assert found["sign_changes"] == pytest.approx(expected_sign_changes(share), abs=0.03)  # 4 standard errors


@pytest.mark.parametrize("reward", ["longer", "is_short"])
def test_a_reward_of_length_alone_is_called_dominated(run: Path, reward: str) -> None:
    found = judged(run, reward)
    assert found["is_dominated_by_length"] and found["by_length"]["old"] < 0.2
    assert len(found["disagreements"]) == 10 and found["disagreements"][0]["reply"]


@pytest.mark.heavy
def test_components_that_dominate_or_say_nothing_are_named(run: Path) -> None:
    by_name = {each["name"]: each for each in judged(run, "in_parts")["components"]}
    assert by_name["length"]["dominates"] and by_name["format"]["is_saturated"]
    both = {each["name"]: each for each in judged(run, "same", "longer=0.0001")["components"]}
    assert both["same"]["dominates"] and not both["longer"]["dominates"]
    assert sum(each["share"] for each in both.values()) == pytest.approx(1)


@pytest.mark.heavy
def test_a_reward_that_raises_is_told_with_its_rollout(run: Path) -> None:
    found = judged(run, "raises")
    assert found["failed"] == GROUPS * MEMBERS // 10 and found["rollouts"] == GROUPS * MEMBERS - found["failed"]
    assert found["errors"][0]["rollout"] == "g0.3" and "no such word" in found["errors"][0]["error"]


@pytest.mark.heavy
def test_many_short_calls_are_not_one_long_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(run, capsys, "slow", more=("--timeout", "2"))
    assert found["failed"] == 0 and found["seconds"] > 2


@pytest.mark.heavy
def test_a_reward_that_blocks_or_ends_its_process_costs_its_own_replies(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(run, capsys, "blocks", more=("--timeout", "2"))
    assert [each["rollout"] for each in found["errors"]] == ["g1.1", "g1.2"]
    found = printed(run, capsys, "ends")
    assert [each["rollout"] for each in found["errors"]] == ["g2"] and "exit status 7" in found["errors"][0]["error"]
    assert found["rollouts"] == (GROUPS - 1) * MEMBERS


@pytest.mark.heavy
def test_scores_are_kept_beside_the_ledger(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(run, capsys, "longer", more=("--write", "length", "--steps", "2:3"))
    assert found["groups"] == 8 and Path(found["written"]) == run / "scores/length.jsonl"
    kept = scores.load(RunDir(run), "length")
    assert len(kept) == 8 * MEMBERS and min(kept)[0] == 4 and max(kept)[0] == 11
    with pytest.raises(ConfigError, match=r"no scores 'other' \(there are: length\)"):
        scores.load(RunDir(run), "other")
    [shown] = PER_RUN["scores"].answer(OpenRun(run), {})
    assert shown["name"] == "length" and shown["rewards"] == found["rewards"] and shown["mean"] == found["mean"]
    turns = [turn for row in shown["disagreements"] for turn in row["branches"][0]["turns"]]
    assert len(shown["disagreements"]) == 10 and any("Say a word." in turn["text"] for turn in turns)


@pytest.mark.heavy
def test_wrong_words_are_told(run: Path) -> None:
    for words, message in (
        ([], "which reward"),
        (["--reward", "maths"], "did you mean 'math'"),
        (["--reward", "stored_runs:no"], "no 'no'"),
        (["--reward", "math=much"], "'much' is no weight"),
        (["--reward", "math", "--steps", "9:3"], "'9:3' are no steps"),
        (["--reward", "math", "--steps", "900"], "its steps are 1 to 15"),
        (["--reward", "stored_runs:of_sample"], r"write `def reward\(args, sample\)`"),
    ):
        with pytest.raises(ConfigError, match=message):
            rescore([str(run), *words, "--workers", "1"])


@pytest.mark.parametrize(("name", "told"), [("../x", "use letters"), ("x", "nothing can be written to .*scores")])
def test_scores_that_cannot_be_kept_are_refused_before_they_are_computed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr("stretto_review.rescore.judge_all", lambda *words: pytest.fail("it was judged"))
    (tmp_path / "configs").symlink_to(run / "configs")
    (tmp_path / "ledger.sqlite").symlink_to(run / "ledger.sqlite")
    (tmp_path / "scores").write_text("no directory")
    with pytest.raises(ConfigError, match=told):
        rescore([str(tmp_path), "--reward", "exact", "--write", name])


@pytest.mark.heavy
@pytest.mark.parametrize(
    "env", [{"id": "dataset", "args": {"reward": "models.rm"}}, {"id": "words", "args": {}, "models": {"judge": "rm"}}]
)
def test_an_environment_that_asks_a_model_is_not_judged_without(tmp_path: Path, env: dict[str, Any]) -> None:
    section = {"algo": {"type": "grpo"}, "group_size": MEMBERS, "env": [env]}
    run = write_run(tmp_path / "one", 4, config={"orchestrator": section, "models": {"rm": {"model": "x"}}})
    with pytest.raises(ConfigError, match=r"asks the model rm .* only a run starts; give a function"):
        rescore([str(run), "--reward", "env", "--workers", "1"])
