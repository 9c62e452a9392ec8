import msgspec
import numpy as np
import pytest
import torch
from engine_runs import (
    EOS,
    ask,
    audit,
    bits,
    build_core,
    build_model,
    finish,
    packed_distribution,
    packed_logprobs,
    prompt,
    run,
    submit,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import ConfigError
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.inference.embedded.sampler import stream_key, uniforms
from stretto.models.hub import export_tensors
from stretto.records.generate import VersionSpan

pytestmark = pytest.mark.usefixtures("both_engines")

MODEL = build_model()


@pytest.mark.heavy
def test_logprobs_equal_the_trainers_forward_pass():
    rng = np.random.default_rng(0)
    core = build_core(MODEL)
    specs = [ask(f"r{i}", prompt(rng, int(rng.integers(1, 90))), n=3, max_tokens=40, scored=True) for i in range(6)]
    for spec, completions in zip(specs, run(core, *specs)):
        for completion in completions:
            reference = packed_logprobs(MODEL, np.concatenate([spec.prompt_ids, completion.token_ids]))
            start = len(spec.prompt_ids) - 1
            np.testing.assert_allclose(completion.logprobs, reference[start:], atol=1e-5, rtol=0)
            assert completion.prompt_logprobs[0] == 0
            np.testing.assert_allclose(completion.prompt_logprobs[1:], reference[:start], atol=1e-5, rtol=0)


@pytest.mark.heavy
def test_logprobs_equal_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    from stretto.models.hub import save_hf

    save_hf(MODEL, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    spec = ask("r", prompt(np.random.default_rng(3), 30), max_tokens=60)
    completion = run(build_core(MODEL), spec)[0][0]
    ids = torch.from_numpy(np.concatenate([spec.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(ids[None]).logits[0], -1)
    reference = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()[29:]
    np.testing.assert_allclose(completion.logprobs, reference, atol=1e-5, rtol=0)


def sample_alone(ids: np.ndarray, seed: int, member: int, count: int) -> list[int]:
    """The tokens of one sample, by a whole forward pass per token, without the engine."""
    tokens = ids.tolist()
    for _ in range(count):
        probs = np.exp(packed_distribution(MODEL, np.array(tokens, np.int32)).astype(np.float64))
        key = np.array([stream_key(seed, member)], np.uint64)
        u = uniforms(key, np.array([len(tokens)]))[0]
        tokens.append(int(np.searchsorted(probs.cumsum(), u * probs.sum(), side="right")))
    return tokens[len(ids) :]


@pytest.mark.heavy
def test_every_sample_of_a_group_draws_what_it_would_sample_alone():
    ids = prompt(np.random.default_rng(1), 21)
    group = run(build_core(MODEL), ask("group", ids, n=4, seed=11, max_tokens=25))[0]
    assert len({c.token_ids.tobytes() for c in group}) == 4
    for member, completion in enumerate(group):
        assert completion.token_ids.tolist() == sample_alone(ids, 11, member, 25)


def test_a_group_of_n_begins_with_the_samples_of_a_smaller_one():
    ids = prompt(np.random.default_rng(1), 21)
    few, many = (run(build_core(MODEL), ask("group", ids, n=n, seed=11))[0] for n in (1, 5))
    assert bits(few[0]) == bits(many[0])


def test_a_group_computes_its_prompt_once():
    core = build_core(MODEL)
    submit(core, ask("group", prompt(np.random.default_rng(1), 40), n=8))
    core.step()
    # 40 tokens are two full shared blocks and eight copies of the half-full one.
    assert core.pool.num_usable - core.pool.num_free == 2 + 8
    assert core.scheduler.counters.prompt_tokens == 40


@pytest.mark.heavy
@pytest.mark.parametrize("budget", [3, 16, 33])
def test_chunked_prefill_changes_no_bit(budget):
    rng = np.random.default_rng(2)
    specs = [ask(f"r{i}", prompt(rng, length), n=2, scored=i % 2 == 0) for i, length in enumerate((70, 3, 33, 120))]
    whole = run(build_core(MODEL), *specs)
    chunked = run(build_core(MODEL, max_num_batched_tokens=budget), *specs)
    for a, b in zip(whole, chunked):
        assert [bits(c) for c in a] == [bits(c) for c in b]
        if a[0].prompt_logprobs is not None:
            assert a[0].prompt_logprobs.tobytes() == b[0].prompt_logprobs.tobytes()


@pytest.mark.heavy
def test_prefix_cache_hits_change_no_bit():
    ids = prompt(np.random.default_rng(4), 100)
    cold = build_core(MODEL, enable_prefix_caching=False)
    warm = build_core(MODEL)
    specs = [ask(f"r{i}", ids[:length], n=2, seed=i) for i, length in enumerate((100, 100, 65, 48, 33))]
    for spec in specs:
        a, b = run(cold, spec)[0], run(warm, spec)[0]
        assert [bits(c) for c in a] == [bits(c) for c in b]
        assert a[0].cached_tokens == 0
    assert b[0].cached_tokens == 32


@pytest.mark.heavy
def test_preemption_changes_no_bit():
    rng = np.random.default_rng(5)
    specs = [ask(f"r{i}", prompt(rng, int(rng.integers(5, 60))), n=2, max_tokens=60) for i in range(8)]
    roomy, tight = build_core(MODEL), build_core(MODEL, kv_cache_tokens=256)
    assert [[bits(c) for c in g] for g in run(roomy, *specs)] == [[bits(c) for c in g] for g in run(tight, *specs)]
    assert roomy.scheduler.counters.num_preemptions == 0
    assert tight.scheduler.counters.num_preemptions > 3


@pytest.mark.heavy
@settings(max_examples=3)
@given(st.randoms(use_true_random=False))
def test_bits_do_not_depend_on_the_rest_of_the_batch(random):
    rng = np.random.default_rng(random.randrange(2**32))
    specs = [
        ask(
            f"r{i}",
            prompt(rng, int(rng.integers(1, 140))),
            n=int(rng.integers(1, 4)),
            max_tokens=int(rng.integers(1, 40)),
            seed=i,
            temperature=random.choice([0.0, 0.7, 1.0]),
            top_p=random.choice([0.9, 1.0]),
        )
        for i in range(12)
    ]
    core = build_core(
        MODEL,
        kv_cache_tokens=random.choice([512, 4096]),
        max_num_batched_tokens=random.choice([13, 64, 4096]),
        block_size=random.choice([8, 16, 32]),
        enable_prefix_caching=random.random() < 0.5,
    )
    order = list(range(12))
    random.shuffle(order)
    requests = {}
    for i in order:
        requests[i] = submit(core, specs[i])[0]
        for _ in range(random.randrange(4)):
            core.step()
    finish(core)
    for i, spec in enumerate(specs):
        alone = run(build_core(MODEL, block_size=core.settings.block_size), spec)[0]
        assert [bits(c) for c in alone] == [bits(c) for c in requests[i].completions]


def test_a_fixed_row_count_gives_the_same_bits():
    rng = np.random.default_rng(6)
    specs = [ask(f"r{i}", prompt(rng, int(rng.integers(1, 100))), n=3) for i in range(7)]
    plain, tiled = build_core(MODEL), build_core(MODEL)
    tiled.runner.tile = 64
    for a, b in zip(run(plain, *specs), run(tiled, *specs)):
        for c, d in zip(a, b):
            assert (c.token_ids == d.token_ids).all()
            np.testing.assert_allclose(c.logprobs, d.logprobs, atol=1e-6)


@pytest.mark.heavy
@settings(max_examples=6)
@given(st.randoms(use_true_random=False))
def test_nothing_is_lost_or_shared_wrongly_in_a_tiny_cache(random):
    rng = np.random.default_rng(random.randrange(2**32))
    core = build_core(
        MODEL,
        kv_cache_tokens=random.choice([96, 128, 200]),
        block_size=random.choice([4, 16]),
        max_num_seqs=random.choice([3, 8]),
        max_num_batched_tokens=random.choice([5, 24, 512]),
        enable_prefix_caching=random.random() < 0.7,
        max_model_len=80,
    )
    common = prompt(rng, 60)
    requests, aborted = [], set()
    for i in range(14):
        length = int(rng.integers(1, 60))
        ids = common[:length] if random.random() < 0.5 else prompt(rng, length)
        stop = tuple(range(2, random.choice([2, 4, 12])))
        requests += submit(
            core, ask(f"r{i}", ids, n=random.randrange(1, 4), max_tokens=random.randrange(1, 60), stop_token_ids=stop)
        )
        for _ in range(random.randrange(3)):
            core.step()
            assert audit(core) == []
        if random.random() < 0.2 and core.requests:
            victim = random.choice(list(core.requests))
            aborted.add(victim)
            core.abort([victim])
            assert audit(core) == []
    finish(core)
    assert core.pool.num_free == core.pool.num_usable
    assert core.slots.num_free == core.slots.capacity
    for request in requests:
        spec = request.spec
        for completion in request.completions:
            assert completion.finish_reason in (
                ("abort", "stop", "length") if spec.request_id in aborted else ("stop", "length")
            )
            ended = len(completion.token_ids) and completion.token_ids[-1] in spec.sampling.stop_token_ids
            if completion.finish_reason == "stop":
                assert ended
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == min(spec.sampling.max_tokens, 80 - len(spec.prompt_ids))
            assert not np.isin(completion.token_ids[:-1], spec.sampling.stop_token_ids).any()


def test_requests_are_served_in_order_of_arrival():
    core = build_core(MODEL, max_num_seqs=2)
    requests = submit(core, *(ask(f"r{i}", [2, 3, 4], max_tokens=5) for i in range(6)))
    ended = []
    while core.has_work:
        ended += core.step()
    assert [r.request_id for r in ended] == [r.request_id for r in requests]


@pytest.mark.heavy
def test_equal_salt_shares_blocks_and_another_salt_does_not():
    core = build_core(MODEL)
    ids = prompt(np.random.default_rng(7), 50)
    cached = [
        run(core, ask(f"r{i}", ids, salt=salt))[0][0].cached_tokens
        for i, salt in enumerate(("a", "a", "b", None, None, "a"))
    ]
    assert cached == [0, 48, 0, 0, 48, 48]


def test_the_next_turn_finds_the_whole_dialogue():
    core = build_core(MODEL)
    first = prompt(np.random.default_rng(8), 40)
    reply = run(core, ask("turn1", first, max_tokens=30))[0][0]
    second = np.concatenate([first, reply.token_ids, [5, 6, 7]])
    assert run(core, ask("turn2", second))[0][0].cached_tokens == 64  # 69 computed tokens: four full blocks


def test_new_weights_reach_running_requests_and_every_token_knows_its_version():
    other = build_model(seed=1)
    core = build_core(build_model())
    (request,) = submit(core, ask("r", prompt(np.random.default_rng(9), 20), n=2, max_tokens=30))
    for _ in range(11):
        core.step()
    core.load_weights(3, export_tensors(other))
    finish(core)
    for completion in request.completions:
        assert completion.versions == (VersionSpan(0, 0, 11), VersionSpan(3, 11, 30))
        tokens = np.concatenate([request.spec.prompt_ids, completion.token_ids])
        before = packed_logprobs(build_model(), tokens)[19:]
        np.testing.assert_allclose(completion.logprobs[:11], before[:11], atol=1e-5, rtol=0)
        after = packed_logprobs(other, tokens)[19:]
        assert np.abs(completion.logprobs[11:] - before[11:]).max() > 0.1
        assert np.abs(completion.logprobs[11:] - after[11:]).max() > 1e-4  # it goes on over the old cache


@pytest.mark.heavy
def test_requests_after_an_update_see_no_old_block():
    other, ids = build_model(seed=1), prompt(np.random.default_rng(10), 60)
    core = build_core(build_model())
    run(core, ask("old", ids), ask("old salted", ids, salt="0"))
    core.load_weights(1, export_tensors(other))
    fresh = run(build_core(other), ask("new", ids))[0][0]
    for name, salt in (("new", None), ("new salted", "1")):
        completion = run(core, ask(name, ids, salt=salt))[0][0]
        assert completion.cached_tokens == 0
        assert bits(completion) == bits(fresh)
        assert completion.versions == (VersionSpan(1, 0, 12),)


def test_a_reset_prefix_cache_finds_nothing_and_running_requests_go_on():
    core, ids = build_core(MODEL), prompt(np.random.default_rng(11), 50)
    (request,) = submit(core, ask("r", ids))
    core.step()
    core.reset_prefix_cache()
    finish(core)
    assert bits(request.completions[0]) == bits(run(build_core(MODEL), ask("r", ids))[0][0])
    assert run(core, ask("again", ids[:40]))[0][0].cached_tokens == 0


@pytest.mark.heavy
def test_end_tokens_stop_unless_ignored():
    core = build_core(MODEL)
    ids = prompt(np.random.default_rng(12), 5)
    many = run(core, ask("r", ids, n=40, max_tokens=60, ignore_eos=False))[0]
    stopped = [c for c in many if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
    assert all(c.finish_reason == "length" for c in run(core, ask("i", ids, n=40, max_tokens=60))[0])


def test_a_reply_ends_at_the_models_context():
    core = build_core(MODEL, max_model_len=32)
    completion = run(core, ask("r", [2] * 30, max_tokens=50))[0][0]
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 2
    assert "limit is 32" in core.refusal_reason(ask("r", [2] * 32))


def test_max_tokens_zero_scores_the_prompt():
    ids = prompt(np.random.default_rng(13), 37)
    (completion,) = run(build_core(MODEL), ask("r", ids, max_tokens=0, scored=True))[0]
    assert len(completion.token_ids) == 0
    np.testing.assert_allclose(completion.prompt_logprobs[1:], packed_logprobs(MODEL, ids), atol=1e-5, rtol=0)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(prompt_ids=[]), "empty"),
        (dict(prompt_ids=[2, 99]), "99 is out of vocabulary"),
        (dict(prompt_ids=[-3]), "-3 is out of vocabulary"),
        (dict(n=0), "n: 0"),
        (dict(n=1000), "max_num_seqs"),
        (dict(temperature=-1.0), "temperature: -1.0"),
        (dict(temperature=float("nan")), "temperature: nan"),
        (dict(temperature=float("inf")), "temperature: inf"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_k=-2), "top_k"),
        (dict(min_p=1.5), "min_p"),
        (dict(max_tokens=-1), "max_tokens"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(salt=""), "cache_salt"),
        (dict(stop=("",)), "stop"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(change, words):
    change = dict(change)
    ids = change.pop("prompt_ids", [2, 3])
    assert words in build_core(MODEL).refusal_reason(ask("r", ids, **change))


def test_sizes_that_cannot_work_are_config_errors():
    with pytest.raises(ConfigError, match="cannot hold one sequence"):
        EngineCore(build_model(), CoreSettings(max_model_len=128, kv_cache_tokens=64))
    with pytest.raises(ConfigError, match="256 positions"):
        EngineCore(build_model(), CoreSettings(max_model_len=512))
    assert EngineCore(build_model(), CoreSettings(kv_cache_tokens=64)).max_model_len == 64


@pytest.mark.heavy
def test_in_bfloat16_logits_are_rounded_no_more_than_the_trainers():
    """A first token attends only to itself, so engine and trainer compute the same hidden state."""
    model = build_model().to(torch.bfloat16)
    with torch.no_grad():
        model.output_weight.mul_(4)
    rng = np.random.default_rng(15)
    for first, second in rng.integers(2, 40, (20, 2)):
        specs = (
            ask("drawn", np.array([first]), n=16, max_tokens=1),
            ask("scored", np.array([first, second]), max_tokens=0, scored=True),
        )
        drawn, scored = run(build_core(model), *specs)
        expected = packed_distribution(model, np.array([first]))
        got = {int(c.token_ids[0]): float(c.logprobs[0]) for c in drawn}
        got |= {int(second): float(scored[0].prompt_logprobs[1])}
        for token, logprob in got.items():
            assert logprob == pytest.approx(expected[token], abs=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("budget", [None, 7])
def test_the_likeliest_and_other_tokens_of_a_prompt_are_scored(budget):
    ids = prompt(np.random.default_rng(17), 20)
    targets = np.random.default_rng(18).integers(-1, MODEL.config.vocab_size, (19, 4)).astype(np.int32)
    spec = msgspec.structs.replace(
        ask("r", ids, n=2, max_tokens=3, scored=True), top_prompt_logprobs=3, prompt_targets=targets
    )
    core = build_core(MODEL) if budget is None else build_core(MODEL, max_num_batched_tokens=budget)
    for completion in run(core, spec)[0]:
        assert not completion.top_prompt_ids[0].any() and not completion.top_prompt_logprobs[0].any()
        for at in range(1, 20):
            reference = packed_distribution(MODEL, ids[:at])
            best = np.argsort(-reference, kind="stable")[:3]
            assert completion.top_prompt_ids[at].tolist() == best.tolist()
            np.testing.assert_allclose(completion.top_prompt_logprobs[at], reference[best], atol=1e-5, rtol=0)
            row = targets[at - 1]
            expected = np.where(row < 0, np.nan, reference[row.clip(0)])
            np.testing.assert_allclose(completion.target_prompt_logprobs[at - 1], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_prompt_logprobs": 21}, "prompt_logprobs: 21 is not allowed"),
        ({"prompt_targets": np.zeros((2, 1), np.int32)}, "prompt_targets: 2 rows of 1 for a prompt of 4"),
        ({"prompt_targets": np.full((3, 1), 10_000, np.int32)}, "prompt_targets: ids are 0 to"),
        ({"prompt_targets": np.zeros((3, 1), np.int32), "prompt_logprobs": False}, "must be given too"),
    ],
)
def test_scores_that_cannot_be_are_refused(change, words):
    spec = msgspec.structs.replace(ask("r", np.arange(4) + 20, scored=True), **change)
    assert words in build_core(MODEL).refusal_reason(spec)
