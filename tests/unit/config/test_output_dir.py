"""Texts that begin with {output_dir}/ follow the directory of all runs."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import build, dump, load
from stretto.config.root import RLConfig, SFTConfig

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


def test_a_wrong_output_directory_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("output_dir = 3\n" + TOML)
    with pytest.raises(ConfigError, match=r"1 problem.*\n.*rl.toml:1: output_dir = 3"):
        load(RLConfig, ["@", str(tmp_path / "rl.toml")])
