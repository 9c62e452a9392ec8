"""The kernels between a training step's products on a GPU: torch's numbers, and they are what a step uses."""

from __future__ import annotations

import pytest
import torch
from cases.kernels.gpu_rows import assert_row_kernels_agree

from stretto.models.device.kernels import find_gpu_kernels
from stretto.models.lm_head import token_logprobs
from stretto.models.parts.mlp import gate_product
from stretto.models.parts.norm import RMSNorm
from stretto.models.parts.rope import Angles, rotate

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    return find_gpu_kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_kernels_give_the_reference(kernels, dtype):
    assert_row_kernels_agree(kernels, "cuda", dtype)


def _step(hidden: torch.Tensor) -> list[torch.Tensor]:
    """The outputs and gradients of a norm, a gate, a rotation and a head."""
    norm = RMSNorm(256, 1e-6).to("cuda", torch.bfloat16)
    head = torch.randn(5000, 256, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    leaves = [hidden.clone().requires_grad_(), head.requires_grad_(), norm.weight]
    angles = Angles(*(torch.linspace(-1, 1, 64 * 64, device="cuda").bfloat16().view(64, 1, 64) for _ in range(2)))
    x = norm(leaves[0])
    x = rotate(gate_product(x, x.flip(0)).unflatten(1, (4, 64)), angles).flatten(1)
    targets = torch.arange(64, device="cuda")
    outs = token_logprobs(x, leaves[1], targets, torch.full((64,), 0.7, device="cuda"), 24, entropy_grad=True)
    (outs[0].sum() + outs[1].square().sum()).backward()
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def test_a_step_with_the_kernels_is_near_one_of_torchs_operations(kernels, monkeypatch):
    hidden = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    fast = _step(hidden)
    calls = []
    monkeypatch.setattr("stretto.models.lm_head.find_gpu_kernels", lambda: calls.append("head"))
    for place in ("models.parts.norm", "models.parts.rope", "models.parts.mlp"):
        monkeypatch.setattr(f"stretto.{place}.find_row_kernels", lambda *_: calls.append("row"))
    for mine, slow in zip(fast, _step(hidden)):
        assert float((mine - slow).abs().max()) < 2e-2 * float(slow.abs().max())
    assert {"head", "row"} == set(calls), "the slow step was not slow"
