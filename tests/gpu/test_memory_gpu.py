"""What waits in CPU memory comes back to the GPU unchanged, and the GPU holds less meanwhile."""

from __future__ import annotations

import pytest
import torch
from tiny import build_policy, documents, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, MuonOptim
from stretto.models.attention import PackedLayout
from stretto.trainer.learner import Learner
from stretto.trainer.optim import offload
from stretto.trainer.parallel import memory
from stretto.trainer.parallel.memory import prepare_blocks

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4, "head_dim": 64}
MOE = SHAPE | {"family": "qwen3_moe", "moe_intermediate_size": 256}


def build(shape, optim=None, **model):
    return Learner(
        build_policy(**shape).to("cuda"),
        model=ModelSection(**model),
        optim=optim or AdamWOptim(lr=1e-3),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )


def weights_after(learner, num_steps=3):
    for step in range(num_steps):
        learner.forward_backward([pack(documents(seed=step, num_groups=8))])
        learner.optim_step()
    torch.cuda.synchronize()
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(
    "settings",
    [
        {"ac": {}},
        {"ac_offloading": {}},
        {"ac_offloading": {"pin_memory": False, "max_inflight_activations": 1}},
        {"ac_offloading": {}, "ac": {"mode": "selective", "targets": ["attn_proj"]}},
    ],
    ids=str,
)
def test_activations_that_left_give_the_same_weights(shape, settings, monkeypatch):
    monkeypatch.setattr(memory, "MIN_OFFLOAD_BYTES", 1024)
    want, got = weights_after(build(shape)), weights_after(build(shape, **settings))
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-5, atol=1e-5)


def test_offloaded_activations_take_no_memory_between_forward_and_backward():
    held = {}
    for kind, settings in (("kept", {"ac": {}}), ("offloaded", {"ac_offloading": {}})):
        policy = build_policy(**SHAPE | {"num_layers": 16}).to("cuda")
        prepare_blocks(policy, ModelSection(**settings))
        ids = torch.arange(200, device="cuda").repeat(40) % 30
        bounds = tuple(range(0, 8001, 200))
        before = torch.cuda.memory_allocated()
        hidden = policy.hidden(ids, PackedLayout(bounds, ids.device))
        torch.cuda.synchronize()
        held[kind] = torch.cuda.memory_allocated() - before
        hidden.sum().backward()
    assert held["offloaded"] < 0.6 * held["kept"]


@pytest.mark.parametrize("optim", [AdamWOptim(lr=1e-3), MuonOptim(lr=1e-3)], ids=lambda optim: optim.type)
def test_streamed_optimizer_state_gives_the_same_weights_and_leaves_the_gpu(optim, monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 1 << 18)
    plain, streamed = build(SHAPE, optim), build(SHAPE, optim, optim_cpu_offload=True)
    want, got = weights_after(plain), weights_after(streamed)
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-6, atol=1e-6)
    state = streamed.network.optimizer.state
    tensors = [t for kept in state.values() for t in kept.values() if t.dim()]
    assert tensors and all(t.device.type == "cpu" and t.is_pinned() for t in tensors)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_give_what_plain_ones_give():
    pytest.importorskip("triton")
    want, got = weights_after(build(SHAPE)), weights_after(build(SHAPE, compile={"fullgraph": True}))
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-3, atol=1e-4)
