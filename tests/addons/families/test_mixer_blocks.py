"""Blocks with other mixers in training: recomputed, with adapters, and refused where they cannot run."""

from __future__ import annotations

import pytest
import torch
from cases.families import VOCAB, build_theirs, our_logits

from stretto.config.sections.model import ActivationCheckpointSection, LoRASection, ModelSection
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.lora import attach_adapters
from stretto.trainer.parallel.memory import prepare_blocks

CASES = [
    "qwen3_5_moe_text", "deepseek_v3", "nemotron_h-latent-experts-biases-mamba-last",
    "glm_moe_dsa-shared-choices-biases",
]  # fmt: skip
BOUNDS = (0, 9, 10, 30)
TARGETS = ["norm", "attn_proj", "routed_experts"]


@pytest.fixture(params=CASES)
def directory(request, tmp_path):
    build_theirs(request.param).save_pretrained(tmp_path)
    return tmp_path


def load(directory) -> Decoder:
    return hub.load_model(directory, dtype=torch.float32)


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (BOUNDS[-1],), generator=torch.Generator().manual_seed(1))
    our_logits(model, ids, BOUNDS).log_softmax(-1)[:, 0].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.heavy
@pytest.mark.parametrize("ac", [{"mode": "full"}, {"mode": "selective", "targets": TARGETS}], ids=["full", "selective"])
def test_recomputed_blocks_have_the_same_gradients(directory, ac):
    plain, recomputed = load(directory), load(directory)
    prepare_blocks(recomputed, ModelSection(name="x", ac=ActivationCheckpointSection(**ac)))
    expected, got = gradients(plain), gradients(recomputed)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.heavy
def test_adapters_train_and_merge(directory):
    model = load(directory)
    targets = (*LoRASection().target_modules, "in_proj", "in_proj_qkv", "out_proj", "q_b_proj", "kv_b_proj")
    attach_adapters(model, LoRASection(rank=2, target_modules=targets))
    trained = gradients(model)
    kinds = {name.split(".")[3] for name in trained}
    assert {"self_attn", "mlp"} <= kinds and ("linear_attn" in kinds) == model.config.has_recurrence
    assert all(name.endswith(("lora_A", "lora_B")) for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.1)
    merged = load(directory)
    hub.load_tensors(merged, hub.export_tensors(model))
    ids = torch.arange(VOCAB)
    with torch.no_grad():
        expected, got = (our_logits(m, ids, (0, 7, VOCAB)) for m in (model, merged))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
