"""Every config of examples/ and of prime-rl is dry-run beside a config.json of its model's real size.

Without a config.json a dry run skips every rule that reads one.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from cases.real_models import MODELS, family, fill_cache
from huggingface_hub import constants

from stretto.check.models import check_model, models_of
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import Family
from stretto.data.hub_model import is_hub_name
from stretto.launch.run.rl import plan_only
from stretto.models.config import parse_config

ROOT = Path(__file__).parents[3]
EXAMPLES, RL_FILES, SFT_FILES = (
    [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(pattern))]
    for pattern in ("examples/*/rl.toml", "tests/cases/prime_rl/rl/*.toml", "tests/cases/prime_rl/sft/*.toml")
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with the config.json of every model of the files; directories of models beside it."""
    cache = tmp_path / "cache"
    fill_cache(cache)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", get_args(Family))
def test_there_is_a_config_of_real_size_for_every_family(name: str) -> None:
    assert parse_config(family(name), name).family in (name, "kimi_k2")


@pytest.mark.parametrize("name", MODELS)
def test_the_models_of_the_files_are_of_our_families(name: str) -> None:
    config = {key: value for key, value in MODELS[name].items() if key != "quantization_config"}
    assert parse_config(config, name).family in get_args(Family)


def assert_models_are_known(cfg: RLConfig) -> None:
    needed = {name for name, has_weights in models_of(cfg) if has_weights and is_hub_name(name)}
    assert needed <= set(MODELS), "give the model's real size in MODELS"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if "preference/" not in name]
)  # its tasks are a run's pairs
def test_a_dry_run_of_an_example_accepts_its_models_real_size(name: str, models: Path, capsys) -> None:
    words = ["@", str(ROOT / name), "--output-dir", str(models / "out"), "--dry-run"]
    assert_models_are_known(load(RLConfig, words))
    assert main(["rl", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", RL_FILES)
def test_a_run_of_prime_rl_is_planned_with_its_models_real_size(name: str, models: Path) -> None:
    cfg = load(RLConfig, ["@", str(ROOT / name), "--output-dir", str(models / "out"), "--dry-run"])
    model = {"name": "Qwen/Qwen3-0.6B"} if cfg.model.name == "m" else {}  # a directory of the file's own
    # What a file resumes, and its environments, are on its author's machine.
    cfg = cfg.model_copy(update={"resume": None, "model": cfg.model.model_copy(update=model)})
    assert_models_are_known(cfg)
    assert plan_only(cfg)[0].processes


@pytest.mark.parametrize("name", SFT_FILES)
def test_a_fine_tuning_fits_its_models_real_size(name: str, models: Path) -> None:
    cfg = load(SFTConfig, ["@", str(ROOT / name), "--dry-run", "--output-dir", str(models / "out")])
    assert cfg.model.name in MODELS
    check_model(cfg.model, cfg.num_ranks, "model")
