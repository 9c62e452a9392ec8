"""Every verb given something that is not what it takes: one message with the place in it, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from processes.add_ons import needs

from stretto.cli import main

pytestmark = pytest.mark.heavy

SFT = pytest.param("sft", marks=needs("sft"))
GARBAGE = bytes(range(256)) * 4
CONTENTS = {"empty": b"", "binary": GARBAGE, "list": b"[1, 2]", "object": b'{"step": "x"}', "directory": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with evals."""
    cfg = config(tmp_path_factory.mktemp("runs"), eval={"num_examples": 2, "interval": 2, "sampling": {}})
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    cfg.run_dir.configs.mkdir()
    cfg.run_dir.config("run").write_text(json.dumps({"model": {"name": None}, "tokenizer": {"name": None}}))
    return cfg.run_dir.path


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that must fail says on stderr."""
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    output = capsys.readouterr().err
    assert code in (1, 2), f"{words} ended with {code}: {output}"
    assert "Traceback" not in output and "This is a bug" not in output, output
    assert "error: " in output
    return output


def file(path: Path, content: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


WRONG_RUNS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "file": file,
    "binary": lambda path: file(path, GARBAGE),
    "empty": lambda path: path.mkdir(),
    "link-to-nothing": lambda path: path.symlink_to("nowhere"),
    "x" * 300: lambda path: None,
    "empty-ledger": lambda path: file(path / "ledger.sqlite"),
    "binary-ledger": lambda path: file(path / "ledger.sqlite", GARBAGE),
    "ledger-is-a-directory": lambda path: (path / "ledger.sqlite").mkdir(parents=True),
    "not-yet-started": lambda path: file(path / "configs" / "run.json", b"{}"),
}


@pytest.mark.parametrize("verb", ["rollouts", "plot"])
@pytest.mark.parametrize("name", WRONG_RUNS, ids=lambda name: name[:30])
def test_what_is_no_run_is_named(verb: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    WRONG_RUNS[name](tmp_path / name)
    assert name in said([verb, str(tmp_path / name)], capsys)


DAMAGE: dict[str, tuple[str, list[str]]] = {
    "configs/run.json": ("rollouts", []),
    "ledger.sqlite": ("rollouts", ["--step", "1"]),
    "summary.json": ("plot", []),
    "metrics/orchestrator.jsonl": ("plot", []),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_of_a_run_is_named(
    name: str, content: bytes | None, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None and content[:1] == b"{" and name in ("configs/run.json", "summary.json"):
        return  # as far as anybody knows that is one
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    for path in copy.glob(f"{name}*"):
        path.unlink()
    if content is None:
        (copy / name).mkdir(parents=True)
    else:
        (copy / name).write_bytes(content)
    verb, flags = DAMAGE[name]
    words = [verb, str(copy), *flags] + (["--out", str(tmp_path / "plot.png")] if verb == "plot" else [])
    assert "copy" in said(words, capsys)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_damaged_evals_are_named_in_python(content: bytes | None, run: Path, tmp_path: Path) -> None:
    import stretto
    from stretto.base.errors import StrettoError

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    for path in (*copy.glob("evals/version_2/*"),):
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(StrettoError, match="version_2"):
        stretto.Run(copy).evals()
    if content not in (b"", CONTENTS["object"]):
        with pytest.raises(StrettoError, match="version_2"):
            stretto.Run(copy).eval_samples(2)


WRONG_FILES: dict[str, Callable[[Path], object]] = {
    "nothing.toml": lambda path: None,
    "directory.toml": lambda path: path.mkdir(),
    "binary.toml": lambda path: file(path, GARBAGE),
    "binary.json": lambda path: file(path, GARBAGE),
    "empty.json": file,
    "list.json": lambda path: file(path, b"[1]"),
    "text.json": lambda path: file(path, b'"rl"'),
    "latin.toml": lambda path: file(path, 'run.name = "h\xe4"'.encode("latin-1")),
    "unknown.toml": lambda path: file(path, b"[nonsense]\nkey = 1\n"),
    "section.toml": lambda path: file(path, b"run = 3\nmodel = [1]\n"),
    "pipe.toml": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("verb", ["rl", SFT, "eval", "inference", "trainer", "orchestrator"])
@pytest.mark.parametrize("name", WRONG_FILES)
def test_what_is_no_configuration_is_named(
    verb: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    WRONG_FILES[name](tmp_path / name)
    assert name in said([verb, "@", str(tmp_path / name), "--output-dir", str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["rl", SFT, "eval", "inference", "trainer", "orchestrator"])
def test_an_empty_configuration_says_what_is_missing(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file(tmp_path / "empty.toml")
    said([verb, "@", str(tmp_path / "empty.toml"), "--output-dir", str(tmp_path / "out")], capsys)


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--nonsense"], [""]], ids=lambda words: " ".join(words) or "none")
@pytest.mark.parametrize("verb", ["show", "rollouts", "runs", "view", "plot", "init", "rl", SFT, "eval"])
def test_words_that_no_verb_takes_are_refused(
    verb: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said([verb, *words], capsys)


@needs("start")
@pytest.mark.parametrize("where", ["file", "file/below", "full", "x" * 300])
def test_a_project_is_not_written_where_it_cannot(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file(tmp_path / "file")
    file(tmp_path / "full" / "mine.txt")
    assert str(tmp_path / where) in said(["init", str(tmp_path / where)], capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("verb", ["rollouts", "plot", "rl", SFT])
def test_what_must_not_be_read_is_named(
    verb: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    config_file = copy / "configs" / "run.json"
    for path in (config_file, copy / "ledger.sqlite", *copy.glob("metrics/*")):
        path.chmod(0)
    place = ["@", str(config_file)] if verb in ("rl", "sft") else [str(copy)]
    assert "copy" in said([verb, *place], capsys)
