"""Engines with a checkpoint of their own: what a dry run refuses, with both config.json beside each other."""

from __future__ import annotations

import json

import pytest
from offline_fp8 import QUANTIZATION
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.launch.run.rl import plan_only

HF = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "rms_norm_eps": 1e-6,
}  # fmt: skip


def dry_run(tmp_path, served, *words, trained=HF):
    for name, hf in (("trained", trained), ("served", served)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(hf))
    words = [
        "--model.name", str(tmp_path / "trained"), "--inference.model.name", str(tmp_path / "served"),
        "--orchestrator.env.0.id", "reverse-text", "--output-dir", str(tmp_path), "--dry-run", *words,
    ]  # fmt: skip
    return plan_only(load(RLConfig, words))[0]


@needs("prime")
def test_engines_may_have_the_same_network_in_8_bits(tmp_path):
    told = dry_run(tmp_path, HF | {"quantization_config": QUANTIZATION})
    trainer = next(spec for spec in told.processes if spec.role == "trainer")
    assert trainer is not None and told.config.weight_broadcast.engine_model == str(tmp_path / "served")
    dry_run(tmp_path, HF)  # and the same in full precision


@needs("prime")
@pytest.mark.parametrize(
    ("served", "words", "message"),
    [
        (HF | {"hidden_size": 128}, (), "is not the network that is trained.*hidden_size = 128.* 64"),
        (HF | {"model_type": "qwen2"}, (), "is not the network that is trained.*model_type = 'qwen2'"),
        (HF | {"rms_norm_eps": 1e-5}, (), "config.json has rms_norm_eps = 1e-05, that of the latter 1e-06"),
        (HF | {"text_config": {"hidden_size": 8}}, (), "has text_config.hidden_size = 8, that of the latter None"),
        (HF | {"quantization_config": {"quant_method": "gptq"}}, (), "is gptq, and weights can be sent"),
        (
            HF | {"quantization_config": QUANTIZATION | {"weight_block_size": [64, 64]}},
            (),
            "fp8 of 128 x 128 blocks only",
        ),
        (HF | {"quantization_config": QUANTIZATION}, ("--model.lora", "{}"), "has weights in 8 bits, and .model.lora"),
        (HF, ("--weight-broadcast.quantize-in-weight-transfer", "true"), "has no quantization_config"),
        (
            HF | {"quantization_config": QUANTIZATION},
            ("--weight-broadcast.quantize-in-weight-transfer", "false"),
            "takes no others",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path, served, words, message):
    with pytest.raises(ConfigError, match=message):
        dry_run(tmp_path, served, *words)


@needs("prime")
def test_engines_with_another_tokenizer_are_refused(tmp_path):
    def tokenizer(**added):
        added_tokens = [{"content": text, "id": number} for text, number in added.items()]
        return json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": added_tokens})

    for name, text in (("trained", tokenizer(eos=2)), ("served", tokenizer(eos=2) + "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    dry_run(tmp_path, HF)  # other bytes, the same tokens
    (tmp_path / "served" / "tokenizer.json").write_text(tokenizer(eos=3))
    with pytest.raises(ConfigError, match=r"another tokenizer .*'eos' is 3"):
        dry_run(tmp_path, HF)


@needs("prime")
def test_a_quantised_checkpoint_is_not_trained(tmp_path):
    whole = HF | {"quantization_config": QUANTIZATION}
    with pytest.raises(ConfigError, match=r"\[model\] name = .*quantized weights"):
        dry_run(tmp_path, whole, trained=whole)
    expanded = HF | {"quantization_config": {"quant_method": "mxfp4"}}  # transformers expands it
    with pytest.raises(ConfigError, match="quantization_config mxfp4"):
        dry_run(tmp_path, HF, "--model.impl", "custom", trained=expanded)
