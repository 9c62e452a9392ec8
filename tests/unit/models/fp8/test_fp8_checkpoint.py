"""Checkpoints in 8 bits: byte-exact against a slow quantiser, loaded and computed with, refused where they are none."""

from __future__ import annotations

import json
import math

import pytest
import torch
from offline_fp8 import QUANTIZATION, is_quantized, quantise_offline
from safetensors.torch import load_file
from tiny import VOCAB, build_policy

from stretto.base.errors import DataError
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.fp8.checkpoint import (
    SCALE,
    BlockLayout,
    from_8_bits,
    parse_layout,
    round_inputs,
    stop_rounding,
    to_8_bits,
)
from stretto.models.fp8.reference import Kernels, use_fp8

IDS = torch.arange(VOCAB)
LAYOUT = PackedLayout((0, VOCAB), torch.device("cpu"))
WIDE = {"hidden_size": 160, "intermediate_size": 200, "num_layers": 2, "moe_intermediate_size": 128}


def logits(model):
    with torch.no_grad():
        return model.hidden(IDS, LAYOUT) @ model.output_weight.T


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def pair(request, tmp_path_factory):
    """A policy, its directory, and the directory that the slow quantiser made of it."""
    policy = build_policy(family=request.param, **WIDE)
    root = tmp_path_factory.mktemp(request.param)
    hub.save_hf(policy, root / "whole")
    return policy, root / "whole", quantise_offline(root / "whole", root / "quantised")


@pytest.mark.parametrize("has_round_scales", [False, True])
def test_published_weights_are_those_of_a_checkpoint_quantised_offline_to_the_byte(pair, tmp_path, has_round_scales):
    policy, whole, _ = pair
    offline = quantise_offline(whole, tmp_path / "offline", has_round_scales=has_round_scales)
    layout = hub.load_layout(offline)
    assert layout.has_round_scales == has_round_scales
    wanted = load_file(offline / "model.safetensors")
    assert layout.names == {name for name in wanted if is_quantized(name)}
    found = dict(to_8_bits(hub.export_tensors(policy), layout))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_an_engine_loads_it_and_computes_as_the_trainer_in_8_bits(pair):
    """The trainer's 8-bit products round weights and rows alike, so only the order of sums differs."""
    policy, whole, quantised = pair
    engine = hub.load_model(quantised, dtype=torch.float32, may_be_quantized=True)
    other = hub.load_model(whole, dtype=torch.float32)
    assert use_fp8(other.model.layers, Kernels()) > 0
    scale = logits(policy).abs().max()
    torch.testing.assert_close(logits(engine) / scale, logits(other) / scale, atol=1e-5, rtol=0)
    assert (logits(engine) - logits(policy)).abs().max() > 0.005 * scale  # and not as the policy


def test_an_update_in_8_bits_gives_what_a_restart_from_such_a_checkpoint_gives(pair, tmp_path):
    _, _, quantised = pair
    family = json.loads((quantised / "config.json").read_text())["model_type"]
    newer = build_policy(seed=1, family=family, **WIDE)
    hub.save_hf(newer, tmp_path / "newer")
    restarted = hub.load_model(
        quantise_offline(tmp_path / "newer", tmp_path / "offline"), dtype=torch.float32, may_be_quantized=True
    )
    engine = hub.load_model(quantised, dtype=torch.float32, may_be_quantized=True)
    hub.load_tensors(engine, to_8_bits(hub.export_tensors(newer), engine.layout))
    assert torch.equal(logits(engine), logits(restarted))


def test_rounding_ends_when_it_is_told_to(pair):
    policy, _, quantised = pair
    before = logits(policy)
    hooks = round_inputs(policy, hub.load_layout(quantised).names, policy.tensor_map)
    during = logits(policy)
    stop_rounding(policy, hooks)
    assert torch.equal(logits(policy), before)
    relative = ((during - before).norm() / before.norm()).item()
    assert 0.005 < relative < 0.5


def test_scales_may_come_after_their_weight(pair):
    policy, _, quantised = pair
    found = list(to_8_bits(hub.export_tensors(policy), hub.load_layout(quantised)))
    forwards, backwards = dict(from_8_bits(found)), dict(from_8_bits(reversed(found)))
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)
    assert forwards.keys() == backwards.keys() == {name for name, _ in hub.export_tensors(policy)}
    with pytest.raises(DataError, match="in 8 bits, and has no scales"):
        list(from_8_bits((name, tensor) for name, tensor in found if not name.endswith(SCALE)))
    with pytest.raises(DataError, match="the scales of a missing weight"):
        list(from_8_bits((name, tensor) for name, tensor in found if name.endswith(SCALE)))


def test_blocks_of_zeros_and_of_huge_values_stay_numbers():
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[129, 128] = 3e38, 1e-30
    layout = BlockLayout(frozenset({"w"}))
    (_, back), *rest = from_8_bits(to_8_bits([("w", weight)], layout))
    assert not rest and torch.isfinite(back).all() and math.isclose(back[0, 0], 3e38, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quant_method": "gptq"}, r"quant_method = 'gptq', .* is not supported; .* blocks of 128 x 128"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\] is not supported"),
        ({"weight_block_size": None}, "weight_block_size = None is not supported"),
        ({"activation_scheme": "static"}, "with activation_scheme dynamic"),
    ],
)
def test_other_quantization_is_refused(changed, message):
    with pytest.raises(DataError, match=message):
        parse_layout(QUANTIZATION | changed, ["a.weight", "a.weight_scale_inv"], "here/config.json")


def test_a_checkpoint_that_says_8_bits_and_has_none_is_refused(pair, tmp_path):
    with pytest.raises(DataError, match=r"no tensor has scales \(\*_scale_inv\)"):
        parse_layout(QUANTIZATION, ["a.weight"], "here/config.json")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": QUANTIZATION}))
    with pytest.raises(DataError, match="it is unknown which weights are in 8 bits"):
        hub.load_layout(tmp_path)
    assert hub.load_layout(pair[1]) is None
    with pytest.raises(DataError, match="quantization_config"):  # a trainer takes none
        hub.load_model(pair[2], dtype=torch.float32)
