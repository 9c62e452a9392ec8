"""Every policy loss against the paper's formula, one token after the other, by hand, and by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stretto.algorithms import policy_loss
from stretto.algorithms.losses import POLICY_LOSSES, TokenCounts, TokenStreams, needs_samples, total_loss
from stretto.algorithms.policy_loss import AlternativeTokens, alternatives_kl
from stretto.algorithms.sample_index import SampleIndex
from stretto.config.sections import algorithm
from stretto.config.sections.algorithm import CispoLoss, DefaultLoss, GspoLoss, IpoLoss, PpoLoss, ReinforceLoss

CONFIGS = [
    DefaultLoss(dppo_mask_high=0.1),
    IpoLoss(adv_tau=0.7, kl_tau=0.02),
    PpoLoss(clip_high=0.3),
    PpoLoss(clip_low=0.1, clip_dual=2.0),
    ReinforceLoss(),
    GspoLoss(clip_low=0.1, clip_high=0.05),
    CispoLoss(clip_high=0.5),
    CispoLoss(clip_low=0.3, clip_high=1.0),
]
NAMES = [f"{c.type}{i}" for i, c in enumerate(CONFIGS)]


def clip(x, low, high):
    return min(max(x, low), high)


def paper(cfg, lp, q, advantage, sample_log_ratios):
    """The loss of one token as the papers write it."""
    r, moved = math.exp(lp - q), math.exp(lp) - math.exp(q)
    if cfg.type in ("default", "ipo"):
        if cfg.type == "ipo":
            drop = abs(moved) > cfg.ipo_threshold
        else:
            drop = moved > cfg.dppo_mask_high if advantage > 0 else moved < -cfg.dppo_mask_low
        return cfg.kl_tau * (lp - q) ** 2 - (0 if drop else cfg.adv_tau * advantage * r)
    if cfg.type == "reinforce":
        return -advantage * lp
    if cfg.type == "cispo":
        low = -math.inf if cfg.clip_low is None else 1 - cfg.clip_low
        return -clip(r, low, 1 + cfg.clip_high) * advantage * lp
    if cfg.type == "gspo":
        r = math.exp(sum(sample_log_ratios) / len(sample_log_ratios))
    loss = max(-r * advantage, -clip(r, 1 - cfg.clip_low, 1 + cfg.clip_high) * advantage)
    if getattr(cfg, "clip_dual", None) is not None and advantage < 0:
        loss = min(-cfg.clip_dual * advantage, loss)
    return loss


def batch(seed, lengths=(3, 0, 1, 6, 2, 0)):
    """Tokens of several samples; some tokens and one whole sample are no members."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    samples = np.repeat(np.arange(len(lengths)), lengths)
    weights = np.where(rng.random(tokens) < 0.7, rng.random(tokens) + 0.1, 0.0)
    weights[samples == 2] = 0.0
    weights[0] = 0.5
    q = np.log(rng.random(tokens) * 0.8 + 0.1)
    lp = np.minimum(q + rng.normal(0, 0.4, tokens), -0.01)
    return (
        lp,
        samples,
        TokenStreams(
            is_sampled=torch.ones(tokens, dtype=torch.bool),
            behavior_logprobs=torch.from_numpy(q),
            advantages=torch.from_numpy(rng.choice([-1.5, 0.0, 0.3, 2.0], tokens)),
            rl_weights=torch.from_numpy(weights),
            sample_index=SampleIndex.of(torch.tensor(lengths)),
        ),
    )


def counts_of(samples, *streams):
    rl = sum(int((s.rl_weights != 0).sum()) for s in streams)
    return TokenCounts(rl, 0, 0, sum(len(set(k[s.rl_weights.numpy() != 0])) for k, s in zip(samples, streams)))


def slow(cfg, lp, samples, streams):
    """The step's loss, sample by sample, token by token."""
    q, a, w = (x.tolist() for x in (streams.behavior_logprobs, streams.advantages, streams.rl_weights))
    sums, lengths = [], []
    for sample in sorted(set(samples)):
        members = [t for t in range(len(lp)) if samples[t] == sample and w[t] != 0]
        if members:
            log_ratios = [lp[t] - q[t] for t in members]
            sums.append(sum(w[t] * paper(cfg, lp[t], q[t], a[t], log_ratios) for t in members))
            lengths.append(len(members))
    if cfg.reduction == "token":
        return sum(sums) / sum(lengths)
    if cfg.reduction == "sample":
        return sum(s / n for s, n in zip(sums, lengths)) / len(sums)
    return sum(sums) / (cfg.reduction_tokens * len(sums))


@pytest.mark.parametrize("reduction", ["token", "sample", "constant"])
@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
def test_loss_equals_the_papers_formula_token_by_token(cfg, reduction):
    cfg = cfg.model_copy(update={"reduction": reduction, "reduction_tokens": 7})
    for seed in range(4):
        lp, samples, streams = batch(seed)
        loss, _ = total_loss(torch.from_numpy(lp), streams, counts_of([samples], streams), cfg)
        assert float(loss) == pytest.approx(slow(cfg, lp, samples, streams), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(cfg):
    cfg = cfg.model_copy(update={"reduction": "sample"})
    parts = [batch(5, (3, 4)), batch(6, (2, 0, 6)), batch(7, (1,))]
    counts = counts_of([samples for _, samples, _ in parts], *(s for _, _, s in parts))
    apart, gradients = 0.0, []
    for lp, _, streams in parts:
        x = torch.from_numpy(lp).requires_grad_()
        loss, _ = total_loss(x, streams, counts, cfg)
        loss.backward()
        apart += float(loss.detach())
        gradients.append(x.grad)
    x = torch.from_numpy(np.concatenate([lp for lp, _, _ in parts])).requires_grad_()
    names = ("is_sampled", "behavior_logprobs", "advantages", "rl_weights")
    joined = {n: torch.cat([getattr(s, n) for _, _, s in parts]) for n in names}
    lengths = torch.cat([s.sample_index.lengths for _, _, s in parts])
    loss, _ = total_loss(x, TokenStreams(**joined, sample_index=SampleIndex.of(lengths)), counts, cfg)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(apart, rel=1e-9)
    torch.testing.assert_close(x.grad, torch.cat(gradients))


@pytest.mark.parametrize("cfg", [c for c in CONFIGS if c.type != "cispo"], ids=lambda c: c.type)
def test_gradient_agrees_with_finite_differences_in_float64(cfg):
    lp, samples, streams = batch(3)
    counts = counts_of([samples], streams)
    f = lambda x: total_loss(x, streams, counts, cfg)[0]
    assert torch.autograd.gradcheck(f, torch.from_numpy(lp).requires_grad_())


def test_the_gradient_of_cispo_is_the_bounded_ratio_times_advantage():
    lp, _, streams = batch(3)
    x = torch.from_numpy(lp).requires_grad_()
    out = policy_loss.cispo(x, streams.behavior_logprobs, streams.advantages, clip_low=None, clip_high=0.2)
    out.loss.sum().backward()
    ratio = np.exp(lp - streams.behavior_logprobs.numpy())
    np.testing.assert_allclose(x.grad, -np.minimum(ratio, 1.2) * streams.advantages.numpy(), rtol=1e-12)
    assert (out.is_dropped_high.numpy() == (ratio > 1.2)).all() and not out.is_dropped_low.any()


def test_hand_computed_ppo():
    """r = 2, 2, 1/2, 1/2, 4: bounded at 1.5 up, 0.75 down, and at 3 by the dual clip."""
    lp = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.8]).log().requires_grad_()
    q = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.2]).log()
    a = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    out = policy_loss.ppo(lp, q, a, clip_low=0.25, clip_high=0.5, clip_dual=3.0)
    torch.testing.assert_close(out.loss, torch.tensor([-1.5, 2.0, -0.5, 0.75, 3.0]))
    assert out.is_dropped_high.tolist() == [True, False, False, False, True]
    assert out.is_dropped_low.tolist() == [False, False, False, True, False]
    out.loss.sum().backward()
    torch.testing.assert_close(lp.grad, torch.tensor([0.0, 2.0, -0.5, 0.0, 0.0]))


def test_hand_computed_gspo_pushes_a_sample_as_one():
    """Ratios 2 and 1/2 make 1: neither token is bounded; 2 and 2 make 2, which is."""
    lp = torch.tensor([0.5, 0.25, 0.5, 0.5]).log()
    q = torch.tensor([0.25, 0.5, 0.25, 0.25]).log()
    index, ones = SampleIndex.of(torch.tensor([2, 2])), torch.ones(4)
    out = policy_loss.gspo(lp, q, ones, index, ones.bool(), clip_low=0.5, clip_high=0.5)
    torch.testing.assert_close(out.loss, torch.tensor([-1.0, -1.0, -1.5, -1.5]))
    assert out.is_dropped_high.tolist() == [False, False, True, True]


def test_all_ratio_losses_have_the_policy_gradient_where_trainer_and_sampler_agree():
    lp, _, streams = batch(9, (4, 3))
    streams = replace(streams, behavior_logprobs=torch.from_numpy(lp), rl_weights=torch.ones(7))
    # One advantage per sample, as every estimator gives it: then gspo's gradient is that of the others too.
    streams = replace(streams, advantages=torch.tensor([1.0, 1, 1, 1, -2, -2, -2], dtype=torch.float64))
    expected = None
    for cfg in CONFIGS:
        x = torch.from_numpy(lp).requires_grad_()
        cfg = cfg.model_copy(update={"reduction": "token", "adv_tau": 1.0})
        total_loss(x, streams, TokenCounts(7, 0, 0, 2), cfg)[0].backward()
        expected = x.grad if expected is None else expected
        torch.testing.assert_close(x.grad, expected, msg=cfg.type)


def test_far_off_policy_tokens_give_finite_losses():
    lp, q = torch.tensor([-1.0, -400.0]), torch.tensor([-400.0, -1.0])
    for a in (-1.0, 0.0, 1.0):
        streams = TokenStreams(
            is_sampled=torch.ones(2, dtype=torch.bool),
            behavior_logprobs=q,
            advantages=torch.full((2,), a),
            rl_weights=torch.ones(2),
            sample_index=SampleIndex.of(torch.tensor([1, 1])),
        )
        for cfg in CONFIGS[2:]:
            x = lp.clone().requires_grad_()
            loss, _ = total_loss(x, streams, TokenCounts(2, 0, 0, 2), cfg)
            loss.backward()
            assert torch.isfinite(loss) and torch.isfinite(x.grad).all(), cfg


def test_every_configured_loss_has_a_function_and_knows_whether_it_needs_samples():
    union = get_args(algorithm.Loss)[0]
    assert {cls.model_fields["type"].default for cls in get_args(union)} == {*POLICY_LOSSES, "custom"}
    assert needs_samples(GspoLoss(reduction="token")) and needs_samples(PpoLoss(reduction="sample"))
    assert not needs_samples(DefaultLoss()) and not needs_samples(PpoLoss(reduction="constant"))


def test_a_sample_index_sums_means_and_spread():
    s = SampleIndex.of(torch.tensor([2, 0, 1]))
    values = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert s.sum(values).tolist() == [3, 0, 5] and s.spread(torch.tensor([7.0, 8, 9])).tolist() == [7, 7, 9]
    assert s.mean(values, torch.tensor([False, True, False])).tolist() == [2, 0, 0]


EXTREME = [(-5.0, -100.0), (-0.5, -100.0), (-1e-6, -9999.0), (-100.0, -1e-6), (-9999.0, -9999.0)]


@pytest.mark.parametrize(
    "cfg", [DefaultLoss(kl_tau=0), IpoLoss(kl_tau=0), *CONFIGS[2:]], ids=["default", "ipo", *NAMES[2:]]
)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_ratios_are_finite_and_drop_or_zero_means_zero(cfg, advantage):
    pairs = torch.tensor(EXTREME)
    logprobs, q = pairs[:, 0].clone().requires_grad_(), pairs[:, 1]
    ones = torch.ones(len(pairs))
    streams = TokenStreams(
        is_sampled=ones.bool(), behavior_logprobs=q, advantages=advantage * ones, rl_weights=ones,
        sample_index=SampleIndex.of(torch.ones(len(pairs), dtype=torch.int64)),
    )  # fmt: skip
    loss, sums = total_loss(logprobs, streams, TokenCounts(len(pairs), 0, 0, len(pairs)), cfg)
    policy = POLICY_LOSSES[cfg.type](logprobs, streams, cfg)
    (grad,) = torch.autograd.grad(loss, logprobs)
    found = [loss, policy.loss, grad, *sums.values()]
    assert all(torch.isfinite(x).all() for x in found)
    is_zero = torch.full_like(q, advantage == 0).bool()
    if cfg.type in ("default", "ipo"):
        is_zero |= policy.is_dropped_low | policy.is_dropped_high
    assert not policy.loss[is_zero].any() and not grad[is_zero].any()


def test_distillation_with_extreme_ratios_is_finite_and_drops_are_held_by_the_squared_ratio_alone():
    pairs = torch.tensor(EXTREME)
    logprobs, q = pairs[:, 0].clone().requires_grad_(), pairs[:, 1]
    policy = policy_loss.ref_kl(logprobs, q, torch.full_like(q, -3.0))
    (grad,) = torch.autograd.grad(policy.loss.sum(), logprobs)
    assert torch.isfinite(policy.loss).all() and torch.isfinite(grad).all()
    assert policy.is_dropped_low.tolist() == [False, False, False, True, False]
    log_ratio = (logprobs - q).detach()
    assert policy.loss[3] == policy_loss.REF_KL_TAU * log_ratio[3].square()
    assert grad[3] == 2 * policy_loss.REF_KL_TAU * log_ratio[3]


# -- distillation on several tokens of a position --


def teachers_of(seed, tokens=12, vocab=9, num_teachers=2, most=3):
    """Log-probabilities of a policy over a small vocabulary, and alternatives of teachers, as tensors of float64."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, vocab)) * 2
    ids = np.stack([[rng.permutation(vocab)[:most] for _ in range(num_teachers)] for _ in range(tokens)])
    every = F.log_softmax(torch.from_numpy(rng.normal(size=(tokens, num_teachers, vocab)) * 2), -1)
    logprobs = every.gather(2, torch.from_numpy(ids))
    ids[:, :, -1][rng.random((tokens, num_teachers)) < 0.4] = -1
    weights = torch.from_numpy(rng.dirichlet(np.ones(num_teachers), tokens))
    is_forward = torch.from_numpy(rng.random(tokens) < 0.5)
    return torch.from_numpy(logits), AlternativeTokens(torch.from_numpy(ids), logprobs, weights, is_forward)


def of_ids(logits, teachers):
    return F.log_softmax(logits, -1).gather(1, teachers.ids.flatten(1).clamp(min=0))


def slow_divergence(log_p, teachers, t):
    """One position: probabilities of a teacher's tokens and of one more token that is all others."""
    total = 0.0
    for teacher, weight in enumerate(teachers.weights[t].tolist()):
        pairs = [
            (math.exp(log_p[token]), math.exp(teachers.logprobs[t, teacher, column]))
            for column, token in enumerate(teachers.ids[t, teacher].tolist())
            if token >= 0
        ]
        rest = [1 - sum(each) for each in zip(*pairs)]
        pairs.append((rest[0], rest[1]))
        if teachers.is_forward[t]:
            pairs = [(theirs, ours) for ours, theirs in pairs]
        total += weight * sum(a * math.log(a / b) for a, b in pairs)
    return total


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(20))
def test_the_divergence_to_teachers_is_that_over_their_tokens_and_the_rest(seed):
    logits, teachers = teachers_of(seed)
    found = alternatives_kl(of_ids(logits, teachers), teachers)
    log_p = F.log_softmax(logits, -1)
    expected = [slow_divergence(log_p[t].tolist(), teachers, t) for t in range(len(log_p))]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert min(found.tolist()) > 0
    assert torch.autograd.gradcheck(
        lambda x: alternatives_kl(of_ids(x, teachers), teachers), logits.requires_grad_(), atol=1e-6
    )


@pytest.mark.parametrize("is_forward", [False, True])
def test_the_divergence_over_all_tokens_is_the_whole_one_and_nothing_at_the_teacher(is_forward):
    ours, theirs = (F.log_softmax(torch.randn(5, 7, dtype=torch.float64), -1) for _ in range(2))
    teachers = AlternativeTokens(
        torch.arange(6).expand(5, 1, 6), theirs[:, None, :6], torch.ones(5, 1), torch.full((5,), is_forward)
    )
    first, second = (theirs, ours) if is_forward else (ours, theirs)
    whole = (first.exp() * (first - second)).sum(-1)
    torch.testing.assert_close(alternatives_kl(ours[:, :6], teachers), whole)
    at_teacher = theirs[:, :6].clone().requires_grad_()
    loss = alternatives_kl(at_teacher, teachers)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    assert float(at_teacher.grad.abs().max()) < 1e-9


@pytest.mark.parametrize("is_forward", [False, True])
def test_a_divergence_that_is_rounding_has_no_gradient(is_forward):
    theirs = F.log_softmax(torch.randn(2, 7, dtype=torch.float64), -1)[:, :3]
    teachers = AlternativeTokens(
        torch.tensor([0, 1, -1]).expand(2, 1, 3), theirs[:, None], torch.ones(2, 1), torch.full((2,), is_forward)
    )
    ours = (theirs + torch.tensor([[9e-4, -9e-4, 5.0], [9e-4, -0.01, 5.0]])).requires_grad_()
    alternatives_kl(ours, teachers).sum().backward()
    assert not ours.grad[0].any() and bool(ours.grad[1, :2].all()) and not ours.grad[:, 2].any()


def test_a_token_that_the_policy_rules_out_has_a_finite_divergence():
    sure = torch.tensor([[0.0, -1e4]], dtype=torch.float32, requires_grad=True)
    for is_forward in (False, True):
        teachers = AlternativeTokens(
            torch.tensor([[[0, 1]]]), torch.tensor([[[-3.0, -0.1]]]), torch.ones(1, 1), torch.tensor([is_forward])
        )
        loss = alternatives_kl(sure, teachers)
        loss.sum().backward()
        assert loss.isfinite().all() and sure.grad.isfinite().all()
