"""Paths that are not there, or are of another kind: a message names the path that was meant."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from processes.add_ons import is_here, needs, skip_without_verb

from stretto import cli, verbs
from stretto.base import keeper
from stretto.base.errors import near_path, reason_of

CONFIG = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
OK = "rl @ ok.toml --dry-run"
DATASET = "--orchestrator.env.0.id dataset --orchestrator.env.0.args.path"
# name: (command, what is said, the way out)
MISTAKES = {
    "a model of a near name": (f"{OK[:-10]} --model.name outputs/warm/weights/lates",
        "no such directory", "weights/latest?"),
    "a run of a near name": ("rl @ ok.toml --model.name outputs/warn/weights/latest",
        "there is no such directory", "did you mean outputs/warm/weights/latest?"),
    "a service of a near name": ("serve --model.name outputs/warn/weights/latest --dry-run",
        "there is no such model", "did you mean outputs/warm/weights/latest?"),
    "a template of Slurm": (f"{OK} --slurm.template-path job.s", "there is no such file", "did you mean job.sh?"),
    "a plan from a run": ("plan ok.toml --from outputs/warn", "there is no directory outputs/warn", "outputs/warm?"),
    "a measured file": ("plan ok.toml --measured o.tom", "there is no such file", "did you mean ok.toml?"),
    "a directory as a configuration": ("rl @ outputs --dry-run", "outputs: this is a directory", "in it are none"),
    "a run as a configuration": ("rl @ outputs/warm --dry-run",
        "this is a run's directory", "outputs/warm/configs/run.json"),
    "a configuration without its ending": ("rl @ ok --dry-run", "not a .toml or .json file", "did you mean ok.toml?"),
    "a file as output_dir": (f"{OK} --output-dir ok.toml", "ok.toml is a file, not a directory", "another output_dir"),
    "a tracker that is none": (f"{OK} --monitors.comet",
        "--monitors.comet: unknown flag", "wandb, tensorboard, trackio"),
    "a family that is none": (f"{OK} --model.name quen", 'has model_type = "quen3"', "did you mean qwen3"),
    "a reward of a near name": (f"{OK} --orchestrator.env.0.id dataset --orchestrator.env.0.args.path rows.jsonl "
        "--orchestrator.env.0.args.reward mathh", 'reward = "mathh"', 'did you mean "math"?'),
    "a file as a model": (f"{OK} --model.name ok.toml",
        "model 'ok.toml': this is a file", "config.json and safetensors"),
    "a pattern": (f"{OK} {DATASET} rows*.jsonl", "'rows*.jsonl': patterns are not read", "give the directory, '.'"),
    "an address": (f"{OK} {DATASET} s3://a/rows.jsonl",
        "'s3://a/rows.jsonl': addresses are not read", "copy the file here"),
    "an ending in large letters": (f"{OK} {DATASET} ROWS.JSONL", "must be in small letters", "rename it to ROWS.jsonl"),
    "prompts of vime": ("vime --hf-checkpoint tiny --prompt-data row.jsonl",
        "--prompt-data row.jsonl: no such file; did you mean rows.jsonl?", "--rollout-num-gpus is missing"),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory with a configuration, a run, a model and a model of an unknown family."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "ok.toml").write_text('max_steps = 4\n[[orchestrator.env]]\nid = "sort-letters"\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "ROWS.JSONL").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    for name, family in (("tiny", "qwen3"), ("quen", "quen3"), ("outputs/warm/weights/latest", "qwen3")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | {"model_type": family}))
    (tmp_path / "outputs/warm/configs").mkdir()
    (tmp_path / "outputs/warm/configs/run.json").write_text("{}")
    return tmp_path


@pytest.mark.heavy
@needs("prime")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_path_or_name_that_is_not_there_is_told_with_the_one_that_is(mistake, place, capsys):
    command, said, way_out = MISTAKES[mistake]
    skip_without_verb(command.split()[0])
    if "--slurm" in command and not is_here("clusters"):
        pytest.skip("without stretto_clusters")
    assert cli.main(command.split()) in (1, 2)
    text = " ".join(capsys.readouterr().err.split())
    assert said in text and way_out in text, text
    assert "Errno" not in text and "bug" not in text, text


def test_a_path_with_one_wrong_part_has_a_near_one_and_others_have_none(tmp_path):
    (tmp_path / "outputs/run-a/weights").mkdir(parents=True)
    assert near_path(tmp_path / "outputs/run-b/weights") == tmp_path / "outputs/run-a/weights"
    assert near_path(tmp_path / "outputs/run-b/adapters") is None
    assert near_path(tmp_path / "other/run-a/weights") is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "x"), "there is no such file"),
        (IsADirectoryError(21, "Is a directory", "x"), "this is a directory, not a file"),
        (PermissionError(13, "Permission denied", "x"), "this user has no permission"),
        (OSError(28, "No space left on device", "x"), "no space left on device"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "not UTF-8 text; save it as UTF-8"),
    ],
)
def test_a_reason_has_no_number_of_the_system(error, said):
    assert reason_of(error) == said


@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize("file", [None, "outputs/run/checkpoints/step_1"])
def test_a_full_disk_is_no_bug(is_child, file, monkeypatch, capsys):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device", file)

    monkeypatch.setattr(verbs, "run_config_verb", fail)
    monkeypatch.setenv(keeper.VARIABLE, "1") if is_child else monkeypatch.delenv(keeper.VARIABLE, raising=False)
    assert cli.run_verb("rl", ["@", "a.toml"]) == 1
    place = "a file that was being written" if file is None else repr(file)
    assert capsys.readouterr().err == f"error: {place}: no space left on device; free some, or give another place\n"


def test_a_mark_of_windows_at_the_head_of_a_configuration_is_no_part_of_it(place, capsys):
    (place / "bom.toml").write_text((place / "ok.toml").read_text(), encoding="utf-8-sig")
    assert cli.main(["rl", "@", "bom.toml", "--model.name", "tiny", "--print-config"]) == 0
    assert "max_steps = 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RL @ ok.toml", "did you mean `rl`?"),
        ("train @ ok.toml", "did you mean `rl`?"),
        pytest.param("finetune", "did you mean `sft`?", marks=needs("sft")),
        ("ok.toml", "a verb comes first, as in `stretto rl @ ok.toml`"),
        ("--hlp", "did you mean --help?"),
        ("rl --hepl @ ok.toml", "did you mean --help?"),
        ("rl --hlp @ ok.toml", "did you mean --help?"),
        ("rl --dry @ ok.toml", "did you mean --dry-run?"),
        ("rl @ ok.toml --orchestrator.batch 8", "did you mean --orchestrator.batch-size?"),
        ("trainr", "did you mean `trainer`?"),
    ],
)
def test_a_word_that_is_no_verb_is_told_with_the_verb_that_is_meant(place, words, said, capsys):
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("Task(env='e', task_id=3, data={})", "task_id is 3; give a text, such as str(3)"),
        ("Task(env='e', task_id='a', data=[1])", "data is list [1]; give a dictionary"),
        ("{'x': 1}", "is a dict, not a Task; Own.tasks.<locals>.<lambda>"),
    ],
)
def test_a_task_of_a_wrong_shape_is_told_what_to_give(place, made, said, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(place))
    module = f"own_tasks_{len(made)}"
    (place / f"{module}.py").write_text(
        "from stretto.envs.base import SingleTurnEnv, TaskSource\n"
        "from stretto.records.rollout import Task\n"
        "class Own(SingleTurnEnv):\n"
        "    name = 'own'\n"
        f"    def tasks(self, split):\n        return TaskSource(lambda i: {made})\n"
        "    def prompt(self, task):\n        return 'x'\n"
        "    def score(self, task, text):\n        return 1.0\n"
    )
    assert cli.main(f"rl --orchestrator.env.0.id {module}:Own --model.name none --dry-run".split()) in (1, 2)
    text = " ".join(capsys.readouterr().err.split())
    assert said in text and "bug" not in text, text


@needs("view")
def test_an_empty_ledger_is_not_called_old(place, capsys):
    (place / "outputs/warm/ledger.sqlite").write_bytes(b"")
    assert cli.main(["rollouts", "outputs/warm"]) in (1, 2)
    said = capsys.readouterr().err
    assert "ledger.sqlite: the ledger is empty" in said and "older" not in said


@pytest.mark.parametrize("words", ["status ~nobody-here/x", "logs ~nobody-here", "rl @ ~nobody-here/rl.toml --dry-run"])
def test_a_home_that_is_not_there_is_told_wherever_a_path_is_read(place, words, capsys):
    assert cli.main(words.split()) in (1, 2)
    said = capsys.readouterr().err
    assert "no user of this machine has the home ~nobody-here" in said and "bug" not in said
