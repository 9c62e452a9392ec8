"""Every loss in the learner: the division of a batch into micro batches changes neither loss nor gradient."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from tiny import build_learner, build_policy, documents, gradients, pack

from stretto.config.load import load
from stretto.config.root import TrainerConfig
from stretto.config.sections.algorithm import (
    CispoLoss,
    CorrectionSection,
    DefaultLoss,
    GspoLoss,
    IpoLoss,
    PpoLoss,
    ReferenceKlSection,
    ReinforceLoss,
    RejectSection,
    WeightsSection,
)
from stretto.config.sections.trainer import AdamWOptim
from stretto.trainer.build import build_learner as build_configured
from stretto.trainer.hooks import load_hooks
from stretto.trainer.learner import find_tokenizer

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
    PpoLoss(entropy_coef=0.1, reduction="sample"),
    ReinforceLoss(reference_kl=ReferenceKlSection(coef=0.5, is_unbiased=True)),
]


def step(cut, *, loss, seed=7):
    reference = build_policy(seed).requires_grad_(False) if loss.reference_kl is not None else None
    learner = build_learner(loss=loss, reference=reference)
    learner.forward_backward([pack(part, padding=len(part) % 3) for part in cut])
    return gradients(learner), learner.optim_step()


def assert_same_step(ours, expected):
    for name, gradient in expected[0].items():
        np.testing.assert_allclose(ours[0][name], gradient, atol=2e-6, rtol=1e-4)
    assert ours[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("loss", LOSSES, ids=lambda c: f"{c.type}-{c.reduction}{'-corrected' * bool(c.correction)}")
def test_a_step_does_not_depend_on_how_the_batch_is_cut(loss):
    docs = documents(num_groups=2)
    whole = step([docs], loss=loss)
    assert any(g.any() for g in whole[0].values())
    for cut in ([docs[:3], docs[3:]], [docs[::2], docs[1::2]], [[d] for d in docs]):
        assert_same_step(step(cut, loss=loss), whole)


def rollout_step(docs, cut, *, loss=None, weights=None):
    """A step on samples, two branches to a rollout; gradients."""
    rollouts = [f"g{i // 2}.0" for i in range(len(docs))]
    lengths = [int(doc["loss_mask"].sum()) for doc in docs]
    totals = {r: sum(n for n, other in zip(lengths, rollouts) if other == r) for r in rollouts}
    learner = build_learner(loss=loss or PpoLoss())
    parts = []
    for part in cut:
        mb = replace(pack([docs[i] for i in part]), rollout_tokens=tuple(totals[rollouts[i]] for i in part))
        if weights is not None:
            each = [np.full(len(docs[i]["loss_mask"]), weights(totals[rollouts[i]])) for i in part]
            mb = replace(mb, rl_weights=np.concatenate(each).astype(np.float32))
        parts.append(mb)
    learner.forward_backward(parts)
    return gradients(learner), learner.optim_step()


def test_every_rollout_counts_once_whatever_its_branches_and_their_places():
    docs, rollout = documents(num_groups=2), PpoLoss(reduction="rollout")
    everything = range(len(docs))
    tokens = sum(int(doc["loss_mask"].sum()) for doc in docs)
    slow = rollout_step(docs, [everything], weights=lambda total: 2 * tokens / (len(docs) * total))
    whole = rollout_step(docs, [everything], loss=rollout)
    assert_same_step((whole[0], {}), (slow[0], {}))
    assert whole[1]["optim/grad_norm"] > 0
    for cut in ([everything[::2], everything[1::2]], [[i] for i in everything]):
        assert_same_step(rollout_step(docs, cut, loss=rollout), whole)


def test_corrections_are_reported_as_means_over_trained_tokens():
    _, metrics = step([documents()], loss=ReinforceLoss(correction=WEIGHTS))
    assert 0 < metrics["correction/weight/mean"] <= 4.0
    assert 0 <= metrics["correction/is_outside/mean"] < 1 and metrics["correction/is_vetoed/mean"] < 1


def test_a_reference_that_is_the_policy_changes_nothing_and_another_pulls_towards_itself():
    docs = documents()
    plain = step([docs], loss=PpoLoss())
    loss = PpoLoss(reference_kl=ReferenceKlSection(coef=1.0))
    same = step([docs], loss=loss, seed=0)
    assert same[1].pop("reference_kl/mean") == pytest.approx(0, abs=1e-9)
    assert_same_step(same, plain)
    assert step([docs], loss=loss)[1]["reference_kl/mean"] > 0.1


def test_the_entropy_bonus_raises_entropy():
    docs = documents()
    for doc in docs:
        doc["advantages"][:] = 0
    learner = build_learner(loss=ReinforceLoss(entropy_coef=1.0), optim=AdamWOptim(lr=1e-3))
    entropies = []
    for _ in range(4):
        learner.forward_backward([pack(docs)])
        entropies.append(learner.optim_step()["entropy/mean"])
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 0.05


def test_configured_reference_is_the_frozen_start_of_training(tmp_path):
    flags = f"--output-dir {tmp_path} --run.name r --model.scratch --seq-len 64"
    flags += " --loss.type reinforce --loss.reference-kl"
    cfg = load(TrainerConfig, flags.split(), verb="trainer")
    learner = build_configured(cfg, find_tokenizer(cfg.model, cfg.tokenizer, cfg.run_dir), load_hooks(cfg.hooks))
    pairs = list(zip(learner.policy.parameters(), learner.network.reference.parameters(), strict=True))
    assert all((ours == theirs).all() and not theirs.requires_grad for ours, theirs in pairs)
    for _ in range(2):
        learner.forward_backward([pack(documents())])
        metrics = learner.optim_step()
    assert metrics["reference_kl/mean"] > 0
