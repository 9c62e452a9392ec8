"""Every code block of the documents is understood: commands and configurations plan, Python executes, JSON is read.

That they also train is tests/e2e/documents.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages.blocks import CONFIG_VERBS, NOT_RUN, ROOT, VIEW_VERBS, Block, Command, all_commands, blocks
from pages.workplace import build_workplace, link_models, reader_files, whole_config
from processes.forked import fork_children_of

from stretto.base import ports, process
from stretto.check import weights
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto_service.config import ServeConfig

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture
def workplace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as working directory; what is imported from it is forgotten afterwards.

    Commands give ports, which other programs of this machine may have: all count as free.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(ports, "SCOPE", os.urandom(8).hex())
    monkeypatch.setattr(ports, "is_free", lambda host, port: True)
    monkeypatch.syspath_prepend(str(folder))
    for module in (process, weights):
        fork_children_of(monkeypatch, module)
    yield folder
    for name in reader_files():
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture(scope="module")
def cached_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a machine on which the data of the recipes was fetched."""
    cache = tmp_path_factory.mktemp("cache")
    copy = cache / "datasets--openai--gsm8k" / "snapshots" / "0"
    copy.mkdir(parents=True)
    (copy.parents[1] / "refs").mkdir()
    (copy.parents[1] / "refs" / "main").write_text("0")
    row = json.dumps({"question": "What is 6 times 12?", "answer": "6*12=72\n#### 72"})
    for split in ("train", "test"):
        (copy / f"{split}.jsonl").write_text(f"{row}\n" * 4)
    files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "test"))
    (copy / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return cache


@pytest.mark.parametrize("command", [c for c in all_commands() if c.verb in CONFIG_VERBS], ids=str)
def test_every_command_is_understood(
    command: Command,
    workplace: Path,
    cached_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if any("examples/gsm8k" in word for word in command.words):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached_data))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    # Whether a run is there to continue or to delete is tested elsewhere.
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    words = [os.path.expandvars(word) for word in command.words if word not in ("--resume", "--clean")]
    if command.verb in ("sft", "rl") and "--output-dir" not in words:
        runs = link_models(workplace / "outputs", tmp_path / "runs") if command.verb == "rl" else tmp_path
        words += ["--output-dir", str(runs)]
    if "--service" in words:  # whether that service takes the run is asked: tests/e2e/service
        load(RLConfig, [word for word in words[1:] if word != "--dry-run"])
        return
    if "--from-ledger" in words:  # it reads a run that has been: tests/addons/review
        return
    if "examples/repo_repair/warm_up.toml" in words:  # its rows are solved tasks, which pip's packages are needed for
        load(SFTConfig, words[1:])
        return
    assert_dry_run([*words, "--dry-run"], capsys)


def assert_dry_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It ends well, or says that vLLM's CPU build does not take this model: the demo's heads are narrow."""
    code, said = main(words), capsys.readouterr().err
    assert code in (0, None) or "on a CPU vLLM supports" in said, said


def test_every_other_command_is_ours_or_has_its_reason() -> None:
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
    for command in all_commands():
        if command.verb == "make":
            assert command.words[1] in " ".join(targets).split(), command
        elif command.verb not in (*CONFIG_VERBS, *VIEW_VERBS):
            assert command.reason is not None, f"{command}: no test runs it, and NOT_RUN has no reason"


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_every_configuration_plans(
    block: Block, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, text = whole_config(block)
    for name in re.findall(r'api_key_var = "(\w+)"', text):
        monkeypatch.setenv(name, "a-key")
    (tmp_path / "config.toml").write_text(text)
    if any(each in (block.reason or "") for each in ("on the Hub", "not installed")):
        load(
            {"rl": RLConfig, "sft": SFTConfig, "serve": ServeConfig}[verb],
            ["@", str(tmp_path / "config.toml")],
            verb=verb,
        )
        return
    runs = link_models(workplace / "outputs", tmp_path / "runs")
    words = [verb, "@", str(tmp_path / "config.toml"), "--output-dir", str(runs), "--dry-run"]
    assert_dry_run(words, capsys)


@pytest.mark.parametrize("block", [b for b in blocks("python") if "import stretto\n" not in b.text], ids=str)
def test_python_that_defines_something_executes(block: Block, workplace: Path) -> None:
    if "run = stretto." in block.text or block.reason is not None:
        pytest.skip(block.reason or "a script: tests/e2e/documents")
    if "verifiers" in block.text:
        pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    names: dict[str, object] = {"__name__": "shown"}
    exec(compile(block.text, str(block), "exec"), names)
    assert len(names) > 2


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_every_record_is_one_object_of_json(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


def test_every_reason_is_still_needed() -> None:
    shown = [(b.page, b.text) for b in blocks()] + [(c.block.page, " ".join(c.words)) for c in all_commands()]
    for page, piece in NOT_RUN:
        assert any(page == of and piece in text for of, text in shown), f"nothing in {page} has {piece!r}"
