"""Texts that begin with {output_dir}/ follow the directory of all runs; files and flags continue a run there."""

from __future__ import annotations

import json
from os.path import expanduser
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.load import build, check_place, dump, load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.deployment import ResumeSection

TOML = """
[model]
name = "{output_dir}/warm/weights/latest"
[[orchestrator.env]]
id = "dataset"
args = { path = "{output_dir}/rows.jsonl", words = "say {output_dir}/" }
"""


@pytest.mark.parametrize(
    ("flags", "root"), [([], "outputs"), (["--output-dir", "/a/b/"], "/a/b"), (["--output-dir=~/c"], "~/c")]
)
def test_a_path_in_the_output_directory_follows_it(tmp_path: Path, flags: list[str], root: str) -> None:
    (tmp_path / "rl.toml").write_text(TOML)
    cfg = load(RLConfig, ["@", str(tmp_path / "rl.toml"), *flags])
    assert cfg.model.name == cfg.inference_config().model == expanduser(f"{root}/warm/weights/latest")
    assert cfg.orchestrator.env[0].args == {"path": f"{root}/rows.jsonl", "words": "say {output_dir}/"}
    assert build(RLConfig, dump(cfg)) == cfg
    assert cfg.run_name == "dataset-warm"


def test_a_flag_and_a_path_of_data_may_say_it_too(tmp_path: Path) -> None:
    words = ["--data.name", "{output_dir}/rows.jsonl", "--output-dir", str(tmp_path), "--max-steps", "1"]
    assert load(SFTConfig, words).data.name == str(tmp_path / "rows.jsonl")


def test_an_output_directory_that_is_a_link_to_nowhere_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"out is a link to gone, which is not there; make"):
        rundir.check(RunDir(tmp_path / "out" / "run"), resume=False, step=None, clean=False)


def test_a_flag_that_is_given_twice_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    words = [
        "--orchestrator.env.0.id",
        "sort-letters",
        "--seed",
        "1",
        "--max-steps",
        "3",
        "--max_steps",
        "4",
        "--seed=1",
    ]
    assert load(RLConfig, words).max_steps == 4
    assert "--max-steps 3 is given again as --max_steps 4: the last one counts" in caplog.text
    assert "--seed" not in caplog.text


def test_a_wrong_output_directory_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("output_dir = 3\n" + TOML)
    with pytest.raises(ConfigError, match=r"1 problem.*\n.*rl.toml:1: output_dir = 3"):
        load(RLConfig, ["@", str(tmp_path / "rl.toml")])


RESUMED = TOML.replace("{output_dir}/warm", "m").replace('path = "{output_dir}/rows.jsonl", words', "words")


@needs("prime")
@pytest.mark.parametrize("table", ["[resume]\n", "[ckpt]\nresume_step = -1\n"])
def test_a_file_that_resumes_starts_a_run_and_continues_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    (tmp_path / "rl.toml").write_text(table + RESUMED)
    words = ["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path), "--run.name", "r"]
    first = load(RLConfig, words)
    assert first.resume is None and not first.start_options["resume"]
    assert f"{tmp_path}/rl.toml:" in caplog.text and "has no complete checkpoint yet" in caplog.text
    run = first.run_dir
    run.checkpoint(3).mkdir(parents=True)
    assert load(RLConfig, words).resume is None
    run.complete_marker(3).touch()
    assert load(RLConfig, words).resume == ResumeSection()


@pytest.mark.parametrize("word", ["--resume", "--clean"])
def test_the_file_of_a_copied_run_does_not_continue_or_delete_the_first(tmp_path: Path, word: str) -> None:
    first, copy = RunDir(tmp_path / "r"), RunDir(tmp_path / "copy")
    for run in (first, copy):
        run.configs.mkdir(parents=True)
        run.ledger.touch()
        run.config("run").write_text(json.dumps({"output_dir": str(tmp_path), "run": {"name": "r"}, "model": {}}))
    words = ["@", str(copy.config("run")), "--orchestrator.env.0.id", "sort-letters", word]
    with pytest.raises(ConfigError, match=f"says that its run is in {first}, .*--run.name copy"):
        check_place(load(RLConfig, words), words)
    for right in (
        [*words, "--run.name", "copy"],
        ["@", str(first.config("run")), *words[2:]],
        words[:-1],  # a new run: it is refused by what is in the directory
    ):
        check_place(load(RLConfig, right), right)


def test_a_run_that_ended_before_its_first_step_begins_anew_also_with_a_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rl.toml").write_text(RESUMED)
    words = ["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path), "--run.name", "r", "--resume"]
    run = load(RLConfig, words).run_dir
    run.ledger.parent.mkdir(parents=True)
    run.ledger.touch()
    assert load(RLConfig, words).resume == ResumeSection(), "it was killed: nothing is thrown away"
    run.summary.write_text('{"steps": 0}')
    assert load(RLConfig, words).resume is None
    assert "ended before its first step, so there is nothing to continue: it begins anew" in caplog.text
    ended = {
        "steps": 0,
        "stopped_because": "budget.max_hours = 2, and the run has used 2.01 h",
        "used": {"hours": 2.01},
    }
    run.summary.write_text(json.dumps(ended))
    with pytest.raises(ConfigError, match=r"ended before its first step: budget.max_hours = 2, .*raise that bound, or"):
        load(RLConfig, [*words, "--budget.max-hours", "2"])
    assert load(RLConfig, [*words, "--budget.max-hours", "4"]).resume is None
    run.metrics("trainer").parent.mkdir(parents=True)
    run.metrics("trainer").write_text('{"step": 1}\n')
    assert load(RLConfig, words).resume == ResumeSection(), "it has trained a step"


@pytest.mark.parametrize(
    ("table", "flags"),
    [("[resume]\n", ["--resume"]), ("", ["--resume"]), ("[resume]\nstep = 3\n", []), ('[resume]\ndir = "other"\n', [])],
)
def test_a_flag_a_step_or_a_directory_names_what_must_exist(tmp_path: Path, table: str, flags: list[str]) -> None:
    (tmp_path / "rl.toml").write_text(table + RESUMED)
    cfg = load(RLConfig, ["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path), *flags])
    assert cfg.resume is not None
    with pytest.raises(ConfigError, match="there is no"):
        rundir.check(cfg.run_dir, **cfg.start_options)


def test_what_a_dry_run_left_is_not_among_the_runs_that_are_there(tmp_path: Path) -> None:
    for name in ("r", "other"):
        RunDir(tmp_path / name).configs.mkdir(parents=True)
    RunDir(tmp_path / "used").configs.mkdir(parents=True)
    (tmp_path / "used" / "ledger.sqlite").touch()
    with pytest.raises(ConfigError, match=r"no run 'r' .*: used"):
        rundir.check(RunDir(tmp_path / "r"), resume=True, step=None, clean=False)
