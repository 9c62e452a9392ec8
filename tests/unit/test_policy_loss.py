"""Every policy loss against the paper's formula, one token after the other, by hand, and by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from stretto.algorithms import policy_loss
from stretto.algorithms.losses import (
    POLICY_LOSSES,
    TokenCounts,
    TokenStreams,
    needs_samples,
    total_loss,
)
from stretto.algorithms.segments import Segments
from stretto.config import algorithm
from stretto.config.algorithm import CispoLoss, DefaultLoss, GspoLoss, IpoLoss, PpoLoss, ReinforceLoss

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
            segments=Segments.of(torch.tensor(lengths)),
        ),
    )


def counts_of(samples, *streams):
    rl = sum(int((s.rl_weights != 0).sum()) for s in streams)
    return TokenCounts(
        rl, 0, 0, sum(len(set(k[s.rl_weights.numpy() != 0])) for k, s in zip(samples, streams))
    )


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
    lengths = torch.cat([s.segments.lengths for _, _, s in parts])
    loss, _ = total_loss(x, TokenStreams(**joined, segments=Segments.of(lengths)), counts, cfg)
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
    segments, ones = Segments.of(torch.tensor([2, 2])), torch.ones(4)
    out = policy_loss.gspo(lp, q, ones, segments, ones.bool(), clip_low=0.5, clip_high=0.5)
    torch.testing.assert_close(out.loss, torch.tensor([-1.0, -1.0, -1.5, -1.5]))
    assert out.is_dropped_high.tolist() == [False, False, True, True]


def test_all_ratio_losses_have_the_policy_gradient_where_trainer_and_sampler_agree():
    lp, _, streams = batch(9, (4, 3))
    streams = replace(streams, behavior_logprobs=torch.from_numpy(lp), rl_weights=torch.ones(7))
    # One advantage a sample, as every credit gives it: then gspo's gradient is that of the others too.
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
            segments=Segments.of(torch.tensor([1, 1])),
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


def test_segments_sum_mean_and_spread():
    s = Segments.of(torch.tensor([2, 0, 1]))
    values = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert s.sum(values).tolist() == [3, 0, 5] and s.spread(torch.tensor([7.0, 8, 9])).tolist() == [7, 7, 9]
    assert s.mean(values, torch.tensor([False, True, False])).tolist() == [2, 0, 0]
