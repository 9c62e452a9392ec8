"""States of recurrent layers in the embedded engine: kept through updates, given up with their sequence."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from engine_runs import RECURRENT, ask, bits, build_core, build_varied, finish, packed_logprobs, prompt, run, submit

from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.hub import export_tensors
from stretto.records.generate import VersionSpan
from stretto_families.caches import states

RNG = np.random.default_rng(5)
PROMPTS = [prompt(RNG, length) for length in (9, 40, 23)]


@pytest.fixture(params=RECURRENT)
def model(request):
    return build_varied(request.param)


def copy_of(model):
    return [(name, tensor.clone()) for name, tensor in export_tensors(model)]


@pytest.mark.heavy
def test_new_weights_continue_from_the_old_states(model):
    """As with cached keys and values: nothing is computed again, and each token knows its version."""
    old, new = copy_of(model), copy_of(build_varied(model.config.family, seed=3))
    ids = PROMPTS[1]

    def sample(*others):
        core = build_core(model)
        core.load_weights(1, old)
        [request, *_] = submit(core, ask("a", ids, max_tokens=12), *others)
        for _ in range(6):
            core.step()
        core.load_weights(2, new)
        finish(core)
        return request.completions[0]

    alone, together = sample(), sample(ask("b", PROMPTS[0], n=3, max_tokens=20))
    assert bits(alone) == bits(together)
    assert alone.versions == (VersionSpan(1, 0, 6), VersionSpan(2, 6, 12))
    tokens = np.concatenate((ids, alone.token_ids))
    by_new = packed_logprobs(model, tokens)[len(ids) - 1 :]
    build_core(model).load_weights(1, old)
    by_old = packed_logprobs(model, tokens)[len(ids) - 1 :]
    np.testing.assert_allclose(alone.logprobs[:6], by_old[:6], atol=1e-5, rtol=0)
    for others in (by_old, by_new):
        assert np.abs(alone.logprobs[6:] - others[6:]).max() > 1e-3


@pytest.mark.heavy
def test_a_cancelled_sequence_leaves_nothing_to_the_next_in_its_place(model):
    core = build_core(model, max_num_seqs=4)
    [fresh] = run(core, ask("fresh", PROMPTS[2], n=2))
    num_bytes = core.states.num_bytes
    for attempt in range(3):
        submit(core, ask(f"long-{attempt}", PROMPTS[1], n=4, max_tokens=50))
        for _ in range(4):
            core.step()
        core.abort()
    [again] = run(core, ask("again", PROMPTS[2], n=2))
    assert [bits(c) for c in again] == [bits(c) for c in fresh]
    assert core.states.num_bytes == num_bytes


@pytest.mark.heavy
def test_prompts_by_chunks_agree_with_prompts_token_by_token(model):
    """On a GPU, and in other dtypes, a prompt is read by chunks; a decoded token goes on from the same state."""
    for budget in (8192, 50):
        core = build_core(model, max_num_batched_tokens=budget)
        core.states.is_exact = False
        ids = prompt(np.random.default_rng(1), 150)
        [[completion], *_] = run(core, ask("a", ids), ask("b", PROMPTS[0], n=2))
        tokens = np.concatenate((ids, completion.token_ids))
        expected = packed_logprobs(model, tokens)[len(ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.heavy
def test_the_prefix_cache_is_off_and_this_is_said_once(model, caplog):
    with caplog.at_level(logging.INFO):
        core = build_core(model)
    assert sum("the prefix cache is off" in record.message for record in caplog.records) == 1
    [first], [second] = run(core, ask("a", PROMPTS[1])), run(core, ask("b", PROMPTS[1]))
    assert second[0].cached_tokens == 0
    assert bits(first[0]) == bits(second[0])


@pytest.mark.heavy
def test_fewer_sequences_run_than_allowed_if_their_states_do_not_fit(model, caplog, monkeypatch):
    per_sequence = states.bytes_per_sequence(model)
    monkeypatch.setattr(states, "free_memory", lambda: 6 * 3 * per_sequence)
    core = build_core(model, kv_cache_tokens=1024)
    assert core.max_num_seqs == 3 and "3 run at one time" in caplog.text
    assert "3" in core.refusal_reason(ask("wide", PROMPTS[0], n=4))
    completions = run(core, *(ask(str(i), PROMPTS[i % 3], n=2) for i in range(5)))
    assert all(len(samples) == 2 for samples in completions)
    assert core.states.num_bytes == 4 * per_sequence, "three, and what pads a pass"


def test_a_model_without_attention_needs_no_keys():
    """As nemotron_h with the default of two layers: Mamba 2 and experts."""
    model = build_varied("nemotron_h", num_layers=2)
    assert not model.config.attending_layers
    core = EngineCore(model, CoreSettings(max_model_len=128, max_num_batched_tokens=32))
    requests = [ask(str(i), ids, n=2) for i, ids in enumerate((*PROMPTS, PROMPTS[0][:1]))]
    for request, completions in zip(requests, run(core, *requests)):
        for completion in completions:
            tokens = np.concatenate((request.prompt_ids, completion.token_ids))
            expected = packed_logprobs(model, tokens)[len(request.prompt_ids) - 1 :]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
