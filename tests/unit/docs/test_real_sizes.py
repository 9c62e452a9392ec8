"""Every config of examples/ and of prime-rl is dry-run beside a config.json of its model's real size.

Without a config.json a dry run skips every rule that reads one. The files of tests/cases/model_configs have the numbers
of transformers' default config of each family; a model of another size is given as the keys that differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from huggingface_hub import constants

from stretto.check.models import check_model, models_of
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import Family
from stretto.data.hub_model import is_hub_name
from stretto.launch.run.rl import plan_only
from stretto.models.config import parse_config
from stretto_plan.shapes import KNOWN

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "tests" / "cases" / "model_configs"


def family(name: str, **keys: object) -> dict[str, Any]:
    """The config.json of a family with other numbers."""
    return json.loads((CONFIGS / f"{name}.json").read_text()) | keys


def dense(layers: int, width: int, inner: int, heads: int, kv_heads: int = 8) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "layer_types": ["full_attention"] * layers, "max_window_layers": layers,
    }  # fmt: skip


def vision(text: dict[str, Any]) -> dict[str, Any]:
    found = family("qwen3_vl")
    found["text_config"] |= text
    found["vision_config"]["out_hidden_size"] = text["hidden_size"]
    return found


_QWEN3_4B = family("qwen3", **dense(36, 2560, 9728, 32), head_dim=128)
MODELS = {
    **KNOWN,
    "zai-org/GLM-5.1-FP8": KNOWN["zai-org/GLM-5-FP8"],
    "zai-org/GLM-5-FP8": KNOWN["zai-org/GLM-5"]
    | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "zai-org/GLM-5.3-BF16": KNOWN["zai-org/GLM-5"],
    "zai-org/GLM-4.5-Air": family("glm4_moe"),
    "PrimeIntellect/INTELLECT-3-Base": family("glm4_moe"),
    "poolside/Laguna-XS-2.1": family("laguna"),
    "lmsys/gpt-oss-20b-bf16": family(
        "gpt_oss", num_hidden_layers=24, num_local_experts=32, layer_types=["sliding_attention", "full_attention"] * 12
    ),
    "Qwen/Qwen3-VL-4B-Instruct": vision(dense(36, 2560, 9728, 32)),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": family("qwen2", **dense(28, 1536, 8960, 12, 2)),
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": KNOWN["Qwen/Qwen3-0.6B"],
    "PrimeIntellect/Qwen3-1.7B-Wordle-SFT": family("qwen3", **dense(28, 2048, 6144, 16), head_dim=128),
}  # fmt: skip
MODELS["zai-org/GLM-5.1-FP8"] = MODELS["zai-org/GLM-5-FP8"]
"""By name on the Hub: its config.json."""

EXAMPLES, RL_FILES, SFT_FILES = (
    [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(pattern))]
    for pattern in ("examples/*/rl.toml", "tests/cases/prime_rl/rl/*.toml", "tests/cases/prime_rl/sft/*.toml")
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with the config.json of every model of the files; directories of models beside it."""
    cache = tmp_path / "cache"
    for name, config in MODELS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0")
        (snapshot / "config.json").write_text(json.dumps(config))
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
