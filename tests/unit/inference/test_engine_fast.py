"""The engine's fused passes against the modules' pass over blocks, with requests that come and go.

There are two: in torch's operations, with slabs, and with kernels in C.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_runs import ask, audit, bits, build_core, build_model, finish, prompt, run, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.inference.embedded.core import EngineCore
from stretto.models.decoder import Decoder
from stretto.models.fused import pack_parameters
from stretto.models.hub import export_tensors

pytestmark = pytest.mark.heavy

SHAPES = {
    "norms": {},
    "odd_heads": {"head_dim": 24, "num_heads": 6, "num_kv_heads": 2},
    "one_kv_head": {"num_heads": 4, "num_kv_heads": 1},
    "biases": {"family": "qwen2"},
    "llama": {"family": "llama"},
    "experts": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
}


def varied(seed: int = 0, **shape) -> Decoder:
    """A model whose biases and norms are not zeros and ones."""
    model = build_model(seed, **shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def slow(model: Decoder, **sizes) -> EngineCore:
    """A core that runs the modules' pass and reads every key from its block."""
    core = build_core(model, use_kernels=False, **sizes)
    core.cache.running.max_tokens = 0
    core.runner.model = lambda ids, at, attend, routing, *_: model(ids, at, attend, None, routing)
    return core


def slabbed(model: Decoder, **sizes) -> EngineCore:
    """The fused pass in torch's operations, with slabs."""
    return build_core(model, use_kernels=False, **sizes)


def unslabbed(model: Decoder, **sizes) -> EngineCore:
    core = slabbed(model, **sizes)
    core.cache.running.max_tokens = 0
    return core


def play(core: EngineCore, script) -> dict:
    """Submit and cancel requests and load weights at given steps; returns the requests by number."""
    events, specs, updates = script
    requests = {}
    for what, argument in events:
        if what == "submit":
            requests[argument] = submit(core, specs[argument])[0]
        elif what == "cancel" and argument in requests:
            core.abort([specs[argument].request_id])
        elif what == "update":
            core.load_weights(argument, export_tensors(updates[argument % len(updates)]))
        elif what == "step":
            for _ in range(argument):
                core.step()
                assert audit(core) == []
                assert core.cache.running.num_tokens <= core.cache.running.max_tokens
    finish(core)
    return requests


def draw_script(random, updates):
    rng = np.random.default_rng(random.randrange(2**32))
    common = prompt(rng, 90)
    specs, events = [], []
    for i in range(7):
        ids = common[: int(rng.integers(1, 90))] if random.random() < 0.4 else prompt(rng, int(rng.integers(1, 90)))
        spec = ask(
            f"r{i}", ids, n=random.choice([1, 1, 2, 4]), max_tokens=random.randrange(1, 45), seed=i,
            temperature=random.choice([0.0, 0.7, 1.0]), top_p=random.choice([0.9, 1.0]), scored=random.random() < 0.2,
            ignore_eos=random.random() < 0.7,
        )  # fmt: skip
        specs.append(spec)
        events += [("submit", i), ("step", random.randrange(12))]
        if random.random() < 0.3:
            events += [("cancel", random.randrange(i + 1)), ("step", random.randrange(4))]
        if random.random() < 0.3:
            events.append(("update", random.randrange(1, 6)))
    versions = iter(range(1, 100))
    return [(w, next(versions) if w == "update" else a) for w, a in events], specs, updates


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(max_examples=3)
@given(random=st.randoms(use_true_random=False))
def test_fast_is_slow(shape, random):
    sizes = {
        "kv_cache_tokens": random.choice([384, 4096]),
        "max_num_batched_tokens": random.choice([13, 64, 4096]),
        "block_size": random.choice([8, 16]),
        "enable_prefix_caching": random.random() < 0.5,
        "max_num_seqs": random.choice([4, 64]),
        "max_model_len": 160,
    }
    script = draw_script(random, [varied(seed, **shape) for seed in (1, 2)])
    fast, kernels, reference, paged = (
        play(build(varied(**shape), **sizes), script) for build in (slabbed, build_core, slow, unslabbed)
    )
    for i, expected in reference.items():
        for ours, other in zip(fast[i].completions, paged[i].completions):
            assert bits(ours) == bits(other)
        for request in (fast[i], kernels[i]):
            for ours, theirs in zip(request.completions, expected.completions):
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                assert ours.versions == theirs.versions
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5, rtol=0)
                if ours.prompt_logprobs is not None and request.spec.n == 1:
                    np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, atol=2e-5, rtol=0)


def test_a_slot_that_is_used_again_at_the_next_position_is_not_the_sequence_before():
    model, rng = varied(), np.random.default_rng(0)
    core = slabbed(model, max_num_seqs=1, enable_prefix_caching=False)
    first = prompt(rng, 20)
    run(core, ask("first", first, max_tokens=5))
    # The first one's last computed token stood at 23; this one is decoded at 24, in the same slot and slab.
    second = ask("second", prompt(rng, 24), max_tokens=6)
    got = run(core, second)[0][0]
    assert bits(got) == bits(run(slabbed(model), second)[0][0])


def test_a_sequence_that_was_preempted_and_computed_anew_under_other_weights_does_not_read_its_old_keys():
    other, rng = varied(1), np.random.default_rng(1)
    ids = prompt(rng, 20)
    cores = [
        build(varied(), max_num_batched_tokens=4096, enable_prefix_caching=False) for build in (slabbed, unslabbed)
    ]
    answers = []
    for core in cores:
        [request] = submit(core, ask("r", ids, max_tokens=20))
        submit(core, ask("keeps the engine from being empty", prompt(rng, 5)[:1], max_tokens=30))
        for _ in range(6):
            core.step()
        core.scheduler.running = core.scheduler.running[::-1].copy()  # the first one is the one that goes
        core.scheduler._preempt(request.slots[0])
        core.load_weights(1, export_tensors(other))
        finish(core)
        answers.append(bits(request.completions[0]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("shape", [SHAPES["norms"], SHAPES["biases"], SHAPES["experts"]])
def test_weights_keep_their_names_and_what_is_written_into_them_counts(shape):
    model, other = varied(**shape), varied(1, **shape)
    before = [(name, tensor.clone()) for name, tensor in export_tensors(model)]
    spec = ask("r", [2, 3, 4])
    core = build_core(model)
    assert [name for name, _ in before] == [name for name, _ in export_tensors(model)]
    for (_, ours), (_, theirs) in zip(export_tensors(model), before):
        assert torch.equal(ours, theirs)
    run(core, spec)
    second = build_core(model)  # of the same model: neither engine's weights are left behind
    core.load_weights(1, export_tensors(other))
    expected = bits(run(build_core(other), spec)[0][0])
    assert bits(run(core, spec)[0][0]) == expected
    assert bits(run(second, spec)[0][0]) == expected


def test_parameters_are_moved_once():
    whole = torch.arange(24.0).view(6, 4)
    parts = [torch.nn.Parameter(whole[:2].clone()), torch.nn.Parameter(whole[2:].clone())]
    first = pack_parameters(parts)
    assert torch.equal(first, whole)
    assert pack_parameters(parts).data_ptr() == first.data_ptr()
    alone = torch.nn.Parameter(torch.zeros(3, 4))
    assert pack_parameters([alone]).data_ptr() == alone.data_ptr()


def test_slabs_hold_no_more_than_they_may():
    model, rng = varied(), np.random.default_rng(2)
    specs = [ask(f"r{i}", prompt(rng, int(rng.integers(1, 90))), n=3, max_tokens=50) for i in range(8)]
    expected = [[bits(c) for c in group] for group in run(slabbed(model), *specs)]
    for tokens in (0, 700, 1600, 3000):
        core = slabbed(model)
        core.cache.running.max_tokens = tokens
        requests, most = submit(core, *specs), 0
        while core.has_work:
            core.step()
            most = max(most, core.cache.running.num_tokens)
        assert [[bits(c) for c in request.completions] for request in requests] == expected
        assert most <= tokens and (tokens == 0 or most > 0)


def test_in_bfloat16_slabs_change_nothing():
    model, rng = varied().to(torch.bfloat16), np.random.default_rng(3)
    specs = [ask(f"r{i}", prompt(rng, 10 + 7 * i), n=2, max_tokens=30) for i in range(4)]
    fast, reference = run(build_core(model), *specs), run(slow(model), *specs)
    same = 0
    for ours, theirs in zip(fast, reference):
        for a, b in zip(ours, theirs):
            agreed = int(np.argmin(np.append(a.token_ids == b.token_ids, False)))
            np.testing.assert_allclose(a.logprobs[:agreed], b.logprobs[:agreed], atol=0.05, rtol=0)
            same += agreed
    assert same > 120
