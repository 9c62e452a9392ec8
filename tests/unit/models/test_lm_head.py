"""The fused head equals log_softmax over the whole logits, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.models import lm_head
from stretto.models.lm_head import head_logits, token_logprobs

TOKENS, DIM, VOCAB = 37, 16, 29


def naive(hidden, weight, targets, temperatures):
    """Every logit at once."""
    logits = (hidden @ weight.T).float() / temperatures[:, None]
    logprobs = F.log_softmax(logits, dim=-1)
    found = logprobs.gather(1, targets.view(TOKENS, -1)).view_as(targets)
    return found, -(logprobs.exp() * logprobs).sum(-1)


def case(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    temperatures = torch.rand(TOKENS, generator=generator) + 0.5
    return hidden, weight, targets, temperatures


@pytest.fixture(params=[True, False], ids=["kept", "recomputed"])
def keeps_probabilities(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(lm_head, "MAX_SAVED_LOGITS", 0)


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
def test_fused_equals_naive_with_gradients(keeps_probabilities, chunk):
    hidden, weight, targets, temperatures = case()
    probe = torch.linspace(-1, 2, TOKENS)
    results = []
    for logprobs, entropy in (
        token_logprobs(hidden, weight, targets, temperatures, chunk),
        naive(hidden, weight, targets, temperatures),
    ):
        grads = torch.autograd.grad((logprobs * probe).sum(), (hidden, weight))
        results.append((logprobs, entropy, *grads))
    for fused, slow in zip(*results):
        torch.testing.assert_close(fused, slow, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [5, 64])
def test_several_targets_of_a_token_equal_the_naive_ones_with_gradients(keeps_probabilities, chunk):
    hidden, weight, _, temperatures = case()
    targets = torch.randint(0, VOCAB, (TOKENS, 4), generator=torch.Generator().manual_seed(1))
    targets[:, 3] = targets[:, 1]  # the same token twice
    probe = torch.linspace(-1, 2, TOKENS * 4).view(TOKENS, 4)
    results = []
    for logprobs, entropy in (
        token_logprobs(hidden, weight, targets, temperatures, chunk, entropy_grad=True),
        naive(hidden, weight, targets, temperatures),
    ):
        grads = torch.autograd.grad((logprobs * probe).sum() + entropy.sum(), (hidden, weight))
        results.append((logprobs, entropy, *grads))
    for fused, slow in zip(*results):
        torch.testing.assert_close(fused, slow, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [5, 64])
def test_entropy_has_the_gradient_of_the_naive_one_where_asked_for(keeps_probabilities, chunk):
    hidden, weight, targets, temperatures = case()
    probes = torch.linspace(-1, 2, TOKENS), torch.linspace(3, -2, TOKENS)
    results = []
    for logprobs, entropy in (
        token_logprobs(hidden, weight, targets, temperatures, chunk, entropy_grad=True),
        naive(hidden, weight, targets, temperatures),
    ):
        value = (logprobs * probes[0]).sum() + (entropy * probes[1]).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(value, (hidden, weight))))
    for fused, slow in zip(*results):
        torch.testing.assert_close(fused, slow, atol=4e-5, rtol=1e-5)


def test_the_entropy_of_a_sure_token_has_a_finite_gradient():
    hidden, weight, targets, temperatures = case()
    _, entropy = token_logprobs(hidden * 1e3, weight, targets, temperatures, 8, entropy_grad=True)
    grads = torch.autograd.grad(entropy.sum(), (hidden, weight))
    assert all(torch.isfinite(g).all() for g in grads)


def test_entropy_has_no_gradient():
    logprobs, entropy = token_logprobs(*case(), 8)
    assert logprobs.requires_grad and not entropy.requires_grad


def test_bfloat16_logits_are_not_rounded(keeps_probabilities):
    """Against float32 on the same (rounded) operands: only the gradients are bfloat16."""
    hidden, weight, targets, temperatures = case(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures, 8)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected, expected_entropy = naive(*exact, targets, temperatures)
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=2e-5, rtol=1e-5)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    for ours, reference in zip(grads, torch.autograd.grad(expected.sum(), exact)):
        assert ours.dtype is torch.bfloat16
        assert (ours.float() - reference).abs().max() < 0.02 * reference.abs().max()


def test_a_frozen_head_costs_no_gradient():
    hidden, weight, targets, temperatures = case()
    logprobs, _ = token_logprobs(hidden, weight.detach(), targets, temperatures, 8)
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].shape == hidden.shape


def test_extreme_logits_stay_finite():
    hidden, weight, targets, temperatures = case()
    logprobs, entropy = token_logprobs(hidden * 1e4, weight, targets, temperatures, 8)
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all()


def test_no_tokens_give_no_logprobs():
    hidden, weight, targets, temperatures = case()
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0], temperatures[:0], 8)
    assert len(logprobs) == len(entropy) == 0
    logprobs.sum().backward()


def test_logits_are_float32_for_every_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, *_ = case(dtype)
        assert head_logits(hidden, weight).dtype is torch.float32


@pytest.mark.parametrize("vocab", [1, VOCAB, 1300])
def test_bfloat16_logits_and_their_gradients_are_those_of_float32_rounded_once(vocab):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(rows, DIM, generator=generator).bfloat16().requires_grad_() for rows in (TOKENS, vocab)
    )
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    logits, expected = head_logits(hidden, weight), exact[0] @ exact[1].T
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    probe = torch.randn(TOKENS, vocab, generator=generator)
    grads = torch.autograd.grad((logits * probe).sum(), (hidden, weight))
    for ours, reference in zip(grads, torch.autograd.grad((expected * probe).sum(), exact)):
        assert ours.dtype is torch.bfloat16
        assert (ours.float() - reference).abs().max() < 0.02 * reference.abs().max()


def test_a_soft_cap_has_the_gradients_of_autograd():
    hidden, weight, targets, temperatures = case()
    hidden, weight = (each.detach().requires_grad_() for each in (hidden, weight))
    cap = 0.7
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures, 8, entropy_grad=True, cap=cap)
    factors = torch.linspace(-1, 1, len(targets))
    found = torch.autograd.grad((logprobs * factors + entropy).sum(), (hidden, weight))
    logits = torch.tanh(hidden @ weight.T / cap) * cap / temperatures[:, None]
    normalised = logits.log_softmax(-1)
    plain = normalised.gather(1, targets[:, None])[:, 0]
    spread = -(normalised.exp() * normalised).sum(-1)
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(entropy, spread)
    expected = torch.autograd.grad((plain * factors + spread).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
