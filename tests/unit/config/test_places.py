"""Paths that a shell would have changed, and seeds: what a config makes of them before a start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError, DataError
from stretto.config.load import load
from stretto.config.root import EvalConfig, InferenceConfig, RLConfig, SFTConfig
from stretto.data.records import read_records

ENV = ["--orchestrator.env", '[{"id": "sort-letters"}]']


def test_a_tilde_is_the_home_directory_in_every_key_that_is_a_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--output-dir", "~/x", "--model.name", "~/models/m", "--tokenizer.name", "~/t"]
    cfg = load(RLConfig, [*ENV, *words, "--resume.dir", "~/before"])
    assert cfg.output_dir == tmp_path / "x" and cfg.resume.dir == tmp_path / "before"
    assert cfg.model.name == f"{tmp_path}/models/m" and cfg.tokenizer.name == f"{tmp_path}/t"
    assert load(InferenceConfig, ["--model", "~/m"]).model == f"{tmp_path}/m"
    data = load(SFTConfig, ["--data.name", '["~/a.jsonl", "b.jsonl"]', "--max-steps", "1"]).data
    assert data.sources == [f"{tmp_path}/a.jsonl", "b.jsonl"]


def test_a_file_of_records_may_begin_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert [row for _, row in read_records("~/d.jsonl@[1:]")] == [{"a": 2}]


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (RLConfig, [*ENV, "--output-dir", "$HOME/x"]),
        (RLConfig, [*ENV, "--model.name", "${HOME}/model"]),
        (SFTConfig, ["--data.name", "$HOME/d.jsonl", "--max-steps", "1"]),
        (SFTConfig, ["--data.name", "d.jsonl", "--max-steps", "1", "--ckpt.output-dir", "$HOME/c"]),
    ],
)
def test_a_variable_of_the_shell_is_refused_with_a_sentence(cls, words):
    with pytest.raises(ConfigError, match=r"shell.*\$\{?HOME\}?.* ~"):
        load(cls, words)


def test_a_variable_of_the_shell_is_reported_at_the_line_of_its_key(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text('seed = 1\noutput_dir = "$HOME/x"\n')
    with pytest.raises(ConfigError) as error:
        load(RLConfig, ["@", str(file), *ENV])
    assert f"{file}:2: output_dir = " in str(error.value)
    with pytest.raises(ConfigError) as error:
        load(SFTConfig, ["--data.name", '["$HOME/a.jsonl"]', "--max-steps", "1"])
    assert str(error.value).count("\n") == 1 and "data.name = " in str(error.value)


@pytest.mark.parametrize("key", ["output-dir", "model.name", "ckpt.output-dir"])
def test_the_home_of_a_user_whom_nobody_knows_is_refused(key):
    with pytest.raises(ConfigError, match=rf"--{key} .*no user of this machine has the home ~nobody-here"):
        load(RLConfig, [f"--{key}", "~nobody-here/x", *ENV])


def test_a_variable_in_the_path_of_records_is_refused():
    with pytest.raises(ConfigError, match=r"path = '\$HOME/d.jsonl': .*shell"):
        next(read_records("$HOME/d.jsonl", "dataset: path"))


@pytest.mark.parametrize("seed", ["-1", str(2**63), str(10**20)])
@pytest.mark.parametrize(
    ("cls", "words", "key"),
    [
        (RLConfig, ENV, "--seed"),
        (SFTConfig, ["--data.name", "d.jsonl", "--max-steps", "1"], "--seed"),
        (InferenceConfig, [], "--seed"),
        (EvalConfig, ["--eval.env", '[{"id": "sort-letters"}]', "--model", "m"], "--seed"),
        (RLConfig, ENV, "--model.scratch.seed"),
    ],
)
def test_a_seed_has_a_range(cls, words, key, seed):
    with pytest.raises(ConfigError, match=r"seed"):
        load(cls, [*words, key, seed])


def test_the_largest_seed_is_accepted():
    assert load(RLConfig, [*ENV, "--seed", str(2**63 - 1)]).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("name", "command"), [("a b.csv", "csv.DictReader"), ("rows.json", "json.load"), ("rows.tsv", "chr(9)")]
)
def test_other_files_get_a_command_that_makes_records_of_them(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a", "label": "b"}]
    separator = "\t" if name.endswith("tsv") else ","
    lines = [separator.join(rows[0]), separator.join(rows[0].values())]
    Path(name).write_text(json.dumps(rows) if name.endswith("json") else "\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        next(read_records(name))
    text = str(caught.value).partition("To make one of it: ")[2]
    assert command in text
    subprocess.run(text, shell=True, check=True)
    assert [row for _, row in read_records(Path(name).with_suffix(".jsonl"))] == rows


def test_a_csv_file_of_excel_gets_a_command_that_knows_its_mark_and_its_semicolons(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt;label\na, b;\u00fc\n", encoding="utf-8-sig")
    with pytest.raises(ConfigError) as caught:
        next(read_records(path))
    subprocess.run(str(caught.value).partition("To make one of it: ")[2], shell=True, check=True)
    assert [row for _, row in read_records(path.with_suffix(".jsonl"))] == [{"prompt": "a, b", "label": "\u00fc"}]


def test_json_that_python_cannot_read_names_its_line(tmp_path):
    for text, words in (
        ("[" * 100_000 + "]" * 100_000, "too many levels"),
        ("1" * 5000, "write such a number as text"),
    ):
        (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": ' + text + "}\n")
        with pytest.raises(DataError, match=rf"d.jsonl:2: .*{words}"):
            list(read_records(tmp_path / "d.jsonl"))
