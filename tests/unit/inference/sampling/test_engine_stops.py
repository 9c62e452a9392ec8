"""Stop texts, min_tokens, logit_bias and bad_words in the embedded engine, against slow definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_runs import EOS, VOCAB, ask, build_core, build_model, finish, prompt, run

from stretto.inference.embedded.adjustments import Adjustments
from stretto.inference.text import StopSearch, cut_at_stop
from stretto.records.generate import SamplingParams
from stretto.transports.engine.api import Refusal, decode_generate, encode_generate

PIECES = ["a", "b", "ab", "</", "s>", ">\n", "</s>", "x", "ba"]


def decode(ids) -> str:
    return "".join(PIECES[i] for i in ids)


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_search_finds_the_token_that_completes_the_stop_text_that_ends_first(min_tokens):
    rng = np.random.default_rng(0)
    stops, num_found = ("</s>", "bab", "bb", ">\n"), 0
    for _ in range(300):
        ids = rng.integers(0, len(PIECES), 12).tolist()
        before = rng.integers(0, len(PIECES), 3).tolist()
        search = StopSearch(stops, decode, min_tokens=min_tokens, before=before)
        found = next(((i, stop) for i, token in enumerate(ids) if (stop := search.push(token))), None)
        expected = None
        for i in range(min_tokens, len(ids)):  # the slow way: all ends in the text of each token
            known, text = len(decode(ids[:i])), decode(ids[: i + 1])
            ends = [
                (at + len(stop), number)
                for number, stop in enumerate(stops)
                for at in range(len(text))
                if text.startswith(stop, at) and at + len(stop) > known
            ]
            if ends:
                expected = (i, stops[min(ends)[1]])
                break
        assert found == expected, (before, ids)
        num_found += found is not None
    assert num_found > 100


def test_a_text_is_cut_before_the_stop_that_counted():
    assert cut_at_stop("a</s>\n", "</s>") == "a"
    assert cut_at_stop("a.b.", ".", min_tokens=3) == "a.b"
    assert cut_at_stop("a.b.", None) == "a.b." and cut_at_stop("a", 7) == "a"


def spell(text: str) -> list[int]:
    """Words that begin with a blank are other tokens, as many."""
    body = [ord(char) - 97 for char in text.strip()]
    return [body[0] + 20, *body[1:]] if text.startswith(" ") and body else body


def slow(logits: list[float], params: SamplingParams, stop_ids, sampled: list[int]) -> list[float]:
    """The definition, a token at a time."""
    words = [spell(prefix + word) for word in params.bad_words for prefix in ("", " ")]
    found = []
    for token, logit in enumerate(logits):
        is_banned = len(sampled) < params.min_tokens and token in stop_ids
        is_banned |= any(([*sampled, token])[-len(word) :] == word for word in words)
        found.append(float("-inf") if is_banned else logit + params.logit_bias.get(token, 0.0))
    return found


def test_logits_are_adjusted_as_the_definition_says():
    rng = np.random.default_rng(1)
    params = SamplingParams(min_tokens=4, logit_bias={3: 2.5, 30: -1.0}, bad_words=("abc", "d", "cc"))
    adjustments = Adjustments.of(params, [EOS, 9, 9], spell)
    for length in (0, 1, 2, 3, 4, 5, 9):
        for _ in range(60):
            sampled = rng.integers(0, 4, length).tolist()
            logits = rng.normal(size=VOCAB).astype(np.float32)
            row = torch.from_numpy(logits.copy())
            adjustments.apply(row, np.array(sampled, np.int32))
            expected = slow(logits.tolist(), params, {EOS, 9}, sampled)
            np.testing.assert_allclose(row.numpy(), np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.heavy
def test_requests_with_adjustments_change_no_other_request():
    rng, model = np.random.default_rng(2), build_model(1)
    plain = [ask(f"p{i}", prompt(rng, 5 + i), n=2, max_tokens=20) for i in range(3)]
    special = ask(
        "s", prompt(rng, 6), n=3, max_tokens=20, min_tokens=8, ignore_eos=False, stop_token_ids=(3, 4, 5, 6, 7),
        logit_bias={2: 1.0},
    )  # fmt: skip
    together, alone = run(build_core(model), special, *plain), run(build_core(model), *plain)
    for one, other in zip(together[1:], alone):
        assert [c.token_ids.tolist() for c in one] == [c.token_ids.tolist() for c in other]
        assert [c.logprobs.tolist() for c in one] == [c.logprobs.tolist() for c in other]
    for completion in together[0]:
        ids = completion.token_ids.tolist()
        assert not {EOS, 3, 4, 5, 6, 7} & set(ids[:8]) and len(ids) > 8
        if completion.finish_reason == "stop":
            assert completion.stop_reason == (None if ids[-1] == EOS else ids[-1])
    alone_again = run(build_core(model), special)[0]
    assert [c.token_ids.tolist() for c in alone_again] == [c.token_ids.tolist() for c in together[0]]


def test_bans_are_not_in_the_support_even_if_top_k_keeps_all():
    core = build_core(build_model(3), enable_return_sampling_mask=True)
    spec = ask("a", np.arange(2, 9), n=3, min_tokens=5, stop_token_ids=(7,), max_tokens=9, top_k=VOCAB)
    for completion in run(core, spec)[0]:
        parts = completion.support.lists()
        assert all(sorted(part) == [i for i in range(VOCAB) if i != 7] for part in parts[:5])
        assert all(part == [] for part in parts[5:])


def test_bad_words_need_a_tokenizer_and_a_token():
    core = build_core()
    spec = ask("a", [3, 4], bad_words=("ab",))
    with pytest.raises(Refusal, match=r"bad_words: .*tokenizer"):
        core.build_request(spec)
    with pytest.raises(Refusal, match="bad_words: 'ab' has no token"):
        core.build_request(spec, lambda text: [])
    request = core.build_request(spec, spell)
    core.submit(request)
    finish(core)
    assert request.completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"min_tokens": -1}, "min_tokens: -1 is not allowed"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token id {VOCAB} is out of vocabulary"),
        ({"logit_bias": {3: 101.0}}, "logit_bias: 101.0 of token 3 is not allowed; it must be -100 to 100"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias: nan of token 3"),
        ({"bad_words": ("",)}, "bad_words: a text has 0 characters"),
        ({"bad_words": tuple(map(str, range(65)))}, "bad_words: 65 texts are too many"),
    ],
)
def test_a_setting_out_of_range_is_refused(sampling, words):
    assert words in (build_core().refusal_reason(ask("a", [3], **sampling)) or "")


def test_the_wire_carries_every_setting_both_ways():
    spec = ask(
        "a", [3, 4], stop=("</s>", "x"), stop_token_ids=(7, 8), min_tokens=3, logit_bias={5: -2.5},
        bad_words=("ab", "c"), ignore_eos=False,
    )  # fmt: skip
    body = encode_generate(spec)
    assert decode_generate(body)[0].sampling == spec.sampling
    assert b'"skip_special_tokens":false' in body, "stop texts may be the texts of special tokens"
    with pytest.raises(Refusal, match="logit_bias: 'a' is not a token id"):
        decode_generate(b'{"token_ids":[1],"sampling_params":{"logit_bias":{"a":1}}}')
