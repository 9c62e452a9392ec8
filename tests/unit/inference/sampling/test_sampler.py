from importlib import import_module

import numpy as np
import pytest
import torch
from sampling_cases import SETTINGS, build_rows, slow_distribution

from stretto.inference.embedded import sampler
from stretto.inference.embedded.sampler import PromptScores, SamplingRows, stream_key, uniforms
from stretto.records.generate import GenerateRequest


@pytest.fixture(params=["kernels", "torch"])
def sample(request):
    """`sample` by kernels for a CPU, and in torch's operations."""
    if request.param == "torch":
        return sampler.sample
    library = pytest.importorskip("stretto_native.library").find_library()
    if library is None:
        pytest.skip("needs a C compiler")
    kernels = import_module("stretto_native.kernels").Kernels(library)
    return lambda logits, rows, u, supports=None: sampler.sample(logits, rows, u, supports, kernels)


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_processed_distribution(setting, sample):
    vocab, draws = 24, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    u = uniforms(np.full(draws, stream_key(3, 0), np.uint64), np.arange(draws))
    tokens, logprobs = sample(logits.repeat(draws, 1), build_rows(draws, **setting), u)
    expected = np.array(slow_distribution(logits.tolist(), **setting))
    assert (expected[tokens] > 0).all()
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=2e-6)
    frequency = np.bincount(tokens, minlength=vocab) / draws
    assert np.abs(frequency - expected).max() < 0.015


def test_greedy_takes_the_likeliest_with_its_unscaled_logprob(sample):
    logits = torch.randn(32, 50)
    reference = torch.log_softmax(logits, -1)
    tokens, logprobs = sample(logits.clone(), build_rows(32, temperature=0), np.full(32, 0.9999))
    assert (tokens == logits.argmax(-1).numpy()).all()
    np.testing.assert_allclose(logprobs, reference.max(-1).values.numpy(), atol=1e-6)


def test_rows_with_different_settings_do_not_see_each_other(sample):
    logits = torch.randn(len(SETTINGS) * 10, 40)
    rows = [build_rows(1, **SETTINGS[i % len(SETTINGS)]) for i in range(len(logits))]
    merged = SamplingRows(
        *(np.concatenate([getattr(r, name) for r in rows]) for name in SamplingRows.__dataclass_fields__)
    )
    u = uniforms(np.full(len(logits), stream_key(0, 0), np.uint64), np.arange(len(logits)))
    together = sample(logits.clone(), merged, u)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), row, u[i : i + 1])
        assert together[0][i] == alone[0][0]
        assert together[1][i].tobytes() == alone[1][0].tobytes()


def test_extreme_uniforms_never_pick_an_impossible_token(sample):
    logits = torch.full((4, 8), -torch.inf)
    logits[:, 3] = 0.0
    tokens, logprobs = sample(logits, build_rows(4), np.array([0.0, 0.5, 1 - 2**-53, 2**-53]))
    assert (tokens == 3).all()
    assert (logprobs == 0).all()


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_logit_that_is_no_number_shows_in_the_logprob_of_its_row(sample, at, value):
    logits = torch.zeros(2, 8)
    logits[1, at] = value
    _, logprobs = sample(logits, build_rows(2), np.array([0.9, 0.9]))
    assert np.isfinite(logprobs).tolist() == [True, False]


def test_uniforms_depend_on_seed_sample_and_position_only():
    keys = np.array([stream_key(seed, member) for seed in range(8) for member in range(8)], np.uint64)
    assert len(set(keys.tolist())) == 64
    positions = np.arange(64)
    together = uniforms(keys, positions)
    for i in range(64):
        assert uniforms(keys[i : i + 1], positions[i : i + 1])[0] == together[i]
    many = uniforms(np.full(100_000, keys[0]), np.arange(100_000))
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.01
    assert np.abs(np.histogram(many, 20)[0] / 5000 - 1).max() < 0.06


def test_huge_and_negative_seeds_are_keys_too():
    assert 0 <= stream_key(-1, 0) < 2**64
    assert stream_key(2**80 + 5, 1) == stream_key(5, 1)


def test_scores_of_a_prompt_are_those_of_the_unscaled_distribution():
    """Filled in two pieces: of every token but the first its own, of the likeliest, and of further targets."""
    prompt, logits = np.arange(7, dtype=np.int32), torch.randn(6, 11)
    targets = np.array([[3, -1]] * 6, np.int32)
    request = GenerateRequest(
        request_id="0", prompt_ids=prompt, prompt_logprobs=True, top_prompt_logprobs=2, prompt_targets=targets
    )
    scores = PromptScores(request)
    scores.fill(1, logits[:4], prompt[1:5])
    scores.fill(5, logits[4:], prompt[5:])
    expected = torch.log_softmax(logits, -1)
    np.testing.assert_allclose(scores.logprobs[1:], expected[torch.arange(6), torch.arange(1, 7)].numpy())
    best, ids = expected.topk(2)
    np.testing.assert_array_equal(scores.top_ids[1:], ids.numpy())
    np.testing.assert_allclose(scores.top_logprobs[1:], best.numpy())
    np.testing.assert_allclose(scores.target_logprobs[:, 0], expected[:, 3].numpy())
    assert np.isnan(scores.target_logprobs[:, 1]).all()
