"""Losses against a token-by-token reference in plain Python, hand-computed values, numerical gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stretto.algorithms import kl
from stretto.algorithms.losses import TokenCounts, TokenStreams, total_loss
from stretto.algorithms.policy_loss import NOISE, dppo_kl, ipo, ref_kl
from stretto.config.sections.algorithm import DefaultLoss, ReferenceKlSection

LOSS = DefaultLoss(dppo_mask_low=0.2, dppo_mask_high=0.15, adv_tau=0.7, kl_tau=0.01)


def reference(logprobs, s, counts, cfg):
    """The step's loss, one token after the other."""
    rl = ce = ref = 0.0
    for t, lp in enumerate(logprobs):
        q = s["behavior_logprobs"][t]
        ratio, moved = math.exp(lp - q), math.exp(lp) - math.exp(q)
        if s["rl_weights"][t] != 0:
            a = s["advantages"][t]
            drop = moved > cfg.dppo_mask_high if a > 0 else moved < -cfg.dppo_mask_low
            policy = 0.0 if drop else cfg.adv_tau * a * ratio
            squared = 0.0 if abs(lp - q) <= NOISE else (lp - q) ** 2
            rl += s["rl_weights"][t] * (cfg.kl_tau * squared - policy)
        if s["ce_weights"][t] != 0:
            ce -= s["ce_weights"][t] * lp
        if s["ref_kl_weights"][t] != 0:
            pull = 0.0 if moved < -0.2 else (s["ref_logprobs"][t] - lp) * ratio
            ref += s["ref_kl_weights"][t] * (1e-3 * (lp - q) ** 2 - pull)
    return rl / max(counts.rl, 1) + ce / max(counts.ce, 1) + ref / max(counts.ref_kl, 1)


def random_streams(seed, tokens=50):
    rng = np.random.default_rng(seed)
    sparse = lambda: rng.random(tokens) * (rng.random(tokens) < 0.6)
    logprobs = np.log(rng.random(tokens) * 0.98 + 0.01)
    return logprobs, {
        "is_sampled": rng.random(tokens) < 0.8,
        "behavior_logprobs": np.log(rng.random(tokens) * 0.98 + 0.01),
        "advantages": rng.choice([-1.5, 0.0, 0.3, 2.0], tokens),
        "rl_weights": sparse(),
        "ce_weights": sparse(),
        "ref_kl_weights": sparse(),
        "ref_logprobs": np.log(rng.random(tokens) * 0.98 + 0.01),
    }


def as_tensors(streams):
    return TokenStreams(**{k: torch.from_numpy(v) for k, v in streams.items()})


def counts_of(streams):
    return TokenCounts(*(float((streams[f"{c}_weights"] != 0).sum()) for c in ("rl", "ce", "ref_kl")))


@pytest.mark.parametrize("seed", range(5))
def test_total_loss_equals_the_token_by_token_reference(seed):
    logprobs, streams = random_streams(seed)
    counts = counts_of(streams)
    loss, _ = total_loss(torch.from_numpy(logprobs), as_tensors(streams), counts, LOSS)
    assert float(loss) == pytest.approx(reference(logprobs, streams, counts, LOSS), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_what_the_formula_says(seed):
    """A * r and 2 * kl_tau * log r for rl, -1 for ce, sg(pull) for ref_kl: no gradient through masks."""
    logprobs, s = random_streams(seed)
    lp = torch.from_numpy(logprobs).requires_grad_()
    counts = counts_of(s)
    loss, _ = total_loss(lp, as_tensors(s), counts, LOSS)
    loss.backward()
    for t in range(len(logprobs)):
        q, a = s["behavior_logprobs"][t], s["advantages"][t]
        log_ratio, moved = logprobs[t] - q, math.exp(logprobs[t]) - math.exp(q)
        drop = moved > LOSS.dppo_mask_high if a > 0 else moved < -LOSS.dppo_mask_low
        rl = 2 * LOSS.kl_tau * log_ratio * (abs(log_ratio) > NOISE) - (
            0 if drop else LOSS.adv_tau * a * math.exp(log_ratio)
        )
        pull = 0 if moved < -0.2 else (s["ref_logprobs"][t] - logprobs[t]) * math.exp(log_ratio)
        ref = 2e-3 * log_ratio - pull
        expected = (
            s["rl_weights"][t] * rl / counts.rl
            - s["ce_weights"][t] / counts.ce
            + s["ref_kl_weights"][t] * ref / counts.ref_kl
        )
        assert float(lp.grad[t]) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("loss", [dppo_kl, ipo], ids=["default", "ipo"])
def test_a_log_ratio_that_is_rounding_has_no_squared_term(loss):
    q = torch.log(torch.tensor([0.3, 0.3, 0.3, 0.3]))
    lp = (q + torch.tensor([1e-7, -9e-4, 2e-3, -0.5])).requires_grad_()
    bounds = {"threshold": 0.9} if loss is ipo else {"mask_low": 0.9, "mask_high": 0.9}
    loss(lp, q, torch.zeros(4), kl_tau=0.5, **bounds).loss.sum().backward()
    assert lp.grad[:2].tolist() == [0, 0]
    assert lp.grad[2:].tolist() == pytest.approx([2e-3, -0.5], rel=1e-3)


def test_policy_gradient_agrees_with_finite_differences_in_float64():
    lp = torch.log(torch.tensor([0.3, 0.5, 0.22, 0.6], dtype=torch.float64)).requires_grad_()
    q = torch.log(torch.tensor([0.35, 0.42, 0.3, 0.55], dtype=torch.float64))
    a = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    f = lambda x: dppo_kl(x, q, a, mask_low=0.2, mask_high=0.2).loss.sum()
    assert torch.autograd.gradcheck(f, lp)


def test_hand_computed_tokens():
    """p = .5, q = .25: r = 2, moved .25. p = .25, q = .5: r = .5, moved -.25."""
    lp = torch.tensor([0.5, 0.5, 0.25, 0.25]).log()
    q = torch.tensor([0.25, 0.25, 0.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    out = dppo_kl(lp, q, advantages, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=0.5)
    kl_term = 0.5 * math.log(2) ** 2
    # Risen with positive advantage and fallen with negative one are dropped; the others are pushed by A * r.
    torch.testing.assert_close(out.loss, torch.tensor([kl_term, 2 + kl_term, -0.5 + kl_term, kl_term]))
    assert out.is_dropped_high.tolist() == [True, False, False, False]
    assert out.is_dropped_low.tolist() == [False, False, False, True]


def test_ref_kl_pulls_towards_the_reference_and_drops_only_what_fell():
    lp = torch.tensor([0.5, 0.25]).log().requires_grad_()
    q = torch.tensor([0.25, 0.5]).log()
    out = ref_kl(lp, q, torch.tensor([0.9, 0.9]).log())
    out.loss.sum().backward()
    assert out.is_dropped_low.tolist() == [False, True]
    assert lp.grad[0] < 0 and float(lp.grad[1]) == pytest.approx(-2e-3 * math.log(2))


def test_weights_scale_the_numerator_only():
    logprobs, streams = random_streams(1)
    counts = counts_of(streams)
    double = {k: 2 * v if k.endswith("_weights") else v for k, v in streams.items()}
    once, _ = total_loss(torch.from_numpy(logprobs), as_tensors(streams), counts, LOSS)
    twice, _ = total_loss(torch.from_numpy(logprobs), as_tensors(double), counts_of(double), LOSS)
    assert float(twice) == pytest.approx(2 * float(once))


def test_absent_components_cost_nothing_and_their_counts_do_not_divide_by_zero():
    logprobs, streams = random_streams(2)
    bare = {k: v for k, v in streams.items() if k in ("is_sampled", "behavior_logprobs", "advantages")}
    loss, sums = total_loss(torch.from_numpy(logprobs), as_tensors(bare), TokenCounts(0, 0, 0), LOSS)
    assert float(loss) == 0 and "nll" not in sums and float(sums["sampled_tokens"]) == bare["is_sampled"].sum()


def test_metric_sums_count_members_and_sampled_tokens_only():
    logprobs, s = random_streams(3)
    _, sums = total_loss(torch.from_numpy(logprobs), as_tensors(s), counts_of(s), LOSS)
    log_ratio = (logprobs - s["behavior_logprobs"])[s["is_sampled"]]
    mismatch = np.exp(log_ratio) - 1 - log_ratio
    assert float(sums["mismatch_kl"]) == pytest.approx(mismatch.sum())
    assert float(sums["max/mismatch_kl"]) == pytest.approx(mismatch.max())
    moved = np.exp(logprobs) - np.exp(s["behavior_logprobs"])
    member = s["rl_weights"] != 0
    assert float(sums["is_masked_high"]) == ((s["advantages"] > 0) & (moved > 0.15) & member).sum()
    assert float(sums["is_masked_low"]) == ((s["advantages"] <= 0) & (moved < -0.2) & member).sum()
    assert float(sums["nll"]) == pytest.approx(-logprobs[s["ce_weights"] != 0].sum())


def test_estimators_agree_with_their_definitions():
    log_ratio = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(kl.k1(log_ratio), -log_ratio)
    torch.testing.assert_close(kl.k2(log_ratio), log_ratio**2 / 2)
    torch.testing.assert_close(kl.k3(log_ratio), log_ratio.exp() - 1 - log_ratio)


def test_estimators_are_unbiased_on_average():
    """E_q[k1] = E_q[k3] = KL(q || p); k2 is close for near distributions."""
    q, p = torch.tensor([[0.5, 0.3, 0.2], [0.45, 0.35, 0.2]], dtype=torch.float64)
    exact = float((q * (q / p).log()).sum())
    mean = {f: float((q * f((p / q).log())).sum()) for f in (kl.k1, kl.k2, kl.k3)}
    assert mean[kl.k1] == pytest.approx(exact) == pytest.approx(mean[kl.k3])
    assert mean[kl.k2] == pytest.approx(exact, rel=0.1)


LOGITS = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.3, 0.1, 0.2], dtype=torch.float64).log()
SAMPLER = torch.tensor([0.25, 0.25, 0.3, 0.2], dtype=torch.float64).log()


def reference_kl(logprobs, sampler, estimator, is_unbiased):
    return kl.reference_kl(logprobs, sampler, REFERENCE, estimator=estimator, is_unbiased=is_unbiased)


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var"])
def test_the_unbiased_reference_kl_has_value_and_gradient_of_the_divergence_whoever_sampled(estimator):
    def exact(logits):
        p = logits.softmax(0)
        return (p * (p.log() - REFERENCE)).sum()

    def estimated(logits):
        values = reference_kl(logits.log_softmax(0), SAMPLER, estimator, True)
        return (SAMPLER.exp() * values).sum()

    (value, slope), (mean, gradient) = (
        (f(LOGITS), torch.autograd.functional.jacobian(f, LOGITS)) for f in (exact, estimated)
    )
    torch.testing.assert_close(mean, value)
    torch.testing.assert_close(gradient, slope)
    assert torch.autograd.gradcheck(estimated, LOGITS.clone().requires_grad_())


def test_on_policy_k2_has_the_divergences_gradient_and_k1_none():
    gradients = {}
    for estimator in ("k1", "k2"):
        x = LOGITS.clone().requires_grad_()
        logprobs = x.log_softmax(0)
        weights = logprobs.exp().detach()
        (weights * reference_kl(logprobs, logprobs.detach(), estimator, False)).sum().backward()
        gradients[estimator] = x.grad
    p = LOGITS.softmax(0)
    exact = torch.autograd.functional.jacobian(lambda x: (x.softmax(0) * (x.log_softmax(0) - REFERENCE)).sum(), LOGITS)
    torch.testing.assert_close(gradients["k2"], exact)
    torch.testing.assert_close(gradients["k1"], torch.zeros_like(p), atol=1e-12, rtol=0)


def test_hand_computed_reference_kl():
    """lp - ref = log 2: k1 = .693, k2 = .240, k3 = 1/2 - 1 + log 2; twice that where p = 2 q."""
    lp, ref, q = (torch.tensor([x]).log() for x in (0.5, 0.25, 0.25))
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}
    for name, value in expected.items():
        for is_unbiased in (False, True):
            ours = kl.reference_kl(lp, q, ref, estimator=name, is_unbiased=is_unbiased)
            assert float(ours) == pytest.approx(value * (1 + is_unbiased), rel=1e-6)
    far = kl.reference_kl(lp - 9, q, ref, estimator="low_var", is_unbiased=False)
    assert float(far) == 10


def test_entropy_bonus_and_reference_kl_are_reduced_like_the_loss():
    logprobs, s = random_streams(4)
    rng = np.random.default_rng(0)
    entropy, ref = rng.random(50), np.log(rng.random(50) * 0.9 + 0.05)
    counts = counts_of(s)
    extra = LOSS.model_copy(update={"entropy_coef": 0.3, "reference_kl": ReferenceKlSection(coef=0.2, estimator="k2")})
    plain, _ = total_loss(torch.from_numpy(logprobs), as_tensors(s), counts, LOSS)
    loss, sums = total_loss(
        torch.from_numpy(logprobs),
        as_tensors(s),
        counts,
        extra,
        entropy=torch.from_numpy(entropy),
        reference_logprobs=torch.from_numpy(ref),
    )
    added = sum(s["rl_weights"][t] * (0.2 * (logprobs[t] - ref[t]) ** 2 / 2 - 0.3 * entropy[t]) for t in range(50))
    assert float(loss - plain) == pytest.approx(added / counts.rl, rel=1e-9)
    log_ratio = (ref - logprobs)[s["rl_weights"] != 0]
    assert float(sums["rl/reference_kl"]) == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).sum())


def test_a_tiny_mismatch_is_not_rounded_away():
    log_ratio = torch.tensor([1e-3], dtype=torch.float32)
    assert float(kl.k3(log_ratio)) == pytest.approx(5e-7, rel=0.2)
