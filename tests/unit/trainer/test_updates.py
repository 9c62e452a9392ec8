"""A step of several updates, advantages of tokens through packed batches, and the critic."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from learner_cases import scored
from tiny import VOCAB, build_learner, build_policy, documents, pack, save_checkpoint
from transformers import AutoModelForSequenceClassification

from stretto.algorithms.advantages import gae, token_rewards
from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer
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
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, CriticSection, LinearScheduler, TrainerSection
from stretto.models import hub
from stretto.models.value_head import with_value_head
from stretto.trainer.critic import Critic, load_critic
from stretto.trainer.publish.export import export_critic
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state import checkpoint
from stretto.trainer.updates import Updates, _tree_of, estimate_advantages, split_samples

MODEL = ModelSection(dtype="float32", optimization_dtype="float32")
ALONE = Mesh.single_rank(torch.device("cpu")).reduce


def build_critic(section=None, *, lr=1e-2, seed=3):
    section = section or CriticSection(value_clip=None)
    return Critic(with_value_head(build_policy(seed)), section=section, model=MODEL, optim=AdamWOptim(lr=lr))


def interrupted(doc):
    """The same document with the text of a tool between sampled tokens."""
    sampled = np.flatnonzero(doc["loss_mask"])
    if len(sampled) > 2:
        for name in ("loss_mask", "advantages", "logprobs"):
            doc[name][sampled[1]] = 0
    return doc


def ppo(learner, **changes):
    section = TrainerSection(
        advantages=GaeAdvantages(gamma=0.9, lambd=0.8), critic=learner.critic.section, loss=PpoLoss(), **changes
    )
    return Updates(learner, section)


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


# -- the critic --


@pytest.mark.heavy
def test_a_new_critic_says_zero_and_learns_the_returns():
    docs = scored()
    learner = build_learner(loss=PpoLoss(), critic=build_critic())
    mb = pack(docs)
    assert not learner.critic.values([mb])[0].any()
    updates = ppo(learner)
    history = [updates.train([mb]) for _ in range(30)]
    first, last = history[0], history[-1]
    assert first["critic/value/mean"] == 0 and first["critic/explained_variance"] <= 0.05
    assert last["critic/explained_variance"] > 0.5
    assert last["critic/value_loss"] < first["critic/value_loss"] / 2
    assert learner.step == 30


def test_values_are_those_of_the_text_before_each_token_and_packing_does_not_change_them():
    docs = [interrupted(doc) for doc in scored()]
    critic = build_critic()
    with torch.no_grad():
        critic.module.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    mb = pack(docs, padding=2)
    packed = critic.values([mb])[0]
    for i, doc in enumerate(docs):
        ids = torch.from_numpy(doc["token_ids"].astype(np.int64))
        alone_mb = pack([doc])
        hidden = critic.module.hidden(ids, _layout(len(ids)))
        values = (hidden @ critic.module.lm_head.weight.T).squeeze(1).detach().numpy()
        here = packed[mb.cu_seqlens[i] : mb.cu_seqlens[i + 1]]
        expected = np.where(doc["loss_mask"], np.concatenate(([0.0], values[:-1])), 0.0)
        np.testing.assert_allclose(here, expected, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(critic.values([alone_mb])[0], expected, atol=1e-4, rtol=1e-4)


def _layout(length):
    from stretto.models.attention import PackedLayout

    return PackedLayout((0, length), torch.device("cpu"))


def test_a_critics_gradient_does_not_depend_on_how_the_batch_is_cut():
    docs = scored()

    def gradients(cut):
        critic = build_critic(CriticSection(value_clip=0.2))
        with torch.no_grad():
            critic.module.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        batch = []
        for part in cut:
            mb = pack(part)
            batch.append(
                msgspec.structs.replace(mb, values=critic.values([mb])[0] + np.float32(0.3), returns=mb.advantages)
            )
        critic.forward_backward(batch)
        return [p.grad.clone() for p in critic.module.parameters()]

    whole = gradients([docs])
    assert any(g.abs().max() > 1e-3 for g in whole)
    for cut in ([docs[:5], docs[5:]], [[d] for d in docs]):
        for ours, expected in zip(gradients(cut), whole):
            torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-3)


def test_in_its_own_first_steps_only_the_critic_learns():
    learner = build_learner(
        loss=PpoLoss(), critic=build_critic(CriticSection(num_critic_only_steps=2, lr_warmup_steps=4))
    )
    before = [p.detach().clone() for p in learner.policy.parameters()]
    updates, mb = ppo(learner), pack(scored())
    rates = [updates.train([mb])["critic/lr"] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters()))
    assert rates == pytest.approx([0.0025, 0.005]) and learner.step == 2
    assert "optim/lr" in updates.train([mb])
    assert not all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters()))


def test_a_batch_that_is_distilled_as_a_whole_leaves_the_critic_alone():
    learner = build_learner(loss=PpoLoss(), critic=build_critic())
    mb = pack(scored())
    mask = mb.loss_mask.astype(np.float32)
    distilled = msgspec.structs.replace(mb, rl_weights=0 * mask, ref_kl_weights=mask, ref_logprobs=mb.logprobs)
    updates = ppo(learner)
    updates.train([mb])
    before = [p.detach().clone() for p in learner.critic.module.parameters()]
    metrics = updates.train([distilled])
    assert not any(name.startswith("critic/") for name in metrics) and metrics["optim/grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.critic.module.parameters()))
    assert "critic/value_loss" in updates.train([mb])


@pytest.mark.heavy
def test_a_resumed_critic_continues_bit_for_bit(tmp_path):
    run, mb = RunDir(tmp_path), pack(scored())
    learner = build_learner(loss=PpoLoss(), critic=build_critic())
    updates = ppo(learner)
    updates.train([mb])
    save_checkpoint(run, learner)
    expected = updates.train([mb])
    other = build_learner(build_policy(9), loss=PpoLoss(), critic=build_critic(seed=8))
    checkpoint.load(run, other, 1)
    assert ppo(other).train([mb]) == expected
    with pytest.raises(DataError, match="critic"):
        checkpoint.load(run, build_learner(loss=PpoLoss()), 1)
    save_checkpoint(RunDir(tmp_path / "plain"), build_learner(loss=DefaultLoss()))
    with pytest.raises(DataError, match="the state has no critic"):
        checkpoint.load(RunDir(tmp_path / "plain"), other, 0)


@pytest.mark.parametrize("tie", [True, False])
def test_an_exported_critic_is_what_transformers_scores_with(tmp_path, tie):
    policy = build_policy(3, tie_word_embeddings=tie)
    critic = Critic(with_value_head(policy), section=CriticSection(), model=MODEL, optim=AdamWOptim())
    with torch.no_grad():
        critic.module.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    tokenizer = build_letters_tokenizer(tmp_path / "tokenizer")
    export_critic(critic, tmp_path / "critic" / "step_1", tokenizer)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic" / "step_1")
    ids = torch.randint(2, VOCAB, (1, 11), generator=torch.Generator().manual_seed(2))
    theirs.config.pad_token_id = None
    score = theirs(ids).logits.item()
    hidden = critic.module.hidden(ids[0], _layout(11))[-1]
    assert (hidden @ critic.module.lm_head.weight[0]).item() == pytest.approx(score, rel=1e-4)
    again = load_critic(tmp_path / "critic" / "step_1", dtype=torch.float32)
    for (name, ours), (_, saved) in zip(again.named_parameters(), critic.module.named_parameters(), strict=True):
        assert torch.equal(ours, saved), name


def test_a_language_model_becomes_a_critic_that_says_zero_and_a_classifier_is_refused(tmp_path):
    hub.save_hf(build_policy(4), tmp_path / "lm")
    critic = load_critic(tmp_path / "lm", dtype=torch.float32)
    assert not critic.lm_head.weight.any()
    assert torch.equal(critic.model.norm.weight, build_policy(4).model.norm.weight)
    tensors = [*hub.export_tensors(build_policy(4)), ("score.weight", torch.zeros(3, critic.config.hidden_size))]
    hub.save_model_directory(torch.float32, tmp_path / "classifier", None, build_policy(4).config.hf, tensors)
    with pytest.raises(ConfigError, match=r"trainer.critic.load = .*the model has one label"):
        load_critic(tmp_path / "classifier", dtype=torch.float32)


@pytest.mark.heavy
def test_the_policys_schedule_begins_with_the_first_step_that_trains_it(tmp_path):
    section = CriticSection(num_critic_only_steps=3)
    scheduler = LinearScheduler(warmup_steps=4, decay_steps=2)

    def fresh():
        learner = build_learner(
            optim=AdamWOptim(lr=1.0), scheduler=scheduler, max_steps=10, frozen_steps=3, loss=PpoLoss(),
            critic=build_critic(section),
        )  # fmt: skip
        return learner, ppo(learner)

    def rates(updates, steps):
        return [updates.train([pack(scored())]).get("optim/lr") for _ in range(steps)]

    learner, updates = fresh()
    found = rates(updates, 5)
    save_checkpoint(RunDir(tmp_path), learner)
    resumed, again = fresh()
    checkpoint.load(RunDir(tmp_path), resumed, 5)
    assert found + rates(again, 5) == [None, None, None, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5]


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
