"""8-bit products on a GPU: the reference's numbers from triton's and DeepGEMM's kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from cases.kernels.fp8 import assert_kernels_agree
from tiny import build_policy, documents, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models.fp8.reference import Kernels, RowGroups, multiply
from stretto.trainer.learner import Learner

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    pytest.importorskip("triton")
    from stretto_triton import fp8 as fp8_kernels

    return fp8_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_kernels_give_the_reference(kernels, dtype):
    assert_kernels_agree(kernels.Triton(), "cuda", dtype)


@pytest.mark.skipif(find_spec("deep_gemm") is None, reason="DeepGEMM is not installed")
def test_deepgemm_gives_the_reference(kernels):
    found = kernels.find_kernels(torch.device("cuda"))
    assert found.name == "DeepGEMM"
    assert_kernels_agree(found, "cuda", torch.bfloat16)


@pytest.mark.parametrize("counts", [[4096], [0, 1500, 7, 2000, 589]], ids=["linear", "grouped"])
def test_product_and_both_gradients_are_off_by_about_0_037(kernels, counts):
    generator = torch.Generator("cuda").manual_seed(0)
    rows, dim, out = sum(counts), 1024, 1536
    x, weight, grad = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, dim), (len(counts), out, dim), (rows, out))
    )
    results = []
    for way in (kernels.find_kernels(torch.device("cuda")), Kernels(), None):
        ours, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if way is None:
            parts = [part @ one.T for part, one in zip(ours.split(counts), w)]
            y = torch.cat(parts)
        else:
            y = multiply(ours, w, RowGroups.of(torch.tensor(counts, device="cuda"), rows), way)
        y.backward(grad)
        results.append((y, ours.grad, w.grad))
    for fast, slow, exact in zip(*results):
        assert 0.03 < (fast - exact).float().norm() / exact.float().norm() < 0.042
        assert (fast - slow).float().norm() / slow.float().norm() < 5e-3


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_learner_in_8_bits_has_the_gradients_of_the_reference(kernels, family):
    shape = {"family": family, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    grads = []
    for fp8 in (True, "reference"):
        learner = Learner(
            build_policy(**shape).to("cuda", torch.bfloat16),
            model=ModelSection(dtype="bfloat16", fp8=fp8),
            optim=AdamWOptim(),
            scheduler=ConstantScheduler(warmup_steps=0),
            max_steps=None,
        )
        learner.forward_backward([pack(documents())])
        grads.append(torch.cat([p.grad.flatten() for p in learner.network.weights.parameters]))
    assert torch.cosine_similarity(*grads, dim=0) > 0.98
