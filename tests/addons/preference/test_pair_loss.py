"""Losses of preference pairs against their formulas, written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from stretto_preference.loss import bradley_terry_loss, dpo_loss

RATIOS = [(0.0, 0.0), (1.5, -2.0), (-3.0, 4.0), (12.0, -30.0), (-40.0, 5.0)]
LENGTHS = [(3, 4), (1, 9), (7, 7), (20, 11), (5, 2)]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def by_hand(kind, ratios, lengths, beta, smoothing):
    x = beta * (ratios[0] - ratios[1])
    if kind == "sigmoid":
        return -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)
    if kind == "robust":
        return (-(1 - smoothing) * log_sigmoid(x) + smoothing * log_sigmoid(-x)) / (1 - 2 * smoothing)
    if kind == "hinge":
        return max(0.0, 1 - x)
    return (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo"])
def test_losses_of_dpo_are_their_formulas(kind, smoothing):
    if smoothing and kind in ("hinge", "ipo"):
        pytest.skip("a config refuses it")
    ratios, lengths = torch.tensor(RATIOS, dtype=torch.float64), torch.tensor(LENGTHS, dtype=torch.float64)
    found = dpo_loss(ratios, lengths, loss_type=kind, beta=0.3, label_smoothing=smoothing)
    wanted = [by_hand(kind, *each, 0.3, smoothing) for each in zip(RATIOS, LENGTHS)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_reward_loss_has_margins_and_a_centre():
    rewards, margins = torch.tensor(RATIOS, dtype=torch.float64), torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0]).double()
    found = bradley_terry_loss(rewards, margins, center_coefficient=0.01)
    wanted = [-log_sigmoid(a - b - m) + 0.01 * (a + b) ** 2 for (a, b), m in zip(RATIOS, margins.tolist())]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    plain = bradley_terry_loss(rewards, torch.zeros_like(margins))
    assert plain[0].item() == pytest.approx(math.log(2))
