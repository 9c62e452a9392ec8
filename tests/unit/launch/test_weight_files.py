"""What is known of a model's files before a start: names, shapes, tied heads, quantized weights, rows per token."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes.add_ons import needs
from processes.forked import fork_children_of
from safetensors.torch import load_file, save_file

from stretto.base.errors import ConfigError
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.check import weights
from stretto.check.weights import check_weights, check_weights_of
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import LoRASection, ModelSection, ScratchSection
from stretto.data.weight_files import untrained_rows
from stretto.models.hub import random_model, save_hf

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48}
ROWS = ("model.embed_tokens.weight", "lm_head.weight")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with tied embeddings and its tokenizer, as this project writes it."""
    directory = tmp_path_factory.mktemp("tied")
    build_letters_tokenizer(directory)
    vocab_size = load_tokenizer(directory).vocab_size
    model = random_model(ScratchSection(tie_word_embeddings=True, **SHAPE), vocab_size, eos_token_id=1)
    save_hf(model, directory)
    return directory


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compares weights with their config need not import torch; test_launch_plan.py starts it."""
    fork_children_of(monkeypatch, weights)


@pytest.fixture
def model(tied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied, tmp_path / "model"))


def change(directory: Path, tensors: Callable[[Tensors], Tensors] = dict, **config: object) -> None:
    """Write other tensors, or other values of config.json."""
    file = directory / "model.safetensors"
    save_file(tensors(load_file(file)), file)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def check(directory: Path, **options: bool) -> list[str]:
    return check_weights(str(directory), "[model] name", ModelSection(name=str(directory)), **options)


def double_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}


def without_mlp(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}


def with_padded_rows(tensors: Tensors) -> Tensors:
    padded = {name: torch.cat((tensors[name], torch.zeros(16, 32))) for name in ROWS}
    return tensors | padded


FAULTS = {
    "wrapped": (lambda tensors: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()},
        {}, "'_orig_mod.' in their names .* torch.compile wraps; .* removed from every name"),
    "a wrapped block": (
        lambda tensors: {name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in tensors.items()},
        {}, "have '_orig_mod.' in their names"),
    "rows": (dict, {"vocab_size": 100}, "its embedding has 112 rows, and .* vocab_size = 100; set .* = 112"),
    "another family": (dict, {"model_type": "qwen2"}, "not part of a qwen2 .* two models; copy both"),
    "missing": (without_mlp, {}, "3 of the 24 tensors .* are missing .* files are incomplete"),
    "a shape": (dict, {"intermediate_size": 64}, r"has shape \[48, 32\], and config.json makes it \[64, 32\]"),
    "another head": (double_head, {}, "lm_head.weight that differs .* tie_word_embeddings = false"),
    "awq": (dict, {"quantization_config": {"quant_method": "awq"}}, "awq, and quantized .* in bfloat16 here$"),
    "bitsandbytes": (dict, {"quantization_config": {"load_in_4bit": True}}, "bitsandbytes, and quantized"),
    "gptq": (lambda tensors: {name.replace("proj.weight", "proj.qweight"): t for name, t in tensors.items()},
        {}, "qweight' is quantized, and quantized weights cannot be trained"),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_are_refused_with_the_way_out(fault: str, model: Path) -> None:
    tensors, config, words = FAULTS[fault]
    change(model, tensors, **config)
    with pytest.raises(ConfigError, match=words) as raised:
        check(model)
    assert str(raised.value).startswith(f"[model] name = '{model}': ") and "\n" not in str(raised.value)


@pytest.mark.heavy
def test_a_whole_model_has_no_fault_and_neither_have_a_copy_of_the_embedding_and_padded_rows(model) -> None:
    assert check(model) == []
    change(model, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert check(model) == []
    change(model, with_padded_rows, vocab_size=128)
    assert check(model) == []


def add_token(directory: Path, text: str) -> None:
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 112, "content": text})
    path.write_text(json.dumps(data))


@pytest.mark.heavy
def test_an_added_token_without_a_row_is_a_warning_and_an_error_if_conversations_have_it(model) -> None:
    add_token(model, "<new>")
    (note,) = check(model)
    assert "1 token without a row in the embedding, which has 112" in note and "'<new>' is id 112" in note
    (model / "chat_template.jinja").write_text("<new>{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="'<new>' is id 112; resize the embedding"):
        check(model)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty .0 bytes."),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run `git lfs pull`"),
        (b"\x10\x00\x00", "has 3 bytes"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{", "header is said to have 16 bytes"),
    ],
)
def test_a_file_that_is_no_weights_is_refused(content: bytes, words: str, model: Path) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        check(model)


def test_an_index_and_its_files_must_agree(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    names = list(load_file(model / "model.safetensors"))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert check(model) == []
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "x"], "model.safetensors")}))
    with pytest.raises(ConfigError, match=r"model\.safetensors has the tensor 'x'"):
        check(model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "one.safetensors")}))
    with pytest.raises(ConfigError, match=r"one.safetensors: missing"):
        check(model)


def test_a_gguf_file_is_refused_as_a_model_and_in_a_directory(model: Path) -> None:
    file = model / "model.gguf"
    (model / "model.safetensors").rename(file)
    for path in (model, file):
        with pytest.raises(ConfigError, match="GGUF"):
            check(path)
    with pytest.raises(ConfigError, match="GGUF"):
        check(model, is_dry_run=True)


def test_a_directory_without_weights_is_not_ready_in_a_dry_run_and_refused_at_a_start(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (note,) = check(model, is_dry_run=True)
    assert note.startswith("NOT READY") and "no weights" in note
    with pytest.raises(ConfigError, match="there are no weights; fetch"):
        check(model)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_porj", "did you mean q_proj?"),
        ("zzz", "it has down_proj, gate_proj, k_proj"),
        ("all-linear", "names of layers are needed, and without target_modules all have one: down_proj"),
        (".*proj", "names of layers are needed"),
    ],
)
def test_adapters_are_for_layers_that_the_model_has(model: Path, target: str, said: str) -> None:
    trained = ModelSection(name=str(model), lora=LoRASection(target_modules=(target,)))
    with pytest.raises(
        ConfigError, match=re.escape(f"[model.lora] target_modules: {model} has no layer {target}; {said}")
    ):
        check_weights(str(model), "[model] name", trained)


@pytest.mark.heavy
@pytest.mark.parametrize(("verb", "key"), [("rl", "trainer.optim"), ("sft", "optim")], ids=["rl", "sft"])
def test_an_adapter_with_the_rate_of_whole_weights_is_a_warning(
    verb: str, key: str, model: Path, tmp_path: Path
) -> None:
    words = [*words_of(verb, model, tmp_path)[1:], "--model.lora.rank", "4"]
    cls: type[RLConfig | SFTConfig] = RLConfig if verb == "rl" else SFTConfig
    assert any(f"[{key}] lr = 1e-06" in text and "as to 0.0001" in text for text in check_weights_of(load(cls, words)))
    for others in ([f"--{key}.lr", "1e-4"], [f"--{key}.type", "sgd"]):
        assert not check_weights_of(load(cls, [*words, *others]))
    assert not check_weights_of(load(cls, words[:-2]))


@pytest.mark.heavy
def test_families_of_transformers_are_compared_with_its_own_model(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = GraniteConfig(**shape, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors | {"model.extra.weight": torch.ones(3)})
    (note,) = check(tmp_path)
    assert "transformers leaves out 1 of its tensors (model.extra.weight)" in note
    change(tmp_path, without_mlp)
    with pytest.raises(ConfigError, match=r"3 of the \d+ tensors .*missing"):
        check(tmp_path)


def words_of(verb: str, model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    shared = ["--run.name", "weights", "--output-dir", str(tmp_path / "out"), "--model.name", str(model)]
    more = {
        "rl": ["--max-steps", "1", "--orchestrator.env", '[{"id": "arithmetic"}]'],
        "sft": ["--max-steps", "1", "--data.name", str(tmp_path / "rows.jsonl")],
        "inference": [],
    }
    return [verb, *shared, *more[verb]]


@pytest.mark.heavy
@needs("doctor")
@pytest.mark.parametrize("verb", ["rl", pytest.param("sft", marks=needs("sft")), "inference"])
def test_a_start_a_dry_run_and_the_doctor_refuse_with_the_same_line(verb, model, tmp_path, capsys) -> None:
    change(model, FAULTS["wrapped"][0])
    words = words_of(verb, model, tmp_path)
    for command in (words, [*words, "--dry-run"]):
        assert main(command) == 2
        assert "have '_orig_mod.' in their names" in capsys.readouterr().err
    assert main(["doctor", *words[1:]]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "have '_orig_mod.' in their names" in said
    assert not (tmp_path / "out" / "weights" / "logs").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_embedding_that_no_training_has_moved_are_found(tmp_path, dtype):
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    rows[3] *= 0.01
    rows[7] = rows[9]
    save_file({"model.embed_tokens.weight": rows.to(dtype)}, tmp_path / "model.safetensors")
    assert untrained_rows(tmp_path, [1, 3, 7, 9, 60]) == [3, 7, 9]
    assert untrained_rows(tmp_path, [1, 7]) == []
