"""Checkpointed, offloaded and compiled blocks: loss and gradients are those of plain ones."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny import build_policy, documents, pack

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ActivationCheckpointSection, LoRASection, ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models.attention import PackedLayout
from stretto.models.hf import load_hf_model
from stretto.models.hub import save_hf
from stretto.models.moe import Routing
from stretto.trainer.learner import Learner
from stretto.trainer.parallel import memory
from stretto.trainer.parallel.memory import ActivationOffload, prepare_blocks

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MOE = SHAPE | {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SELECTIVE = {"mode": "selective"}
RECOMPUTED = [{}, {"freq": 2}, {"group_size": 2}, {"num_blocks": 1}, SELECTIVE, SELECTIVE | {"targets": "all"}]
DENSE_TARGETS, MOE_TARGETS = ("norm", "attn_proj", "mlp"), ("norm", "attn_proj", "routed_experts")


def train(shape, model=None, *, is_replaying=False, num_steps=2, dtype="float32"):
    """A learner after some steps, the gradients of the first step, and the metrics of all."""
    section = ModelSection(dtype=dtype, **(model or {}))
    learner = Learner(
        build_policy(**shape).to(getattr(torch, dtype)),
        model=section,
        optim=AdamWOptim(lr=1e-2),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        enable_router_replay=is_replaying,
    )
    first, metrics = None, []
    for step in range(num_steps):
        micro_batches = [pack(documents(seed=step)[:5]), pack(documents(seed=step)[5:])]
        if is_replaying:
            micro_batches = [replace(mb, routed_experts=choices(len(mb.token_ids))) for mb in micro_batches]
        learner.forward_backward(micro_batches)
        if first is None:
            weights = learner.network.weights
            first = {n: p.grad.clone() for n, p in zip(weights.names, weights.parameters)}
        metrics.append(learner.optim_step())
    return learner, first, metrics


def choices(num_tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    picked = [rng.permuted(np.arange(5)[None].repeat(num_tokens, 0), axis=1)[:, :2] for _ in range(2)]
    return np.stack(picked, 1).astype(np.uint8)


def assert_equal(got, want):
    assert got[2] == want[2]
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name
    for name, tensor in want[0].policy.state_dict().items():
        assert torch.equal(got[0].policy.state_dict()[name], tensor), name


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "moe", "replay"])
@pytest.mark.parametrize("ac", RECOMPUTED, ids=str)
def test_what_is_computed_again_is_the_same_to_the_bit(ac, kind, dtype):
    shape = SHAPE if kind == "dense" else MOE
    if ac.get("targets"):
        ac = ac | {"targets": DENSE_TARGETS if kind == "dense" else MOE_TARGETS}
    settings = {"is_replaying": kind == "replay", "dtype": dtype}
    assert_equal(train(shape, {"ac": ac}, **settings), train(shape, **settings))


@pytest.mark.heavy
def test_dropout_of_an_adapter_is_the_same_when_computed_again():
    lora = LoRASection(rank=4, dropout=0.5)
    torch.manual_seed(0)
    want = train(SHAPE, {"lora": lora})
    torch.manual_seed(0)
    assert_equal(train(SHAPE, {"lora": lora, "ac": {}}), want)


def saved_bytes(shape, model) -> int:
    """Bytes that a forward pass saves for the backward pass; each storage is counted once."""
    policy = build_policy(**shape)
    prepare_blocks(policy, ModelSection(**model))
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def pack_hook(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address is reused
        return tensor

    ids = torch.arange(200) % 30
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        policy.hidden(ids, PackedLayout((0, 200), ids.device))
    return sum(storage.nbytes() for storage in kept.values())


def test_each_target_saves_memory_and_full_checkpoints_save_most():
    for shape, targets in ((SHAPE, DENSE_TARGETS[1:]), (MOE, MOE_TARGETS[1:])):
        plain = saved_bytes(shape, {})
        some = [saved_bytes(shape, {"ac": {"mode": "selective", "targets": (name,)}}) for name in targets]
        both = saved_bytes(shape, {"ac": {"mode": "selective", "targets": targets}})
        half, full = saved_bytes(shape, {"ac": {"freq": 2}}), saved_bytes(shape, {"ac": {}})
        assert max(some) < plain and both < min(some)
        assert full < both < plain and full < half < plain


def test_groups_of_blocks_keep_one_input_and_the_blocks_after_them_keep_all():
    shape = SHAPE | {"num_layers": 5}
    plain, each = saved_bytes(shape, {}), saved_bytes(shape, {"ac": {}})
    pairs, some = saved_bytes(shape, {"ac": {"group_size": 2}}), saved_bytes(shape, {"ac": {"num_blocks": 3}})
    one = 4 * 200 * SHAPE["hidden_size"]
    assert each - pairs == 2 * one, "three inputs of five"
    both = saved_bytes(shape, {"ac": {"group_size": 2, "num_blocks": 4}})
    assert pairs < each < both < some < plain


def test_nothing_is_computed_again_where_nothing_is_learned():
    policy = build_policy(**SHAPE)
    calls = []
    policy.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    prepare_blocks(policy, ModelSection(ac=ActivationCheckpointSection()))
    ids = torch.arange(8)
    with torch.no_grad():
        policy.hidden(ids, PackedLayout((0, 8), ids.device))
    assert len(calls) == 1
    policy.hidden(ids, PackedLayout((0, 8), ids.device)).sum().backward()
    assert len(calls) == 3


def test_a_mixture_takes_the_same_experts_the_second_time_though_its_router_has_moved():
    """As with a kernel that rounds differently: the first choices are used, not computed again."""
    policy = build_policy(**MOE)
    prepare_blocks(policy, ModelSection(ac=ActivationCheckpointSection()))
    ids, seen = torch.arange(30), []
    experts = policy.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: seen.append(args[3].clone()))
    routing = Routing(is_measuring=True)
    hidden = policy.hidden(ids, PackedLayout((0, 30), ids.device), None, routing)
    loads = {layer: load.clone() for layer, load in routing.loads.items()}
    with torch.no_grad():
        for block in policy.model.layers:
            block.mlp.gate.weight.neg_()
    hidden.sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert all(torch.equal(routing.loads[layer], load) for layer, load in loads.items())


@pytest.mark.parametrize("model", [{}, {"ac": {}}, {"ac": {"mode": "selective", "targets": ("attn_proj",)}}], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_what_was_offloaded_comes_back(shape, model, monkeypatch):
    """On a CPU the copies are CPU copies; the rest of the code is the same as on a GPU."""
    monkeypatch.setattr(memory, "MIN_OFFLOAD_BYTES", 1024)
    wants, gots = build_policy(**shape), build_policy(**shape)
    prepare_blocks(gots, ModelSection(**model))
    offload = ActivationOffload(2, pin_memory=True, device=torch.device("cpu"))
    for block in gots.model.layers:
        block.forward = memory._with_offload(block.forward, offload)
    ids = torch.arange(200) % 30
    for policy in (wants, gots):
        policy.hidden(ids, PackedLayout((0, 200), ids.device)).square().sum().backward()
    for want, got in zip(wants.parameters(), gots.parameters()):
        # Half of a wider tensor comes back as a tensor of its own, for which the CPU's kernels round differently.
        is_exact = shape is SHAPE or model.get("ac") == {}
        torch.testing.assert_close(got.grad, want.grad, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-4)
    if model.get("ac") == {}:
        assert offload.num_bytes == 2 * 200 * 32 * 4  # the input of each block
    else:
        assert offload.num_bytes > 2 * 200 * 32 * 4
    assert not offload._outgoing and all(ref() is None for ref in offload._order)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dense", "moe", "dense+ac", "moe+ac"])
def test_compiled_blocks_give_what_plain_ones_give(kind):
    shape = SHAPE if kind.startswith("dense") else MOE
    targets = DENSE_TARGETS if kind.startswith("dense") else MOE_TARGETS
    ac = {"ac": {"mode": "selective", "targets": targets}} if kind.endswith("ac") else {}
    got, want = train(shape, {"compile": {"fullgraph": True}} | ac), train(shape)
    for ours, theirs in zip(got[2], want[2]):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_is_refused(monkeypatch, tmp_path):
    policy = build_policy(**SHAPE)

    def refused(**model) -> str:
        with pytest.raises(ConfigError) as error:
            prepare_blocks(policy, ModelSection(**model))
        return str(error.value)

    message = refused(ac={"mode": "selective", "targets": ["routed_experts"]})
    assert message == '[model.ac] targets: this model has no "routed_experts"; use some of norm, attn_proj, mlp'
    assert "mla_up_proj" in refused(ac={"mode": "selective", "targets": ["norm", "mla_up_proj"]})
    assert refused(ac_offloading={}) == "[model.ac_offloading] needs a GPU to offload from; remove it"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not installed" in refused(compile={})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_whole_blocks_of_transformers_models_are_computed_again_too(family, tmp_path):
    save_hf(build_policy(**MOE | {"family": family}), tmp_path)
    ids, grads, calls = torch.arange(30), [], []
    for model in ({}, {"ac": {}}):
        policy = load_hf_model(tmp_path, dtype=torch.float32)
        prepare_blocks(policy, ModelSection(**model))
        policy.model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
        policy.hidden(ids, PackedLayout((0, 12, 30), ids.device)).square().sum().backward()
        grads.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert len(calls) == 3 and grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[1][name], gradient) for name, gradient in grads[0].items())
    with pytest.raises(ConfigError, match='mode = "selective" needs impl = "custom"'):
        prepare_blocks(policy, ModelSection(ac={"mode": "selective"}))
