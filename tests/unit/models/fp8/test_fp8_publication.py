"""From the trainer to an engine in 8 bits: what arrives, and what the canary takes for rounding."""

from __future__ import annotations

from importlib import import_module

import msgspec
import numpy as np
import pytest
import torch
from offline_fp8 import quantise_offline
from safetensors.torch import load_file
from tiny import build_learner, build_policy

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.root import TrainerConfig
from stretto.config.sections.model import ModelSection
from stretto.config.sections.transport import DeltaSection, FilesystemWeights, ShmWeights
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models import hub
from stretto.models.fp8.checkpoint import to_8_bits
from stretto.orchestrator.versions.canary_check import tolerance_of
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.trainer.build import find_engine_layout
from stretto.trainer.publish.canary import score_canary
from stretto.transports.weights import build_publisher, receive

SHAPE = {"hidden_size": 160, "intermediate_size": 256, "moe_intermediate_size": 136, "family": "qwen3_moe"}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    hub.save_hf(build_policy(seed=3, **SHAPE), root / "whole")
    return quantise_offline(root / "whole", root / "quantised")


@pytest.fixture
def engine(quantised):
    model = hub.load_model(quantised, dtype=torch.float32, may_be_quantized=True)
    return EngineCore(model, CoreSettings(max_model_len=128, kv_cache_tokens=1024, use_kernels=False))


def prompt_logprobs(core, token_ids):
    asked = GenerateRequest(
        request_id="c", prompt_ids=np.array(token_ids, np.int32), sampling=SamplingParams(max_tokens=1),
        prompt_logprobs=True,
    )  # fmt: skip
    request = core.build_request(asked)
    core.submit(request)
    while core.has_work:
        core.step()
    return request.prompt_scores.logprobs


@pytest.mark.parametrize(
    ("wire", "has_changes_only"), [(ShmWeights, False), (FilesystemWeights, False), (FilesystemWeights, True)]
)
def test_every_wire_carries_weights_in_8_bits_to_the_byte(wire, has_changes_only, quantised, tmp_path):
    policy, layout = build_policy(seed=4, **SHAPE), hub.load_layout(quantised)
    hub.save_hf(policy, tmp_path / "whole")
    wanted = load_file(quantise_offline(tmp_path / "whole", tmp_path / "offline") / "model.safetensors")
    if has_changes_only:
        pytest.importorskip("stretto_broadcast")
    delta = DeltaSection(max_ratio=1.0, directory=tmp_path) if has_changes_only else None
    publisher = build_publisher(wire(delta=delta), RunDir(tmp_path), "fp8")
    try:
        for version, seed in enumerate((3, 4)):
            other = build_policy(seed=seed, **SHAPE)
            told = publisher.publish(version, to_8_bits(hub.export_tensors(other), layout))
            with receive(told) as tensors:
                found = {name: tensor.clone() for name, tensor in tensors}
                tensors.check_unchanged()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n].view(torch.uint8), wanted[n].view(torch.uint8)) for n in wanted)
    finally:
        publisher.close()
        if has_changes_only:
            import_module("stretto_broadcast.host_copy").close_all()


@pytest.mark.heavy
def test_the_canary_takes_rounding_for_rounding_and_other_weights_for_a_fault(quantised, engine, tmp_path):
    layout = hub.load_layout(quantised)
    learner = build_learner(build_policy(seed=4, **SHAPE))
    publisher = build_publisher(FilesystemWeights(), RunDir(tmp_path), "fp8")
    told = publisher.publish(1, to_8_bits(learner.export_tensors(), layout))
    canary = score_canary(learner, 64, layout)
    plain = score_canary(learner, 64)
    assert plain.rounding == 0.0 and plain.logprobs == canary.logprobs  # rounding has ended
    told = msgspec.structs.replace(told, canary=canary)
    stale = np.abs(prompt_logprobs(engine, canary.token_ids) - canary.logprobs)[1:].mean()
    assert engine.weights_refusal_reason(told) is None
    with receive(told) as tensors:
        engine.load_weights(1, tensors)
    error = np.abs(prompt_logprobs(engine, canary.token_ids) - canary.logprobs)[1:].mean()
    assert 1e-3 < error <= tolerance_of(told) == pytest.approx(max(1e-3, 3 * canary.rounding))
    assert canary.rounding / 3 < error < 3 * canary.rounding < stale
    publisher.close()


def test_the_trainer_reads_the_layout_of_the_engines_checkpoint(quantised, tmp_path):
    def config(**wire):
        return TrainerConfig(model=ModelSection(name="x"), weight_broadcast=ShmWeights(**wire))

    layout = find_engine_layout(config(engine_model=str(quantised), quantize_in_weight_transfer=True))
    assert layout is not None and "model.layers.0.self_attn.q_proj.weight" in layout.names
    assert find_engine_layout(config()) is None
    with pytest.raises(ConfigError, match=r"quantize_in_weight_transfer = false"):
        find_engine_layout(config(engine_model=str(quantised), quantize_in_weight_transfer=False))
    with pytest.raises(ConfigError, match="engines load the model that is trained"):
        find_engine_layout(config(quantize_in_weight_transfer=True))
