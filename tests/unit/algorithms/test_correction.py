"""Corrections against a reference that goes through samples and tokens one by one, and by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from stretto.algorithms.correction import correct_weights, importance_weights, needs_sample_index, veto_mask
from stretto.algorithms.losses import TokenCounts, TokenStreams, total_loss
from stretto.algorithms.sample_index import SampleIndex
from stretto.config.sections.algorithm import CorrectionSection, PpoLoss, ReinforceLoss, RejectSection, WeightsSection

LEVELS = ("token", "sequence", "geometric")
LENGTHS = (4, 0, 1, 6, 3)


def case(seed):
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    q = np.log(rng.random(tokens) * 0.8 + 0.1)
    weights = np.where(rng.random(tokens) < 0.75, rng.random(tokens) + 0.1, 0.0)
    return q + rng.normal(0, 0.5, tokens), q, weights, np.repeat(np.arange(len(LENGTHS)), LENGTHS)


def slow(lp, q, weights, samples, cfg):
    out = []
    for t, weight in enumerate(weights):
        members = [u for u in range(len(lp)) if samples[u] == samples[t] and weights[u] != 0]

        def ratio(level, t=t, members=members):
            if level == "token":
                return math.exp(lp[t] - q[t])
            product = math.prod(math.exp(lp[u] - q[u]) for u in members)
            return product if level == "sequence" else product ** (1 / max(len(members), 1))

        if cfg.weights is not None:
            r, low, high = ratio(cfg.weights.level), cfg.weights.low, cfg.weights.high
            if cfg.weights.mode == "truncate":
                weight *= min(max(r, low), high)
            else:
                weight *= r if low <= r <= high else 0.0
        if cfg.reject is not None and not cfg.reject.low <= ratio(cfg.reject.level) <= cfg.reject.high:
            weight = 0.0
        if cfg.veto is not None and any(math.exp(lp[u] - q[u]) < cfg.veto for u in members):
            weight = 0.0
        out.append(weight)
    return out


CONFIGS = [
    CorrectionSection(weights=WeightsSection(level=level, mode=mode, low=low, high=1.5))
    for level, mode, low in itertools.product(LEVELS, ("truncate", "mask"), (0.0, 0.7))
]
CONFIGS += [CorrectionSection(reject=RejectSection(level=level)) for level in LEVELS]
CONFIGS += [
    CorrectionSection(veto=0.5),
    CorrectionSection(weights=WeightsSection(), reject=RejectSection(level="sequence", high=3.0), veto=0.3),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_corrected_weights_equal_the_reference(cfg):
    for seed in range(5):
        lp, q, weights, samples = case(seed)
        sample_index = SampleIndex.of(torch.tensor(LENGTHS)) if needs_sample_index(cfg) else None
        ours, _ = correct_weights(*map(torch.from_numpy, (lp, q, weights)), sample_index, cfg)
        assert ours.tolist() == pytest.approx(slow(lp, q, weights, samples, cfg), rel=1e-9)


def test_hand_computed_truncation_and_masking():
    ratio = torch.tensor([0.25, 0.5, 1.0, 5.0, 8.0])
    truncated, outside = importance_weights(ratio, mode="truncate", low=0.5, high=5.0)
    assert truncated.tolist() == [0.5, 0.5, 1.0, 5.0, 5.0]
    masked, outside_too = importance_weights(ratio, mode="mask", low=0.5, high=5.0)
    assert masked.tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]
    assert outside.tolist() == outside_too.tolist() == [True, False, False, False, True]


def test_one_token_vetoes_its_whole_sample_unless_it_is_no_member():
    log_ratio = torch.tensor([0.0, -12.0, 0.0, -12.0, 0.0])
    is_member = torch.tensor([True, True, True, False, True])
    sample_index = SampleIndex.of(torch.tensor([2, 3]))
    assert veto_mask(log_ratio, is_member, sample_index, threshold=1e-4).tolist() == [True, True, False, False, False]


def test_metrics_sum_over_members_only():
    cfg = CorrectionSection(weights=WeightsSection(high=2.0), reject=RejectSection(level="token"), veto=0.1)
    lp = torch.tensor([0.9, 0.5, 0.01, 0.9]).log()
    q = torch.tensor([0.3, 0.5, 0.5, 0.1]).log()
    sample_index = SampleIndex.of(torch.tensor([2, 2]))
    weights, sums = correct_weights(lp, q, torch.tensor([1.0, 1.0, 2.0, 0.0]), sample_index, cfg)
    assert {name: round(float(v), 4) for name, v in sums.items()} == {
        "rl/correction/weight": 3.02,  # 2, 1 and 0.02
        "rl/correction/is_outside": 1,
        "rl/correction/is_rejected": 2,
        "rl/correction/is_vetoed": 1,
    }
    assert weights.tolist() == [0.0, 1.0, 0.0, 0.0]


def streams_of(lp, q, weights):
    return TokenStreams(
        is_sampled=torch.ones(len(lp), dtype=torch.bool),
        behavior_logprobs=torch.from_numpy(q),
        advantages=torch.linspace(-1, 2, len(lp), dtype=torch.float64),
        rl_weights=torch.from_numpy(weights),
        sample_index=SampleIndex.of(torch.tensor(LENGTHS)),
    )


def test_reinforce_with_untruncated_weights_has_the_gradient_of_unclipped_ppo():
    """grad of A r is A r grad log p: the two spellings of importance sampling agree."""
    lp, q, weights, _ = case(1)
    counts = TokenCounts(5, 0, 0, 3)
    weighted = ReinforceLoss(correction=CorrectionSection(weights=WeightsSection(high=1e9)))
    gradients = []
    for cfg in (weighted, PpoLoss(clip_low=1.0, clip_high=1e9)):
        x = torch.from_numpy(lp).requires_grad_()
        total_loss(x, streams_of(lp, q, weights), counts, cfg)[0].backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_dropped_samples_do_not_push_the_others_harder():
    """Each kept token's gradient is what it is without the correction: denominators stay."""
    lp, q, weights, _ = case(2)
    for reduction in ("token", "sample"):
        gradients = []
        for correction in (None, CorrectionSection(reject=RejectSection(level="token"), veto=0.4)):
            cfg = PpoLoss(reduction=reduction, correction=correction)
            x = torch.from_numpy(lp).requires_grad_()
            total_loss(x, streams_of(lp, q, weights), TokenCounts(9, 0, 0, 4), cfg)[0].backward()
            gradients.append(x.grad)
        plain, kept = gradients
        assert (kept == 0).sum() > (plain == 0).sum() and kept.any()
        torch.testing.assert_close(kept, torch.where(kept != 0, plain, 0.0))


def test_no_correction_carries_a_gradient():
    lp, q, weights, _ = case(3)
    cfg = CorrectionSection(weights=WeightsSection(level="sequence"))
    out, _ = correct_weights(
        torch.from_numpy(lp).requires_grad_(),
        torch.from_numpy(q),
        torch.from_numpy(weights),
        SampleIndex.of(torch.tensor(LENGTHS)),
        cfg,
    )
    assert not out.requires_grad
