"""A policy that multiplies in 8 bits learns as without; its weights keep dtype and names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny import build_policy, documents, pack

from stretto.base.errors import ConfigError
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.models.fp8.reference import Fp8Experts, Fp8Linear
from stretto.trainer.learner import Learner

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MOE = SHAPE | {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def build(shape, *, dtype="float32", policy=None, **model):
    policy = policy or build_policy(**shape).to(hub.DTYPES[dtype])
    section = ModelSection(dtype=dtype, **model)
    return Learner(
        policy, model=section, optim=AdamWOptim(lr=1e-3), scheduler=ConstantScheduler(warmup_steps=0), max_steps=None
    )


def first_gradients(learner):
    learner.forward_backward([pack(documents())])
    weights = learner.network.weights
    return {name: p.grad.float() for name, p in zip(weights.names, weights.parameters)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_gradients_point_where_those_without_rounding_do(shape, dtype):
    ours, theirs = (first_gradients(build(shape, dtype=dtype, fp8=fp8)) for fp8 in ("reference", False))
    assert ours.keys() == theirs.keys()
    together = [torch.cat([g.flatten() for g in grads.values()]) for grads in (ours, theirs)]
    cosine = torch.cosine_similarity(*together, dim=0)
    assert 0.9 < cosine < 0.9999


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_only_layers_of_blocks_are_replaced_and_exports_are_the_plain_weights(shape):
    plain = build_policy(**shape)
    want = {name: tensor.clone() for name, tensor in hub.export_tensors(plain)}
    learner = build(shape, fp8="reference")
    kinds = {n: type(m) for n, m in learner.policy.named_modules() if isinstance(m, Fp8Linear | Fp8Experts)}
    assert all(name.startswith("model.layers.") for name in kinds) and "lm_head" not in kinds
    assert len(kinds) == (2 * 7 if shape is SHAPE else 2 * 5)
    got = dict(learner.export_tensors())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) and got[name].dtype == torch.float32 for name in want)


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_what_is_computed_again_is_rounded_the_same(shape):
    plain, again = (first_gradients(build(shape, fp8="reference", ac=ac)) for ac in (None, {}))
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_an_adapter_trains_beside_8_bit_weights(shape):
    lora = LoRASection(rank=8)
    policies = [build_policy(**shape) for _ in range(2)]
    rounded, plain = (
        build(shape, policy=policy, fp8=fp8, lora=lora) for policy, fp8 in zip(policies, ("reference", False))
    )
    ours, theirs = first_gradients(rounded), first_gradients(plain)
    assert ours.keys() == theirs.keys() and all("lora" in name for name in ours)
    together = [torch.cat([g.flatten() for g in grads.values()]) for grads in (ours, theirs)]
    assert 0.9 < torch.cosine_similarity(*together, dim=0) < 0.9999


@pytest.mark.heavy
def test_a_policy_in_8_bits_learns_a_text():
    falls = {}
    for fp8 in ("reference", False):
        learner, mb = build(SHAPE, fp8=fp8), pack(documents())
        batch = [replace(mb, loss_mask=np.zeros_like(mb.loss_mask), ce_weights=mb.loss_mask.astype(np.float32))]
        before = learner.evaluate(batch)["nll"]
        for _ in range(8):
            learner.forward_backward(batch)
            learner.optim_step()
        falls[fp8] = before - learner.evaluate(batch)["nll"]
    assert falls[False] > 0.1
    assert falls["reference"] == pytest.approx(falls[False], rel=0.1)


def test_a_machine_that_cannot_says_why():
    with pytest.raises(ConfigError) as error:
        build(SHAPE, fp8=True)
    assert "compute capability 9.0" in str(error.value) and "runs on the CPU" in str(error.value)
    assert 'fp8 = "reference"' in str(error.value)
