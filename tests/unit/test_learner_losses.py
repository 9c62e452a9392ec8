"""Every loss through the learner: how a batch is cut into micro batches changes neither loss nor gradient."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import build_learner, documents, gradients, pack

from stretto.config.algorithm import (
    CispoLoss,
    CorrectionSection,
    DefaultLoss,
    GspoLoss,
    IpoLoss,
    PpoLoss,
    ReinforceLoss,
    RejectSection,
    WeightsSection,
)

WEIGHTS = CorrectionSection(weights=WeightsSection(level="geometric", high=4.0), veto=1e-4)
REJECT = CorrectionSection(reject=RejectSection(low=0.2, high=3.0))

LOSSES = [
    DefaultLoss(reduction="sample"),
    DefaultLoss(reduction="constant", reduction_tokens=4),
    IpoLoss(reduction="sample"),
    PpoLoss(clip_dual=3.0),
    ReinforceLoss(),
    GspoLoss(clip_low=0.5, clip_high=0.5),
    GspoLoss(clip_low=0.5, clip_high=0.5, reduction="token"),
    CispoLoss(),
    ReinforceLoss(correction=WEIGHTS),
    ReinforceLoss(correction=WEIGHTS, reduction="sample"),
    PpoLoss(correction=REJECT),
]


def step(cut, **settings):
    learner = build_learner(**settings)
    learner.forward_backward([pack(part, padding=len(part) % 3) for part in cut])
    return gradients(learner), learner.optim_step()


def assert_same_step(ours, expected):
    for name, gradient in expected[0].items():
        np.testing.assert_allclose(ours[0][name], gradient, atol=2e-6, rtol=1e-4)
    assert ours[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda c: f"{c.type}-{c.reduction}{'-corrected' * bool(c.correction)}"
)
def test_a_step_does_not_depend_on_how_the_batch_is_cut(loss):
    docs = documents(num_groups=2)
    whole = step([docs], loss=loss)
    assert any(g.any() for g in whole[0].values())
    for cut in ([docs[:3], docs[3:]], [docs[::2], docs[1::2]], [[d] for d in docs]):
        assert_same_step(step(cut, loss=loss), whole)


def test_corrections_are_reported_as_means_over_trained_tokens():
    _, metrics = step([documents()], loss=ReinforceLoss(correction=WEIGHTS))
    assert 0 < metrics["correction/weight/mean"] <= 4.0
    assert 0 <= metrics["correction/is_outside/mean"] < 1 and metrics["correction/is_vetoed/mean"] < 1
