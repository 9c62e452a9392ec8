"""A critic on the policy's ranks: its values, its loss, its place in a step, its files."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from critic_cases import build_critic
from msgspec.structs import replace
from processes.add_ons import needs
from tiny import VOCAB, branches, build_learner, build_policy, documents, interrupted, pack, save_checkpoint, scored
from transformers import AutoModelForSequenceClassification

from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.root import TrainerConfig
from stretto.config.sections.algorithm import DefaultLoss, GaeAdvantages, PpoLoss
from stretto.config.sections.model import ActivationCheckpointSection, ModelSection
from stretto.config.sections.trainer import AdamWOptim, CriticSection, LinearScheduler, SgdOptim, TrainerSection
from stretto.models import hub
from stretto.models.value_head import with_value_head
from stretto.trainer.state import checkpoint
from stretto.trainer.updates import Updates
from stretto_critic.critic import Critic, load_critic, value_loss

MODEL = ModelSection(dtype="float32", optimization_dtype="float32")
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def ppo(learner, **changes):
    section = TrainerSection(
        advantages=GaeAdvantages(gamma=0.9, lambd=0.8), critic=learner.valuer.section, loss=PpoLoss(), **changes
    )
    return Updates(learner, section)


def test_the_value_loss_takes_the_worse_of_moved_and_bounded_values():
    values = torch.tensor([1.0, 3.0, 3.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    returns = torch.tensor([2.0, 4.0, 0.0, 0.0], dtype=torch.float64)
    out = value_loss(values, old, returns, clip=0.5)
    assert out.loss.tolist() == [1.0, (1.5 - 4) ** 2, 9.0, 1.0]
    assert out.is_clipped.tolist() == [False, True, False, False]
    out.loss.sum().backward()
    assert values.grad.tolist() == [-2.0, 0.0, 6.0, -2.0]
    assert value_loss(values, old, returns, clip=None).loss.tolist() == [1.0, 1.0, 9.0, 1.0]
    spot = torch.tensor([0.3, -2.0, 1.4, 0.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip=0.5).loss, spot)


@pytest.mark.heavy
def test_a_new_critic_says_zero_and_learns_the_returns():
    docs = scored()
    learner = build_learner(loss=PpoLoss(), valuer=build_critic())
    mb = pack(docs)
    assert not learner.valuer.values([mb])[0].any()
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
        loss=PpoLoss(), valuer=build_critic(CriticSection(num_critic_only_steps=2, lr_warmup_steps=4))
    )
    before = [p.detach().clone() for p in learner.policy.parameters()]
    updates, mb = ppo(learner), pack(scored())
    rates = [updates.train([mb])["critic/lr"] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters()))
    assert rates == pytest.approx([0.0025, 0.005]) and learner.step == 2
    assert "optim/lr" in updates.train([mb])
    assert not all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters()))


def test_a_batch_that_is_distilled_as_a_whole_leaves_the_critic_alone():
    learner = build_learner(loss=PpoLoss(), valuer=build_critic())
    mb = pack(scored())
    mask = mb.loss_mask.astype(np.float32)
    distilled = msgspec.structs.replace(mb, rl_weights=0 * mask, ref_kl_weights=mask, ref_logprobs=mb.logprobs)
    updates = ppo(learner)
    updates.train([mb])
    before = [p.detach().clone() for p in learner.valuer.module.parameters()]
    metrics = updates.train([distilled])
    assert not any(name.startswith("critic/") for name in metrics) and metrics["optim/grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.valuer.module.parameters()))
    assert "critic/value_loss" in updates.train([mb])


@pytest.mark.heavy
def test_a_resumed_critic_continues_bit_for_bit(tmp_path):
    run, mb = RunDir(tmp_path), pack(scored())
    learner = build_learner(loss=PpoLoss(), valuer=build_critic())
    updates = ppo(learner)
    updates.train([mb])
    save_checkpoint(run, learner)
    expected = updates.train([mb])
    other = build_learner(build_policy(9), loss=PpoLoss(), valuer=build_critic(seed=8))
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
    cfg = TrainerConfig(output_dir=tmp_path, run={"name": "run"})
    critic.export(cfg, 1, tokenizer)
    exported = cfg.run_dir.critic / "step_1"
    theirs = AutoModelForSequenceClassification.from_pretrained(exported)
    ids = torch.randint(2, VOCAB, (1, 11), generator=torch.Generator().manual_seed(2))
    theirs.config.pad_token_id = None
    score = theirs(ids).logits.item()
    hidden = critic.module.hidden(ids[0], _layout(11))[-1]
    assert (hidden @ critic.module.lm_head.weight[0]).item() == pytest.approx(score, rel=1e-4)
    again = load_critic(exported, dtype=torch.float32)
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
            optim=AdamWOptim(lr=1.0), scheduler=scheduler, max_steps=10, loss=PpoLoss(),
            valuer=build_critic(section),
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


@needs("native")  # other kernels are further apart than this bound
def test_values_of_a_critic_are_those_of_samples_alone():
    mb, found = pack(branches(6)), []
    for sharing in ("tree", "off"):
        network = with_value_head(build_policy(1))
        network.lm_head.weight.data = torch.linspace(-0.5, 0.5, network.lm_head.weight.shape[1])[None]
        model = ModelSection(dtype="float32", shared_prefixes=sharing)
        critic = Critic(network, section=CriticSection(), model=model, optim=SgdOptim(lr=1e-3))
        assert critic.network.sharing == sharing
        values = critic.values([mb])[0]
        returns = np.linspace(-1, 1, len(values)).astype(np.float32) * mb.loss_mask
        critic.train([replace(mb, values=values, returns=returns)], 1)
        found.append((values, {name: p.detach().clone() for name, p in network.named_parameters()}))
    assert np.abs(found[1][0]).max() > 0.1
    np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-6)
    for name, weight in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], weight, atol=1e-6, rtol=1e-5)


def test_rows_are_those_of_samples_alone_if_a_critic_computes_each_sample():
    """It gets the policy's rows, and one that is packed by what samples share would be too long for it."""
    said = []
    for sharing in ("tree", "off"):
        model = ModelSection(dtype="float32", shared_prefixes=sharing)
        critic = Critic(with_value_head(build_policy(1)), section=CriticSection(), model=model, optim=SgdOptim(lr=1e-3))
        learner = build_learner(build_policy(), optim=SgdOptim(lr=1e-3), valuer=critic)
        assert learner.network.sharing == "tree"
        said.append(learner.shares_prefixes)
    assert said == [True, False] and build_learner(build_policy(), optim=SgdOptim(lr=1e-3)).shares_prefixes


def test_a_critic_computes_again_what_its_own_section_says():
    values = {}
    for ac in (None, ActivationCheckpointSection(num_blocks=1)):
        network = with_value_head(build_policy(seed=1, **SHAPE))
        critic = Critic(network, section=CriticSection(ac=ac), model=ModelSection(), optim=AdamWOptim())
        assert ["forward" in vars(block) for block in network.model.layers] == [ac is not None, False]
        row = pack(documents())
        numbers = np.linspace(0, 1, len(row.token_ids), dtype=np.float32)
        critic.forward_backward([replace(row, values=numbers * 0, returns=numbers)])
        values[ac is None] = [p.grad for p in critic.network.weights.parameters]
    assert all(torch.equal(a, b) for a, b in zip(values[True], values[False], strict=True))
