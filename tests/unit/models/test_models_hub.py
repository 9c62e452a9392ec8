"""Model directories: transformers loads ours, we load its own, and errors name the damaged file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, build_policy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.data.hub_model import fetch
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.trainer.learner import load_policy

IDS = torch.arange(VOCAB)
LAYOUT = PackedLayout((0, VOCAB), torch.device("cpu"))


def logits(model):
    with torch.no_grad():
        return model.hidden(IDS, LAYOUT) @ model.output_weight.T


@pytest.fixture
def saved(tmp_path):
    policy = build_policy()
    hub.save_hf(policy, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_is_saved(tmp_path, tied):
    policy = build_policy(tie_word_embeddings=tied)
    hub.save_hf(policy, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        theirs = model(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(policy), theirs, atol=1e-5, rtol=1e-5)
    assert model.generation_config.eos_token_id == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_to_ours_to_hf_keeps_every_bit(tmp_path, dtype):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, eos_token_id=3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(tmp_path / "theirs")
    hub.save_hf(hub.load_model(tmp_path / "theirs", dtype=dtype), tmp_path / "ours", tmp_path / "theirs")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")]
    assert configs[0] == configs[1]
    assert (tmp_path / "ours" / "generation_config.json").is_file()


def test_shards_are_written_and_read_by_both(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "MAX_SHARD_BYTES", 100_000)
    policy = build_policy()
    hub.save_hf(policy, tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2 and not list(tmp_path.glob("*.tmp"))
    assert torch.equal(logits(hub.load_model(tmp_path, dtype=torch.float32)), logits(policy))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.model.norm.weight, policy.model.norm.weight)


def test_tokenizer_files_come_along_and_others_do_not(tmp_path, saved):
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_x.py", "notes.txt"):
        (saved / name).write_text(name)
    hub.save_hf(build_policy(), tmp_path / "copy", saved)
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "modeling_x.py"} <= names and "notes.txt" not in names


def test_export_and_load_in_place_are_inverse():
    source, target = build_policy(seed=1), build_policy(seed=2)
    weight = target.output_weight
    hub.load_tensors(target, hub.export_tensors(source))
    assert torch.equal(logits(source), logits(target)) and target.output_weight is weight


def test_a_model_from_scratch_depends_on_its_seed_only():
    a, b, c = (hub.random_model(ScratchSection(seed=seed), VOCAB) for seed in (4, 4, 5))
    assert torch.equal(logits(a), logits(b)) and not torch.equal(logits(a), logits(c))


def test_auto_takes_our_module_for_qwen3_and_scratch_where_given(saved):
    assert type(load_policy(ModelSection(name=str(saved)))).__name__ == "Decoder"
    assert load_policy(ModelSection(scratch=ScratchSection()), vocab_size=9).output_weight.shape[0] == 9


def change_tensors(directory, **changes):
    path = directory / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if changes.get(k, v) is not None} | {
        k: v for k, v in changes.items() if v is not None
    }
    save_file(tensors, path)


def test_a_missing_tensor_is_named(saved):
    change_tensors(saved, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(DataError, match=r"1 of \d+ tensors are missing: model.layers.1.mlp.up_proj.weight"):
        hub.load_model(saved, dtype=torch.float32)


def test_a_wrong_shape_is_named(saved):
    change_tensors(saved, **{"model.norm.weight": torch.ones(3)})
    with pytest.raises(DataError, match=r"'model.norm.weight' has shape \(3,\), config.json asks for \(64,\)"):
        hub.load_model(saved, dtype=torch.float32)


def test_an_unknown_tensor_is_named_and_a_redundant_one_ignored(saved):
    change_tensors(saved, **{"lm_head.weight": torch.zeros(VOCAB, 64)})
    hub.load_model(saved, dtype=torch.float32)
    change_tensors(saved, **{"model.extra.weight": torch.ones(3)})
    with pytest.raises(DataError, match=r"'model.extra.weight' is not part of"):
        hub.load_model(saved, dtype=torch.float32)


@pytest.mark.parametrize("keep", [0, 6, 0.5])
def test_a_truncated_file_is_named(saved, keep):
    path = saved / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read .*truncated"):
        hub.load_model(saved, dtype=torch.float32)


def test_a_missing_shard_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "MAX_SHARD_BYTES", 100_000)
    hub.save_hf(build_policy(), tmp_path)
    next(tmp_path.glob("model-00001-*")).unlink()
    with pytest.raises(DataError, match=r"model-00001-of-.*, which is not there"):
        hub.load_model(tmp_path, dtype=torch.float32)


def test_a_directory_without_config_or_weights_is_named(tmp_path, saved):
    with pytest.raises(DataError, match="no such directory"):
        hub.load_model(tmp_path / "nowhere", dtype=torch.float32)
    with pytest.raises(DataError, match=r"config.json: no such file"):
        hub.load_model(tmp_path, dtype=torch.float32)
    (saved / "model.safetensors").unlink()
    with pytest.raises(DataError, match="only safetensors"):
        hub.load_model(saved, dtype=torch.float32)
    (saved / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config.json: not valid JSON"):
        hub.load_model(saved, dtype=torch.float32)


@pytest.mark.parametrize("name", ["nowhere/at-all", "./nowhere", "nowhere"])
def test_a_model_that_is_nowhere_is_named(name):
    with pytest.raises(ConfigError, match=f"model '{name}': no such directory"):
        fetch(name)


def test_auto_is_the_type_of_the_device():
    assert hub.dtype_of("auto", "cpu") is torch.float32 and hub.dtype_of("auto", "cuda:1") is torch.bfloat16
    assert hub.dtype_of("bfloat16", "cpu") is torch.bfloat16 and hub.dtype_of("float32", "cuda") is torch.float32


def test_a_console_sees_how_far_loading_is_if_it_takes_long(saved, monkeypatch):
    told = []
    monkeypatch.setattr(hub, "report", lambda kind, **fields: told.append((fields["done"], fields["total"])))
    hub.load_model(saved, dtype=torch.float32)
    assert not told
    monkeypatch.setattr(hub, "SHOWN_AFTER_S", 0.0)
    hub.load_model(saved, dtype=torch.float32)
    total = told[0][1]
    assert told == [*((done, total) for done in range(total)), (total, total)] and total > 1


@pytest.mark.heavy
def test_an_engine_has_its_model_without_importing_what_compiles(saved):
    """torch._dynamo takes a second to import, sympy half of one."""
    code = """
import sys, torch, stretto.inference.server
from stretto.models import hub
hub.load_model(sys.argv[1], dtype=torch.float32)
sys.exit(not {"torch._dynamo", "sympy"}.isdisjoint(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code, str(saved)], timeout=120).returncode == 0
