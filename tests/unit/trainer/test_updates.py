"""A step of several updates, and advantages of tokens through packed batches."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from tiny import build_learner, build_policy, documents, interrupted, pack, scored

from stretto.algorithms.advantages import gae, token_rewards
from stretto.config.sections.algorithm import (
    CorrectionSection,
    DefaultLoss,
    GaeAdvantages,
    PpoLoss,
    ReinforceLoss,
    ReturnsAdvantages,
    ShapedAdvantages,
    WeightsSection,
)
from stretto.config.sections.trainer import TrainerSection
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.updates import Updates, _tree_of, estimate_advantages, split_samples

ALONE = Mesh.single_rank(torch.device("cpu")).reduce


# -- estimates --


def test_advantages_of_packed_samples_are_those_of_each_sample_alone():
    docs = [interrupted(doc) for doc in scored()]
    cfg, rng = GaeAdvantages(gamma=0.9, lambd=0.7, whiten=False), np.random.default_rng(1)
    values = [rng.standard_normal(len(doc["token_ids"])).astype(np.float32) for doc in docs]
    mb = pack(docs, padding=3)
    whole = np.concatenate((*values, np.zeros(3, np.float32)))
    (out,), _ = estimate_advantages([mb], cfg, [mb.logprobs], None, [whole], ALONE)
    for i, doc in enumerate(docs):
        place = slice(mb.cu_seqlens[i], mb.cu_seqlens[i + 1])
        mask, score = doc["loss_mask"], doc["advantages"].max() or doc["advantages"].min()
        length = np.array([mask.sum()])
        rewards = token_rewards(np.array([score]), None, length, 0.0)
        assert np.flatnonzero(rewards).tolist() in ([], [mask.sum() - 1])
        advantages, returns = gae(rewards, values[i][mask], length, gamma=0.9, lambd=0.7)
        assert out.advantages[place][mask] == pytest.approx(advantages, abs=1e-6)
        assert out.returns[place][mask] == pytest.approx(returns, abs=1e-6)
        assert not out.advantages[place][~mask].any()


@pytest.mark.parametrize("cfg", [GaeAdvantages(gamma=0.9, lambd=0.7, whiten=False), ReturnsAdvantages(gamma=0.9)])
def test_rewards_of_turns_are_rewards_of_their_tokens(cfg):
    docs, rng = scored(), np.random.default_rng(5)
    for doc in docs:
        doc["token_rewards"] = (doc["loss_mask"] * rng.integers(0, 2, len(doc["token_ids"]))).astype(np.float32)
    mb = pack(docs, padding=3)
    values = rng.standard_normal(len(mb.token_ids)).astype(np.float32)
    (out,), _ = estimate_advantages(
        [mb], cfg.model_copy(update={"whiten": False}), [mb.logprobs], None, [values], ALONE
    )
    for i, doc in enumerate(docs):
        place, mask = slice(mb.cu_seqlens[i], mb.cu_seqlens[i + 1]), doc["loss_mask"]
        rewards = doc["token_rewards"][mask].astype(np.float64)
        if not len(rewards):
            continue
        rewards[-1] += doc["advantages"].max() or doc["advantages"].min()
        own = [*values[place][mask].tolist(), 0.0]
        for t in range(len(rewards)):  # the sums of the definitions
            if isinstance(cfg, GaeAdvantages):
                deltas = [rewards[k] + 0.9 * own[k + 1] - own[k] for k in range(t, len(rewards))]
                wanted = sum((0.9 * 0.7) ** k * delta for k, delta in enumerate(deltas))
                assert out.returns[place][mask][t] == pytest.approx(wanted + own[t], abs=1e-5)
            else:
                wanted = sum(0.9**k * reward for k, reward in enumerate(rewards[t:]))
            assert out.advantages[place][mask][t] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "cfg", [ReturnsAdvantages(gamma=0.9, kl_coef=0.3), ShapedAdvantages(kl_coef=0.3, kl_estimator="k3")]
)
def test_estimates_do_not_depend_on_how_the_batch_is_cut(cfg):
    docs = scored()
    rng = np.random.default_rng(2)
    references = [-rng.random(len(doc["token_ids"])).astype(np.float32) for doc in docs]

    def run(parts):
        mbs = [pack([docs[i] for i in part]) for part in parts]
        refs = [np.concatenate([references[i] for i in part]) for part in parts]
        out, metrics = estimate_advantages(mbs, cfg, [mb.logprobs for mb in mbs], refs, None, ALONE)
        found = {}
        for part, mb in zip(parts, out):
            for k, i in enumerate(part):
                found[i] = mb.advantages[mb.cu_seqlens[k] : mb.cu_seqlens[k + 1]]
        return np.concatenate([found[i] for i in range(len(docs))]), metrics

    everything = list(range(len(docs)))
    whole, metrics = run([everything])
    cut, same = run([everything[1::2], everything[::2]])
    np.testing.assert_allclose(cut, whole, atol=1e-6)
    assert same == pytest.approx(metrics) and metrics["reference_kl/mean"] != 0
    mask = np.concatenate([doc["loss_mask"] for doc in docs])
    assert whole[mask].mean() == pytest.approx(0, abs=1e-6)
    assert whole[mask].std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_the_price_is_the_divergence_from_the_reference():
    docs = scored(num_groups=1, group_size=1)
    mb = pack(docs)
    reference = mb.logprobs - mb.loss_mask * np.float32(0.5)
    cfg = ShapedAdvantages(kl_coef=2.0, whiten=False)
    (out,), metrics = estimate_advantages([mb], cfg, [mb.logprobs], [reference], None, ALONE)
    assert (mb.advantages - out.advantages)[mb.loss_mask] == pytest.approx(2.0 * 0.5, rel=1e-5)
    assert metrics["reference_kl/mean"] == pytest.approx(0.5, rel=1e-5)


# -- shares of a batch --


def num_tokens(mb):
    return mb.num_tokens


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("order", [None, np.random.default_rng(0)])
def test_every_sample_is_assigned_once_and_unchanged(order, shares_prefixes):
    docs = documents(num_groups=4)
    mbs = [pack(docs[:9], padding=2), pack(docs[9:])]
    names = [f"g{i}.0/0" for i in range(len(docs))]
    mbs[0] = msgspec.structs.replace(mbs[0], sample_ids=tuple(names[:9]))
    mbs[1] = msgspec.structs.replace(mbs[1], sample_ids=tuple(names[9:]))
    parts = split_samples(mbs, 3, order, shares_prefixes=shares_prefixes)
    size = (lambda mb: _tree_of([(mb, i) for i in range(mb.num_samples)]).num_tokens) if shares_prefixes else num_tokens
    found = {}
    for mb in (mb for part in parts for mb in part):
        assert size(mb) <= max(map(size, mbs))
        for i, name in enumerate(mb.sample_ids):
            assert name not in found
            place = slice(mb.cu_seqlens[i], mb.cu_seqlens[i + 1])
            found[name] = {key: getattr(mb, key)[place] for key in docs[0]}
    assert sorted(found) == sorted(names)
    for name, doc in zip(names, docs):
        for key, values in doc.items():
            np.testing.assert_array_equal(found[name][key], values)


def test_expert_choices_that_some_samples_lack_are_marked_as_missing():
    docs = documents(num_groups=1, group_size=2)
    with_routes = pack(docs[:1])
    routes = np.zeros((with_routes.num_tokens, 2, 1), np.uint8)
    mbs = [msgspec.structs.replace(with_routes, routed_experts=routes), pack(docs[1:])]
    (joined,) = split_samples([*mbs, pack(docs[:1] * 4)], 1)[0][:1]
    known = joined.routed_experts[: len(routes)]
    assert not known.any() and (joined.routed_experts[len(routes) :] == 255).all()


def test_several_updates_are_one_step_and_equal_the_same_updates_by_hand():
    docs = documents()
    learner, other = build_learner(loss=PpoLoss()), build_learner(loss=PpoLoss())
    section = TrainerSection(loss=PpoLoss(), updates_per_step=3)
    metrics = Updates(learner, section).train([pack(docs)])
    losses = []
    for share in split_samples([pack(docs)], 3):
        other.forward_backward(share)
        losses.append(other.optim_step()["loss/mean"])
    assert learner.step == 1 and metrics["optim/updates"] == 3
    assert metrics["loss/mean"] == pytest.approx(np.mean(losses), rel=1e-5)
    for ours, theirs in zip(learner.policy.parameters(), other.policy.parameters()):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.heavy
def test_more_updates_than_samples_are_warned_about_once(caplog):
    section = TrainerSection(loss=PpoLoss(), updates_per_step=64)
    updates = Updates(build_learner(loss=PpoLoss()), section)
    for _ in range(2):
        updates.train([pack(scored())])
    (told,) = [message for message in caplog.messages if "updates_per_step" in message]
    n = len(scored())
    assert (
        told.startswith(f"updates_per_step = 64, but no rank has more than {n} samples")
        and f"it makes {n} updates" in told
    )


def test_epochs_see_the_batch_again_in_an_order_that_a_resumed_run_repeats():
    docs = documents()

    def run():
        learner = build_learner(loss=PpoLoss())
        section = TrainerSection(loss=PpoLoss(), updates_per_step=2, epochs_per_step=2, seed=5)
        metrics = Updates(learner, section).train([pack(docs)])
        return metrics, [p.detach().clone() for p in learner.policy.parameters()]

    (metrics, first), (_, second) = run(), run()
    assert metrics["optim/updates"] == 4
    assert metrics["batch/sampled_tokens"] == 2 * sum(d["loss_mask"].sum() for d in docs)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


# -- which policy the ratio is to --


def test_without_the_engines_logprobs_the_first_update_has_a_ratio_of_one():
    docs = documents()
    loss = PpoLoss(use_rollout_logprobs=False, clip_low=0.0, clip_high=0.0)
    plain, reinforced = build_learner(loss=loss), build_learner(loss=ReinforceLoss())
    for learner in (plain, reinforced):
        learner.forward_backward([pack(docs)])
    for ours, theirs in zip(plain.policy.parameters(), reinforced.policy.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_later_updates_are_compared_with_the_policy_as_the_step_began():
    docs = documents()
    learner = build_learner(loss=PpoLoss(use_rollout_logprobs=False, clip_low=0.0, clip_high=0.0))
    section = TrainerSection(loss=learner._loss, epochs_per_step=2)
    before = learner.trained_logprobs([pack(docs)])[0]
    metrics = Updates(learner, section).train([pack(docs)])
    # Nothing has moved in the first pass; in the second, bounds of 0 clip every token that moved.
    assert 0.1 < metrics["is_masked/mean"] <= 0.5
    assert np.abs(learner.trained_logprobs([pack(docs)])[0] - before).max() > 1e-3


def test_samples_keep_the_versions_that_began_them():
    docs = documents()
    versions = tuple(range(len(docs)))
    mb = msgspec.structs.replace(pack(docs, padding=3), first_versions=versions)
    of_ids = dict(zip(mb.sample_ids, versions, strict=True))
    parts = [row for part in split_samples([mb], 3, np.random.default_rng(0)) for row in part]
    found = {name: version for row in parts for name, version in zip(row.sample_ids, row.first_versions, strict=True)}
    assert found == of_ids


def test_the_correction_then_compares_the_policy_as_the_step_began_with_the_engine():
    docs = documents()
    correction = CorrectionSection(weights=WeightsSection(high=1.5))
    learner = build_learner(loss=PpoLoss(use_rollout_logprobs=False, correction=correction))
    mb = pack(docs)
    old = learner.trained_logprobs([mb])[0]
    ratio = np.exp(old - mb.logprobs)[mb.loss_mask].clip(0, 1.5)
    learner.forward_backward([mb])
    assert learner.optim_step()["correction/weight/mean"] == pytest.approx(ratio.mean(), rel=1e-4)


# -- log-probabilities that the sampler did not give --


@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{}, {"updates_per_step": 2}, {"epochs_per_step": 2}])
@pytest.mark.parametrize("loss", [PpoLoss(), PpoLoss(use_rollout_logprobs=True), DefaultLoss()])
def test_unknown_logprobs_are_those_of_the_trainer_before_the_step(settings, loss):
    docs = documents()
    mb = pack(docs)
    (own,) = build_learner(policy=build_policy()).trained_logprobs([mb])
    found = []
    for logprobs in (np.where(mb.loss_mask, np.nan, 0).astype(np.float32), own):
        learner = build_learner(policy=build_policy(), loss=loss)
        updates = Updates(learner, TrainerSection(loss=loss, **settings))
        metrics = updates.train([msgspec.structs.replace(mb, logprobs=logprobs)])
        assert np.isfinite(list(metrics.values())).all()
        found.append(torch.cat([each.detach().flatten() for each in learner.policy.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


# -- a user's functions --


def test_without_a_reference_the_policy_is_never_scored_in_its_place():
    with pytest.raises(AssertionError, match="no reference"):
        build_learner(policy=build_policy()).trained_logprobs([pack(documents())], is_reference=True)
