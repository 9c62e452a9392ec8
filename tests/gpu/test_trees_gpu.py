"""shared_prefixes = "tree" on a GPU: the step of samples computed one by one."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tiny import branches, build_policy, gradients, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import ConstantScheduler, SgdOptim
from stretto.models.attention import PackedLayout
from stretto.models.parts.attend import Limits
from stretto.trainer.learner import Learner

pytestmark = pytest.mark.gpu
SHAPES = {
    "dense": {},
    "windows and sinks": {"family": "gpt_oss", "num_experts": 4, "sliding_window": 16},
    "windows": {"family": "afmoe", "num_experts": 4, "sliding_window": 16},
    "latent": {"family": "deepseek_v3", "num_experts": 4},
}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_attention_and_gradients_are_those_of_a_cpu(dtype, tolerance, window):
    bounds, parents = (0, 300, 301, 700, 830, 1000, 1500), (-1, 0, 0, 2, 2, -1)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(bounds[-1], heads, 64, generator=generator) for heads in (4, 2, 2)]
    probe, results = torch.randn(bounds[-1], 4, 64, generator=generator), []
    for device, kind in (("cuda", dtype), ("cpu", torch.float32)):
        given = [x.to(device, kind).requires_grad_() for x in inputs]
        out = PackedLayout(bounds, torch.device(device), parents).attend(0, *given, Limits(window, None))
        grads = torch.autograd.grad((out * probe.to(device, kind)).sum(), given)
        results.append([x.float().cpu() for x in (out, *grads)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_samples_one_by_one(shape):
    policy = build_policy(**SHAPES[shape])
    found = []
    for device, sharing in (("cuda", "tree"), ("cuda", "off"), ("cpu", "off")):
        learner = Learner(
            deepcopy(policy).to(device),
            model=ModelSection(dtype="float32", shared_prefixes=sharing),
            optim=SgdOptim(lr=1e-3),
            scheduler=ConstantScheduler(),
            max_steps=None,
        )
        assert learner.network.sharing == sharing
        for seed in range(2):  # rows of two lengths
            learner.forward_backward([pack(branches(seed))])
        found.append({name: gradient.cpu() for name, gradient in gradients(learner).items()})
    largest = max(float(gradient.abs().max()) for gradient in found[2].values())
    for other in found[:2]:
        for name, gradient in found[2].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-4 * largest, rtol=1e-3)
