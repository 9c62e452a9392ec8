"""The embedded engine serves every family of its own: it computes what the trainer does, alone and in any batch.

Here are those that it computes in torch's operations; the others have tests of their own, with its kernels in C.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import RECURRENT, ask, bits, build_core, build_varied, packed_logprobs, prompt, run
from tiny import randomly_adapted

from stretto.config.sections.model import LoRASection
from stretto.families.table import FAMILIES, VISION_FAMILIES
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.lm_head import head_logits
from stretto.models.lora import Adapter
from stretto.models.moe import Routing

RNG = np.random.default_rng(0)
PROMPTS = [prompt(RNG, length) for length in (3, 17, 70, 33, 48)]
NEW = sorted(set(FAMILIES) - {"llama", "qwen2", "qwen3", "qwen3_moe", *VISION_FAMILIES})
"""Without those with images, which test_engine_vision.py has."""


def logprobs_and_choices(model: Decoder, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Logprob of each token after the first, and the experts of each token, by the trainer's forward pass."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    routing = None if model.config.moe is None else Routing(is_recording=True)
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device), routing=routing)
        logprobs = torch.log_softmax(head_logits(hidden, model.output_weight), -1)
    chosen = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
    if routing is None:
        return chosen, None
    return chosen, np.stack([routing.choices[layer].numpy() for layer in sorted(routing.choices)], axis=1)


@pytest.mark.heavy
@pytest.mark.parametrize("family", NEW)
def test_engine_and_trainer_agree_alone_and_in_any_batch(family):
    model = build_varied(family)
    has_experts = model.config.moe is not None
    core = lambda **settings: build_core(model, enable_return_routed_experts=has_experts, **settings)
    specs = [ask(f"r{i}", ids, seed=i, n=1 + i % 2, max_tokens=12) for i, ids in enumerate(PROMPTS)]
    together = run(core(), *specs, is_audited=False)
    chunked = run(core(max_num_batched_tokens=32), *specs, is_audited=False)
    cramped = run(core(kv_cache_tokens=208, max_model_len=128, block_size=8), *specs, is_audited=False)
    alone = [run(core(), spec, is_audited=False)[0] for spec in specs[2:3]]
    for ids, completions in zip(PROMPTS, together):
        for completion in completions:
            tokens = np.concatenate((ids, completion.token_ids))
            expected, choices = logprobs_and_choices(model, tokens)
            np.testing.assert_allclose(completion.logprobs, expected[len(ids) - 1 :], atol=1e-5, rtol=0)
            if choices is not None:
                routes = completion.routed_experts[:-1, model.config.moe.sparse_layers]
                assert np.array_equal(np.sort(routes), np.sort(choices[:-1]))
    for others in (chunked, cramped):
        assert [[bits(c) for c in one] for one in others] == [[bits(c) for c in one] for one in together]
    assert [[bits(c) for c in one] for one in alone] == [[bits(c) for c in one] for one in together[2:3]]


@pytest.mark.heavy
@pytest.mark.parametrize("family", sorted(set(NEW) - set(RECURRENT)))
def test_a_prefix_found_in_the_cache_changes_no_bit(family):
    model = build_varied(family)
    core = build_core(model)
    [[first]] = run(core, ask("a", PROMPTS[2], max_tokens=28))
    turn = np.concatenate((PROMPTS[2], first.token_ids, PROMPTS[0]))
    [[second]] = run(core, ask("b", turn, max_tokens=8))
    [[fresh]] = run(build_core(model, enable_prefix_caching=False), ask("b", turn, max_tokens=8))
    assert second.cached_tokens >= 96 and fresh.cached_tokens == 0
    assert bits(second) == bits(fresh)


@pytest.mark.heavy
@pytest.mark.parametrize("family", NEW)
def test_an_adapter_on_all_layers_and_experts_is_its_merged_model(family):
    adapted = randomly_adapted(build_varied(family), LoRASection(rank=4, alpha=8.0), 3, 0.15)
    core = build_core(build_varied(family))
    core.load_adapter("a", Adapter.of(adapted))
    request = msgspec.structs.replace(ask("adapted", PROMPTS[1]), adapter="a")
    [base], [completion] = run(core, ask("base", PROMPTS[1]), request)
    tokens = np.concatenate((PROMPTS[1], completion.token_ids))
    expected = packed_logprobs(adapted, tokens)[len(PROMPTS[1]) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
    assert not np.array_equal(base.logprobs, completion.logprobs)
