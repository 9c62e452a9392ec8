"""Optimizers do what torch's do, without what torch.compile needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from stretto.trainer.optim import uncompiled

STEPS_OF_A_LEARNER = """
import sys
sys.path.insert(0, sys.argv[1])
import stretto.trainer.rl
from tiny import build_learner, documents, pack
learner = build_learner()
for _ in range(2):
    learner.forward_backward([pack(documents())])
    learner.optim_step()
late = {"torch._dynamo", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"}
assert late.isdisjoint(sys.modules), late & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [("AdamW", {"weight_decay": 0.1, "fused": True}), ("SGD", {"momentum": 0.9, "nesterov": True, "fused": True})],
)
def test_updates_are_those_of_torch_to_the_last_bit(name, settings):
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4)) for _ in range(2))
    optimizers = [
        getattr(module, name)([parameter], lr=0.01, **settings)
        for module, parameter in ((uncompiled, ours), (optim, theirs))
    ]
    for seed in range(4):
        grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours, theirs) and ours.requires_grad and ours.is_leaf
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())


@pytest.mark.heavy
def test_steps_of_one_rank_import_nothing_that_compiles_or_shards():
    """Each of these takes most of a second, before the first step."""
    tests = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", STEPS_OF_A_LEARNER, str(tests)], check=True, timeout=120)
