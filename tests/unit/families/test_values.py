"""Values of a wrong kind in a config.json are told by their key, before a check or a network computes with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError, DataError
from stretto.data.model_file import read_model_file
from stretto.families.values import wrong_values
from stretto.models.config import parse_config

CONFIGS = sorted((Path(__file__).parents[2] / "cases" / "model_configs").rglob("*.json"))
GOOD = {
    "model_type": "qwen3", "vocab_size": 112, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": [1, 2],
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"intermediate_size": "128"}, "intermediate_size = '128' must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a whole number from 1"),
        ({"num_attention_heads": True}, "num_attention_heads = True must be a whole number"),
        ({"head_dim": 10**40}, "head_dim = 1000"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads = [2] must be a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>' must be the id of a token"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be a number"),
        ({"layer_types": ["full_attention", 1]}, "layer_types = ['full_attention', 1] must be a list of texts"),
        ({"rope_parameters": [1]}, "rope_parameters = [1] must be a table"),
        ({"rope_parameters": {"factor": "2"}}, "rope_parameters.factor = '2' must be a number"),
    ],
)
def test_a_value_of_a_wrong_kind_is_told_by_its_key(wrong, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | wrong))
    with pytest.raises(ConfigError) as told:
        read_model_file(tmp_path)
    assert str(told.value).startswith(f"{path}: {said}")
    with pytest.raises(DataError) as told:
        parse_config(GOOD | wrong, str(path))
    assert str(told.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_of_models_are_not_refused(path):
    assert not list(wrong_values(json.loads(path.read_text())))


def test_null_is_as_good_as_absent():
    assert not list(wrong_values(dict.fromkeys(GOOD)))
