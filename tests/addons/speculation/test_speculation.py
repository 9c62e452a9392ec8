"""Drafts change nothing but time: tokens, logprobs and ends are those of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
from engine_runs import RECURRENT, ask, audit, bits, build_core, build_model, prompt, run, submit

from stretto.families.table import FAMILIES, VISION_FAMILIES
from stretto.inference.embedded.core import EngineCore
from stretto.inference.embedded.slots import SequenceSlots
from stretto.inference.text import TokenWatcher
from stretto.models.hub import export_tensors
from stretto.records.generate import GenerateRequest
from stretto_speculation.copies import DraftIndex
from stretto_speculation.speculator import Pace, PaceState, SpeculationSettings


def speculation(**settings) -> SpeculationSettings:
    return SpeculationSettings(**{"is_always_on": True, "prompt_lookup_min": 1, "prompt_lookup_max": 3} | settings)


def both(**settings) -> tuple[EngineCore, EngineCore]:
    """An engine that drafts in every step, and one that does not."""
    return build_core(build_drafter=speculation().build, **settings), build_core(**settings)


def mixture(count: int, seed: int) -> list[GenerateRequest]:
    """Requests of all lengths, temperatures and stop rules; many have repetitions to copy."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        length = int(rng.integers(1, 60))
        ids = prompt(rng, length)
        if rng.random() < 0.5:
            ids = np.tile(ids[: max(length // 5, 1)], 6)[:length]
        sampling = {
            "max_tokens": int(rng.choice([0, 1, 2, 7, 20, 60])),
            "temperature": float(rng.choice([0.0, 0.05, 0.3, 1.0])),
            "top_p": float(rng.choice([1.0, 1.0, 0.9])),
            "top_k": [None, None, 5][int(rng.integers(3))],
            "min_p": float(rng.choice([0.0, 0.0, 0.1])),
            "min_tokens": int(rng.choice([0, 0, 5])),
            "logit_bias": [{}, {}, {3: 2.0}][int(rng.integers(3))],
            "ignore_eos": bool(rng.random() < 0.5),
            "stop_token_ids": (2, 5) if rng.random() < 0.3 else (),
            "seed": int(rng.integers(1 << 30)),
        }
        if sampling["max_tokens"] < sampling["min_tokens"]:
            sampling["min_tokens"] = 0
        scored = bool(rng.random() < 0.2) or sampling["max_tokens"] == 0
        found.append(ask(f"r{i}", ids, n=int(rng.choice([1, 1, 2, 4])), scored=scored, **sampling))
    return found


def same_as_plain(drafting: EngineCore, plain: EngineCore, specs: list[GenerateRequest], *, at_once: int) -> None:
    for low in range(0, len(specs), at_once):
        ours, theirs = (run(core, *specs[low : low + at_once], is_audited=low < 100) for core in (drafting, plain))
        for mine, other in zip(ours, theirs, strict=True):
            assert [bits(c) for c in mine] == [bits(c) for c in other]
            assert [(c.finish_reason, c.stop_reason) for c in mine] == [(c.finish_reason, c.stop_reason) for c in other]
            for a, b in zip(mine, other, strict=True):
                assert a.versions == b.versions
                if b.support is not None:
                    assert all(
                        np.array_equal(getattr(a.support, f), getattr(b.support, f))
                        for f in b.support.__struct_fields__
                    )
                if b.routed_experts is not None:
                    assert np.array_equal(a.routed_experts, b.routed_experts)
    counts = drafting.drafter.counts
    assert counts.num_accepted_tokens > len(specs) and counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.mark.heavy
@pytest.mark.usefixtures("both_engines")
def test_drafts_give_the_bits_of_plain_decoding():
    drafting, plain = both(enable_return_sampling_mask=True)
    same_as_plain(drafting, plain, mixture(60, 1), at_once=30)


@pytest.mark.heavy
def test_drafts_are_cut_to_the_memory_for_logits(monkeypatch):
    """Where not all drafts have room, the first ones are written, and tokens stay those of plain decoding."""
    vocab = build_core().model.config.vocab_size
    monkeypatch.setattr("stretto_speculation.speculator._MAX_LOGIT_BYTES", 4 * vocab * 40)
    drafting, plain = both()
    seen, propose = list[int](), drafting.drafter.propose
    monkeypatch.setattr(
        drafting.drafter,
        "propose",
        lambda running: seen.append(0 if (n := propose(running)) is None else int(n.sum()) + len(running)) or n,
    )
    same_as_plain(drafting, plain, mixture(60, 4), at_once=20)
    assert max(seen) == 40


@pytest.mark.heavy
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(VISION_FAMILIES)))
def test_drafts_in_every_family(family):
    """Windows, chosen keys, latent keys, experts whose choices are returned: whatever is cached can be overwritten."""
    model = build_model(
        family=family, num_layers=4, num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=20, index_topk=12
    )
    settings = {"enable_return_routed_experts": model.config.moe is not None}
    drafting, plain = (build_core(model, build_drafter=s, **settings) for s in (speculation().build, None))
    if family in RECURRENT:
        assert drafting.drafter is None
        return
    same_as_plain(drafting, plain, mixture(16, 2), at_once=16)


@pytest.mark.heavy
def test_drafts_with_little_cache_and_small_steps():
    """Preemptions, prompts in pieces, and drafts for which there is no block or no budget."""
    small = {"kv_cache_tokens": 320, "max_model_len": 128, "max_num_batched_tokens": 48, "block_size": 4}
    drafting, plain = both(**small)
    same_as_plain(drafting, plain, mixture(80, 3), at_once=40)
    assert drafting.scheduler.counters.num_preemptions


@pytest.mark.heavy
def test_new_weights_in_the_middle():
    """A token has the version that sampled it, drafted or not, and is what that version samples."""
    old, new = build_model(0), build_model(1)
    core = build_core(build_model(0), build_drafter=speculation().build)
    spec = ask("a", np.tile([5, 6, 7], 8), max_tokens=120, temperature=0.0)
    [request] = submit(core, spec)
    for _ in range(14):
        core.step()
    core.load_weights(1, export_tensors(new))
    while core.has_work:
        core.step()
        assert audit(core) == []
    [completion] = request.completions
    first, second = completion.versions
    assert (first.version, second.version) == (0, 1)
    assert first.end > 14, "drafts were accepted before the update"
    # The same change at the same token of plain decoding.
    plain = build_core(old)
    [request] = submit(plain, spec)
    plain.step()
    while plain.slots.num_tokens[request.slots[0]] < 24 + first.end:
        plain.step()
    plain.load_weights(1, export_tensors(new))
    while plain.has_work:
        plain.step()
    assert bits(completion) == bits(request.completions[0])


@pytest.mark.slow
def test_2000_requests_are_those_of_plain_decoding():
    drafting, plain = both(enable_return_sampling_mask=True)
    same_as_plain(drafting, plain, mixture(2000, 4), at_once=50)


def paced(num_passes: int, cost, gain) -> tuple[float, float, Pace]:
    """Play passes of 8 sequences: seconds with drafts as paced, and without, per token; and the state.

    cost(i), gain(i): the time of pass i with drafts, in plain passes, and the tokens of each sequence that it samples.
    """
    pace, seconds, tokens = Pace(), 0.0, 0.0
    for i in range(num_passes):
        if pace.rest():
            seconds, tokens = seconds + 1, tokens + 8
            continue
        is_drafted = pace.is_drafting
        took, found = (cost(i), int(8 * gain(i))) if is_drafted else (1.0, 8)
        pace.observe(is_drafted=is_drafted, num_sequences=8, rows=found, tokens=found, seconds=took)
        seconds, tokens = seconds + took, tokens + found
    return tokens / seconds, 8.0, pace


def test_drafts_that_help_stay_on():
    rate, plain, _ = paced(5000, lambda i: 1.5, lambda i: 3)
    assert rate > 0.93 * 2 * plain


@pytest.mark.parametrize("cost, gain", [(1.5, 1), (1.5, 1.4), (3, 1), (6, 2)])
def test_drafts_that_do_not_help_cost_next_to_nothing(cost, gain):
    rate, plain, _ = paced(5000, lambda i: cost, lambda i: gain)
    assert rate > 0.975 * plain


def test_drafts_are_tried_again():
    """Nothing to copy at first, then much."""
    *_, before = paced(3000, lambda i: 1.5, lambda i: 1)
    *_, after = paced(9000, lambda i: 1.5, lambda i: 1 if i < 3000 else 3)
    assert before.state is PaceState.RESTING and after.state in (PaceState.ON, PaceState.COMPARING)


def test_a_stall_of_the_machine_does_not_decide():
    rate, plain, _ = paced(5000, lambda i: 40 if i % 50 == 0 else 1.5, lambda i: 3)
    assert rate > plain


def test_an_engine_without_speculation_has_no_drafter():
    assert build_core().drafter is None


@pytest.mark.heavy
def test_stop_texts_end_in_the_middle_of_a_draft():
    """With a decoder that gives each token a letter, replies end at the same token for the same text."""
    decode = lambda ids: "".join(chr(97 + i % 26) for i in ids)
    ends = []
    for core in both():
        requests = []
        for i, stop in enumerate(("g", "h", "qq", "bb")):
            spec = ask(f"s{i}", np.tile([5, 6, 7], 8), n=3, max_tokens=80, temperature=0.1, stop=(stop,), seed=i)
            request = core.build_request(spec)
            request.watcher = TokenWatcher(spec, decode, is_streamed=True)
            core.submit(request)
            requests.append(request)
        while core.has_work:
            core.step()
            assert audit(core) == []
        for request in requests:
            events = request.watcher.pop_events()
            for member, completion in enumerate(request.completions):
                assert [token for m, token, _ in events if m == member] == completion.token_ids.tolist()
        ends.append([[(bits(c), c.finish_reason, c.stop_reason) for c in r.completions] for r in requests])
    assert ends[0] == ends[1]
    assert any(stop is not None for request in ends[0] for _, _, stop in request)


def found_by(method: str, adapters: tuple[int, int], prompts: tuple[int, int]) -> int:
    """How many tokens a sequence copies from another one that has the same reply: 30 tokens, of which it has 10."""
    slots = SequenceSlots(2, 64, 16)
    slots.tokens[:, 0] = prompts
    slots.tokens[:, 1:31] = np.arange(100, 130)
    slots.num_prompt[:], slots.num_tokens[:], slots.order[:], slots.adapter[:] = 1, (31, 11), (1, 2), adapters
    index = DraftIndex(slots, method, least=3, most=8)
    index.update(np.array([0]))
    index.update(np.array([1]))
    guesses = index.find(np.array([1]))
    return int(index.write(guesses, np.full(len(guesses.slots), 5)).sum())


@pytest.mark.parametrize("prompts", [(7, 7), (7, 8)])
def test_a_sequence_copies_from_others_of_its_own_adapter_only(prompts):
    """Adapters are users of a service: how fast a reply comes must not tell one what another was answered."""
    assert found_by("suffix", (0, 0), prompts) == found_by("suffix", (3, 3), prompts) == 5
    assert found_by("suffix", (3, 4), prompts) == found_by("suffix", (0, 4), prompts) == 0
    assert found_by("ngram", (0, 0), prompts) == 0
