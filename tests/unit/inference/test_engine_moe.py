"""The engine with a mixture of experts: equal bits in every batch, and the choices it returns."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import ask, bits, build_core, build_model, packed_logprobs, prompt, run

from stretto.base.errors import ConfigError, WireError
from stretto.inference.embedded.runner import _TILE_ROWS, Runner
from stretto.models.attention import PackedLayout
from stretto.models.parts.router import Routing, is_missing
from stretto.transports.engine import api
from stretto.transports.engine.completions import (
    decode_completions,
    decode_routed_experts,
    encode_array,
    encode_completions,
)

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("both_engines")]

RNG = np.random.default_rng(0)
PROMPTS = [prompt(RNG, length) for length in (3, 17, 40, 5, 33, 16, 64)]


def build_moe(seed: int = 0, **shape):
    return build_model(seed, family="qwen3_moe", num_experts=8, num_experts_per_tok=2, **shape)


MODEL = build_moe()


def core(model=MODEL, **settings):
    return build_core(model, enable_return_routed_experts=True, **settings)


def trainer_choices(model, tokens):
    """[tokens, layers, top_k] that the trainer's forward pass over the whole sequence makes."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    routing = Routing(is_recording=True)
    with torch.no_grad():
        model.hidden(ids, PackedLayout((0, len(ids)), ids.device), routing=routing)
    return torch.stack([routing.choices[layer] for layer in sorted(routing.choices)], dim=1).numpy()


def everything(completion):
    return *bits(completion), completion.routed_experts.tobytes()


@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_request_gets_the_same_bits_alone_and_in_any_batch(is_tiled):
    def build(**settings):
        built = core(**settings)
        if is_tiled:
            built.runner = Runner(
                MODEL, built.cache, built.adapters, tile=_TILE_ROWS, expert_choices=built.expert_choices
            )
        return built

    specs = [ask(f"r{i}", ids, seed=i, n=1 + i % 3) for i, ids in enumerate(PROMPTS)]
    alone = [run(build(), spec)[0] for spec in specs]
    together = run(build(), *specs)
    chunked = run(build(max_num_batched_tokens=32), *specs)
    cramped = run(build(kv_cache_tokens=256, max_model_len=96, block_size=8), *specs)
    for expected, *others in zip(alone, together, chunked, cramped, strict=True):
        for other in others:
            assert [everything(c) for c in other] == [everything(c) for c in expected]


def test_logprobs_and_choices_are_the_trainers():
    for completion, ids in zip(run(core(), *(ask(f"r{i}", p) for i, p in enumerate(PROMPTS))), PROMPTS):
        tokens = np.concatenate((ids, completion[0].token_ids))
        expected = packed_logprobs(MODEL, tokens)[len(ids) - 1 :]
        np.testing.assert_allclose(completion[0].logprobs, expected, atol=2e-4)
        routes = completion[0].routed_experts
        assert routes.dtype == np.uint8 and routes.shape == (len(tokens), 2, 2)
        assert (routes[-1] == 255).all() and is_missing(torch.from_numpy(routes[-1].astype(np.int64))).all()
        assert np.array_equal(np.sort(routes[:-1]), np.sort(trainer_choices(MODEL, tokens)[:-1]))


def test_a_prefix_found_in_the_cache_brings_its_choices():
    built = core()
    first = run(built, ask("a", PROMPTS[6], salt="s"))[0][0]
    turn = np.concatenate((PROMPTS[6], first.token_ids, prompt(RNG, 9)))
    second = run(built, ask("b", turn, salt="s"))[0][0]
    assert second.cached_tokens >= 64
    fresh = run(core(), ask("b", turn, salt="s"))[0][0]
    assert fresh.cached_tokens == 0 and everything(second) == everything(fresh)
    known = len(PROMPTS[6]) + len(first.token_ids) - 1
    assert np.array_equal(second.routed_experts[:known], first.routed_experts[:known])


def test_an_aborted_request_has_choices_for_what_was_computed():
    built = core(max_num_batched_tokens=16)
    request = built.build_request(ask("a", PROMPTS[6]))
    built.submit(request)
    built.step()
    built.abort()
    routes = request.completions[0].routed_experts
    assert (routes[:16] < 8).all() and (routes[16:] == 255).all() and len(routes) == 64


def test_choices_survive_the_wire_and_vllms_form_is_filled_up():
    spec = ask("a", PROMPTS[0], n=2)
    completions = run(core(), spec)[0]
    data = encode_completions(spec, completions, [None, None])
    for got, sent in zip(decode_completions(spec, data), completions, strict=True):
        assert np.array_equal(got.routed_experts, sent.routed_experts)
        assert got.routed_experts.dtype == np.uint8
    short = encode_array(completions[0].routed_experts[:-1])
    assert np.array_equal(decode_routed_experts(short, 15), completions[0].routed_experts)
    for bad, words in ((short, "uint8.* was expected"), ("AAAA", "not an .npy file")):
        with pytest.raises(WireError, match=words):
            decode_routed_experts(bad, 20)


def test_a_dense_model_returns_none_and_refuses_to_return_any():
    assert run(build_core(), ask("a", PROMPTS[0]))[0][0].routed_experts is None
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts = true, .*qwen3"):
        build_core(enable_return_routed_experts=True)


def test_many_experts_and_dense_layers_are_kept_apart():
    model = build_moe(num_layers=3)
    wide = build_model(0, family="qwen3_moe", num_experts=300, num_experts_per_tok=3, num_layers=1)
    assert run(core(wide), ask("a", PROMPTS[1]))[0][0].routed_experts.dtype == np.uint16
    assert run(core(model), ask("a", PROMPTS[1]))[0][0].routed_experts.shape[1] == 3


def test_choices_that_are_known_are_not_sent_again():
    whole = run(core(), ask("a", PROMPTS[2]))[0][0]
    spec = msgspec.structs.replace(ask("a", PROMPTS[2]), routed_experts_start=37)
    sent, _ = api.decode_generate(api.encode_generate(spec))
    assert sent.routed_experts_start == 37
    completions = run(core(), sent)[0]
    assert np.array_equal(completions[0].routed_experts, whole.routed_experts[37:])
    data = encode_completions(sent, completions, [None])
    assert np.array_equal(decode_completions(spec, data)[0].routed_experts, whole.routed_experts[37:])
    with pytest.raises(api.Refusal, match=r"routed_experts_prompt_start: 41 .*40 tokens"):
        api.decode_generate(api.encode_generate(msgspec.structs.replace(spec, routed_experts_start=41)))
