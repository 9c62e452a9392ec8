"""A run directory as rows, text and pictures: of an orchestrator with fakes at the other ends of its wires."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

import stretto
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto_view.commands import as_text, plot, rollouts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of eight rollouts, with evals of versions 0, 2, 4 and 5."""
    cfg = config(tmp_path_factory.mktemp("runs"), eval={"num_examples": 10, "interval": 2, "sampling": {}})
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    run_dir: RunDir = cfg.run_dir
    run_dir.configs.mkdir()
    resolved = {"model": {"name": None}, "tokenizer": {"name": None}, "inference": {"api_key": "s3cret"}}
    run_dir.config("run").write_text(json.dumps(resolved))
    build_letters_tokenizer(run_dir.tokenizer, "".join(map(chr, range(1, 128))))
    return run_dir.path


def test_the_config_is_the_resolved_one_without_its_keys(path: Path) -> None:
    assert stretto.Run(path).config["inference"] == {"api_key": "***"}


def test_metrics_are_a_row_per_step(path: Path) -> None:
    rows = stretto.Run(path).metrics()
    assert [row["step"] for row in rows] == list(range(6))
    assert all(0 < row["reward/mean"] < 1 for row in rows[1:])


def test_rollouts_of_a_step_are_those_it_trained(path: Path) -> None:
    rows = stretto.Run(path).rollouts(step=2)
    assert len(rows) == 8 and {row["step"] for row in rows} == {2}
    for row in rows:
        assert row["env"] == "echo" and row["status"] == "finished" and row["reward"] in (0.0, 1.0)
        assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["is_sampled"]) == row["num_tokens"]
        assert np.count_nonzero(row["is_sampled"]) == row["num_sampled_tokens"]
        assert row["versions"] == [row["first_version"]] and isinstance(row["reply"], str) and row["prompt"]
    assert abs(sum(row["advantage"] for row in rows)) < 1e-6


def test_the_best_and_the_worst_are_found_over_all_steps(path: Path) -> None:
    run = stretto.Run(path)
    rewards = [row["reward"] for row in run.rollouts()]
    assert [row["reward"] for row in run.rollouts(best=3)] == sorted(rewards)[::-1][:3]
    assert [row["reward"] for row in run.rollouts(worst=3)] == sorted(rewards)[:3]
    assert len(run.rollouts(limit=5)) == 5 and run.rollouts(status="failed") == []
    with pytest.raises(ConfigError, match=r"no environment 'ecco' .*echo"):
        run.rollouts(env="ecco")
    with pytest.raises(ConfigError, match=r"rollouts: step = 99: .* has steps 1 to 5\.$"):
        run.rollouts(step=99)
    with pytest.raises(ConfigError, match=r"status = 'finsihed'; give one of finished, truncated, failed, dropped"):
        run.rollouts(status="finsihed")
    with pytest.raises(ConfigError, match="exclude each other"):
        run.rollouts(best=1, worst=1)
    for name, number in (("best", 0), ("worst", "a"), ("limit", -1)):
        with pytest.raises(ConfigError, match=f"rollouts: {name} = .*not a number of rollouts; give 1 or more"):
            run.rollouts(**{name: number})


def test_evals_are_a_row_per_version_and_way_of_sampling(path: Path) -> None:
    run = stretto.Run(path)
    assert [(row["version"], row["mode"]) for row in run.evals()] == [
        (version, mode) for version in (0, 2, 4, 5) for mode in ("sampled", "greedy")
    ]
    with pytest.raises(ConfigError, match=r"version = 3: .* has evaluated versions 0, 2, 4, 5\.$"):
        run.eval_samples(3)
    samples = run.eval_samples(2)
    assert {row["version"] for row in samples} == {2} and all(row["branches"] for row in samples)


def test_replies_with_line_ends_of_other_kinds_are_one_row_each(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.config("run").write_text("{}")
    run.eval(3).mkdir(parents=True)
    replies = ["a\u2028b", "a\u0085b", "a\r\nb", "plain"]
    lines = [json.dumps({"reply": reply}, ensure_ascii=False) for reply in replies]
    (run.eval(3) / "e-sampled.jsonl").write_text("\n".join(lines) + "\n")
    assert [row["reply"] for row in stretto.Run(run.path).eval_samples(3)] == replies
    assert len(stretto.Run(run.path).eval_samples(3, limit=2)) == 2


def test_runs_are_compared_by_a_row_each(path: Path) -> None:
    [row] = stretto.compare([path])
    assert row["run"] == "test" and row["steps"] == 5 and 0 < row["reward"] < 1


def test_a_rollout_whose_tokens_are_gone_is_a_row_without_text(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "ledger.sqlite").write_bytes((path / "ledger.sqlite").read_bytes())
    row = stretto.Run(copy).rollouts(step=1)[0]
    assert row["reply"] is None and row["reward"] is not None
    assert "no longer kept" in as_text(row)


def test_show_prints_conversations(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollouts([str(path), "--worst", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("── g") == 2 and "reward 0.000" in out
    assert rollouts([str(path)]) == 0 and capsys.readouterr().out.count("step 5") == 3
    with pytest.raises(ConfigError, match=r"rollouts: step = 77: .* has steps 1 to 5\."):
        rollouts([str(path), "--step", "77"])


@pytest.mark.heavy
def test_plot_draws_and_says_what_there_is_instead_of_an_unknown_metric(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plot.png"
    assert plot([str(path), "--out", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and "reward" in capsys.readouterr().out
    figure = stretto.Run(path).plot("reward/mean", "loss/mean")
    assert [axes.get_ylabel() for axes in figure.axes] == ["mean reward of the training batch", "loss/mean"]
    with pytest.raises(ConfigError, match="did you mean reward/mean"):
        plot([str(path), "--key", "reward/maen"])


@pytest.mark.heavy
def test_a_picture_that_cannot_be_written_and_a_wrong_number_are_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, reason in (("none/plot.png", "there is no directory"), ("plot.xyz", "is no format of pictures")):
        with pytest.raises(ConfigError, match=f"plot: cannot write .*{reason}"):
            plot([str(path), "--out", str(tmp_path / name)])
    for flag in ("--best", "--worst", "--limit"):
        for number in ("0", "-1", "many"):
            with pytest.raises(ConfigError, match="give at least 1"):
                rollouts([str(path), f"{flag}={number}"])


def test_a_path_without_a_run_names_the_runs_beside_it(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this is no run directory.* Runs in .*/test"):
        stretto.Run(path.parent)
    with pytest.raises(ConfigError, match=r"there is no such directory; did you mean .*test\?"):
        stretto.Run(path.parent / "tset")
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        stretto.runn  # noqa: B018
