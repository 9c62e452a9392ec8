"""`stretto init`: the project that it writes can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import cli
from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto_start.project import init


def test_init_writes_a_project_whose_files_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "mine"
    assert cli.main(["init", str(directory)]) == 0
    monkeypatch.chdir(directory)
    assert {path.name for path in directory.iterdir()} == {"envs.py", "sft.toml", "rl.toml", "README.md"}
    for verb, root in (("sft", SFTConfig), ("rl", RLConfig)):
        load(root, ["@", f"{verb}.toml"])
    before = (directory / "rl.toml").read_text()
    assert cli.main(["init", str(directory)]) == 2 and (directory / "rl.toml").read_text() == before
    (tmp_path / "file").write_text("")
    assert cli.main(["init", str(tmp_path / "file" / "below")]) == 2


def test_init_writes_over_nothing_by_a_detour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text("mine")
    with pytest.raises(ConfigError, match="is there and not empty"):
        init(["new/.."])
    assert (tmp_path / "rl.toml").read_text() == "mine"
