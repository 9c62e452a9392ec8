"""Optimizer state in CPU memory: the same updates, and the same files."""

from __future__ import annotations

import pytest
import torch
from processes.add_ons import needs
from tiny import build_policy, documents, pack

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, MuonOptim, SgdOptim
from stretto.models import hub
from stretto.models.tensor_map import TensorSlice
from stretto.trainer.learner import Learner
from stretto.trainer.optim.build import (
    MasterWeights,
    _build_optimizer,
    allocate_optimizer_slices,
    build_optimizer,
    optimizer_slices,
)
from stretto.trainer.optim.offload import StreamedOptimizer
from stretto.trainer.ranks.mesh import build_mesh
from stretto.trainer.state.learner_state import LearnerState

OPTIMS = (AdamWOptim(lr=1e-2), SgdOptim(lr=1e-2), pytest.param(MuonOptim(lr=1e-2), marks=needs("optimizers")))


def build(optim, bucket_bytes=None, dtype="float32"):
    weights = MasterWeights(build_policy().to(hub.DTYPES[dtype]), torch.float32)
    if bucket_bytes is None:
        return weights, build_optimizer(weights, optim)
    named = dict(zip(weights.names, weights.parameters))
    return weights, StreamedOptimizer(
        named, lambda some: _build_optimizer(some, optim, weights), bucket_bytes=bucket_bytes
    )


def step(weights, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in weights.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
    optimizer.step()


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: optim.type)
def test_streamed_state_gives_the_same_weights_and_the_same_tensors_to_save(optim, bucket_bytes):
    (ours, streamed), (theirs, plain) = build(optim, bucket_bytes), build(optim)
    for seed in range(3):
        step(ours, streamed, seed)
        step(theirs, plain, seed)
    for name, got, want in zip(theirs.names, ours.parameters, theirs.parameters):
        assert torch.equal(got, want), name
    got, want = (optimizer_slices(optimizer, theirs) for optimizer in (streamed, plain))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name].tensor, want[name].tensor) for name in want)
    assert not any(inner.state for inner in streamed._inner)


@pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: optim.type)
def test_saved_state_loads_into_a_streamed_optimizer_and_back(optim):
    weights, plain = build(optim)
    step(weights, plain, 0)
    saved = LearnerState(
        {n: TensorSlice.whole(p.tensor.clone()) for n, p in optimizer_slices(plain, weights).items()}, {}
    )
    ours, streamed = build(optim, 20_000)
    for parameter, start in zip(ours.parameters, weights.parameters):
        parameter.data.copy_(start)
    saved.read(allocate_optimizer_slices(streamed, ours, saved.tensors))
    step(ours, streamed, 1)
    step(weights, plain, 1)
    for name, got, want in zip(weights.names, ours.parameters, weights.parameters):
        assert torch.equal(got, want), name


def test_offloading_without_a_gpu_is_refused(monkeypatch):
    def learner(**model):
        return Learner(
            build_policy(),
            model=ModelSection(**model),
            optim=AdamWOptim(),
            scheduler=ConstantScheduler(warmup_steps=0),
            max_steps=None,
        )

    with pytest.raises(ConfigError, match="optim_cpu_offload = true needs a GPU"):
        learner(optim_cpu_offload=True)
    with pytest.raises(ConfigError, match=r"several trainer ranks, .*optim_cpu"):
        build_mesh(ModelSection(fsdp_cpu_offload=True), build_policy().config)
    learner().forward_backward([pack(documents())])
