"""The engine in bfloat16: its logprobs are the trainer's but for the order of sums, and do not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_runs import ask, bits, build_core, build_model, packed_logprobs, prompt, run

pytestmark = pytest.mark.heavy

SHAPES = {
    "norms": {},
    "one_kv_head": {"num_heads": 4, "num_kv_heads": 1},
    "biases": {"family": "qwen2"},
    "llama": {"family": "llama", "head_dim": 64},
    "experts": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
}


def scored(core, model, documents) -> np.ndarray:
    """|engine - trainer| of the logprobs of the tokens of documents, in nats."""
    specs = [ask(f"{i}", ids, max_tokens=0, scored=True) for i, ids in enumerate(documents)]
    ours = [group[0].prompt_logprobs[1:] for group in run(core, *specs)]
    return np.concatenate([abs(one - packed_logprobs(model, ids)) for one, ids in zip(ours, documents)])


def decoded(core, model, documents) -> np.ndarray:
    """|engine - trainer| of the logprobs of tokens that the engine samples after documents, in nats."""
    specs = [ask(f"{i}", ids, n=2, max_tokens=40) for i, ids in enumerate(documents)]
    parts = []
    for spec, group in zip(specs, run(core, *specs)):
        for one in group:
            whole = packed_logprobs(model, np.concatenate([spec.prompt_ids, one.token_ids]))
            parts.append(abs(one.logprobs - whole[len(spec.prompt_ids) - 1 :]))
    return np.concatenate(parts)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logprobs_are_those_of_the_trainer(shape):
    rng = np.random.default_rng(0)
    prompts, samples = [], []
    for seed in range(3):
        model = build_model(seed, **shape).to(torch.bfloat16)
        documents = [prompt(rng, 20 + 17 * i) for i in range(6)]
        prompts.append(scored(build_core(model), model, documents))
        samples.append(decoded(build_core(model), model, documents))
    # bfloat16 has 8 bits; tokens of these models have -4 nats, and other orders of a sum move them by 1e-3.
    assert np.concatenate(prompts).mean() < 1e-3
    assert np.concatenate(samples).mean() < 2e-3


def test_a_row_has_equal_bits_alone_and_in_a_batch():
    model, rng = build_model().to(torch.bfloat16), np.random.default_rng(1)
    specs = [ask(f"r{i}", prompt(rng, 5 + 9 * i), n=2, max_tokens=20) for i in range(5)]
    together = run(build_core(model), *specs)
    for spec, group in zip(specs, together):
        assert [bits(one) for one in run(build_core(model), spec)[0]] == [bits(one) for one in group]
