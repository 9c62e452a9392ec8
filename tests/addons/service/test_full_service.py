"""What a service that trains all weights of one run takes, and what it refuses before anything starts."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims
from stretto.config.load import load
from stretto_service.config import ServeConfig
from stretto_service.launch import ServicePlan, plan, screen

REFUSED = {
    "two ranks": (["--trainer.num-ranks", "2"], "all weights are trained on one rank"),
    "vLLM": (["--inference.engine", "vllm"], "whole weights are loaded into the embedded engine only"),
    "a directory of runs": (["--service.runs-dir", "runs"], "runs of a directory have adapters"),
}


def config(root: Path, *arguments: str) -> ServeConfig:
    """A service of a model whose config alone is there."""
    model = root / "model"
    model.mkdir()
    shape = {"model_type": "qwen3", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (model / "config.json").write_text(json.dumps(shape))
    given = ["--model.name", str(model), "--output-dir", str(root), "--service.full-finetuning", "true"]
    return load(ServeConfig, [*given, *arguments])


def planned(cfg: ServeConfig) -> ServicePlan:
    with closing(PortClaims()) as ports:
        return plan(cfg, ports)


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_train_or_serve_is_refused_before_it_starts(tmp_path: Path, case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        planned(config(tmp_path, *arguments))


def test_the_seed_of_samples_is_the_engines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--seed 3: .*--inference\.seed"):
        config(tmp_path, "--seed", "3")


def test_it_has_one_place_and_an_embedded_engine_without_adapters(tmp_path: Path) -> None:
    cfg = config(tmp_path, "--service.max-concurrent-runs", "4")
    assert cfg.service.num_places == 1
    assert "one run at a time, which trains all weights" in screen(cfg)
    inference = planned(cfg).inference
    assert inference is not None
    assert inference.engine == "embedded" and inference.lora is None
