"""Learning with a mixture of experts: grouped or looped, replayed choices, balance, frozen routers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import ask, build_core, run
from learner_cases import build_moe, sampled
from processes.add_ons import needs
from tiny import VOCAB, build_learner, build_policy, documents, gradients, pack

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import ModelSection
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.moe import Routing, mixtures, update_expert_bias
from stretto.orchestrator.batch import samples_of, to_micro_batch
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.records.partial import merge_expert_choices
from stretto.records.rollout import Rollout, RolloutStatus, Task
from stretto.trainer.batch.routing import build_routers
from stretto.trainer.learner import Learner


def perturbed(policy, scale: float):
    """The same weights except for routers that sometimes choose other experts."""
    other = build_moe()
    other.load_state_dict(policy.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mixture in mixtures(other).values():
            weight = mixture.gate.weight
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


def mismatch(policy, mb, **settings):
    learner = build_learner(policy, **settings)
    learner.forward_backward([mb])
    return learner.optim_step()["mismatch_kl/mean"]


@needs("families")
def test_a_mixture_whose_blocks_are_all_dense_is_trained():
    shape = {"num_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    policy = build_policy(0, {"first_k_dense_replace": 2}, family="deepseek_v3", **shape)
    learner = build_learner(policy)
    learner.forward_backward([pack(documents()[:2])])
    metrics = learner.optim_step()
    assert metrics["optim/grad_norm"] > 0 and not any(key.startswith("max_vio") for key in metrics)


@pytest.mark.heavy
def test_replay_closes_the_gap_that_other_choices_open():
    policy = build_moe()
    mb = sampled(perturbed(policy, 0.2))
    assert mb.routed_experts.dtype == np.uint8 and mb.routed_experts.shape[1:] == (2, 2)
    without = mismatch(perturbed(policy, 0.0), mb)
    with_replay = mismatch(perturbed(policy, 0.0), mb, enable_router_replay=True)
    assert without > 0.01, "routing must differ for this test to say anything"
    assert with_replay < without / 5
    same = sampled(policy)
    assert mismatch(perturbed(policy, 0.0), same, enable_router_replay=True) < 1e-7


@pytest.mark.heavy
def test_replay_closes_most_of_the_gap_of_an_engine_in_bfloat16():
    policy = build_moe()
    mb = sampled(perturbed(policy, 0.0).to(torch.bfloat16), num=24)
    without = mismatch(perturbed(policy, 0.0), mb)
    with_replay = mismatch(perturbed(policy, 0.0), mb, enable_router_replay=True)
    assert 0 < with_replay < without


@pytest.mark.heavy
def test_replaying_its_own_choices_changes_no_gradient_and_routers_get_one():
    policy = build_moe()
    mb = sampled(policy)
    grads = []
    for settings in ({}, {"enable_router_replay": True}):
        learner = build_learner(perturbed(policy, 0.0), **settings)
        learner.forward_backward([mb])
        grads.append(gradients(learner))
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, atol=1e-6, rtol=1e-4)
    assert all(g.abs().max() > 0 for name, g in grads[1].items() if name.endswith("gate.weight"))


def test_forced_choices_are_used_and_gates_are_their_scores():
    policy = build_moe()
    ids, layout = torch.arange(2, 12), PackedLayout((0, 10), torch.device("cpu"))
    forced = torch.tensor([7, 3]).expand(10, 2, 2).clone()
    forced[4:] = 255  # no choice known
    routing, own = Routing(replay=forced, is_recording=True), Routing(is_recording=True)
    hidden = policy.hidden(ids, layout, routing=routing)
    policy.hidden(ids, layout, routing=own)
    assert (routing.choices[0][:4] == torch.tensor([7, 3])).all()
    assert torch.equal(routing.choices[0][4:], own.choices[0][4:])
    hidden.square().sum().backward()
    assert mixtures(policy)["model.layers.0.mlp"].gate.weight.grad[[7, 3]].abs().sum() > 0


@pytest.mark.heavy
def test_sharing_prompts_does_not_mix_choices():
    """Two samples of one prompt, routed differently for each: sharing must not mix their choices."""
    policy = build_moe()
    mb = sampled(policy, num=3)
    routes = mb.routed_experts.copy()
    second = slice(mb.cu_seqlens[1], mb.cu_seqlens[2])
    routes[second] = (routes[second] + 1) % 8
    mb = msgspec.structs.replace(mb, routed_experts=routes)
    shared = build_learner(perturbed(policy, 0.0), enable_router_replay=True)
    alone = build_learner(perturbed(policy, 0.0), enable_router_replay=True)
    alone.network.sharing = "off"
    for learner in (shared, alone):
        learner.forward_backward([mb])
    for name, gradient in gradients(alone).items():
        torch.testing.assert_close(gradients(shared)[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inter", [16, 10], ids=["aligned", "odd"])
def test_grouped_products_equal_the_loop_forward_and_backward(dtype, inter):
    results = []
    for use_grouped in (True, False):
        policy = build_moe(moe_intermediate_size=inter).to(dtype)
        for mixture in mixtures(policy).values():
            mixture.experts.use_grouped_mm = use_grouped
        hidden = policy.hidden(torch.arange(VOCAB), PackedLayout((0, VOCAB), torch.device("cpu")))
        hidden.float().square().mean().backward()
        results.append([hidden, *(p.grad for p in policy.parameters())])
    for grouped, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=2e-2)


def test_load_balance_is_reported():
    learner = build_learner(build_moe())
    learner.forward_backward([pack(documents())])
    metrics = learner.optim_step()
    assert 0 < metrics["max_vio/mean"] <= metrics["max_vio/max"] <= 7
    assert 0.2 < metrics["routing_confidence/mean"] <= 1
    assert "max_vio/mean" not in dense_metrics()


def dense_metrics():
    learner = build_learner()
    learner.forward_backward([pack(documents())])
    return learner.optim_step()


def test_metrics_do_not_depend_on_the_cut_into_micro_batches():
    docs = documents(num_groups=4)
    found = []
    for parts in ([docs], [docs[:8], docs[8:]]):
        learner = build_learner(build_moe())
        learner.network.sharing = "off"
        learner.forward_backward([pack(part) for part in parts])
        found.append({k: v for k, v in learner.optim_step().items() if "vio" in k or "confidence" in k})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value == pytest.approx(found[1][name], rel=1e-5)


@pytest.mark.heavy
def test_the_bias_update_balances_loads_and_touches_no_gate():
    policy = build_moe(has_expert_bias=True)
    ids, layout = torch.arange(VOCAB), PackedLayout((0, VOCAB), torch.device("cpu"))

    def loads():
        routing = Routing(is_measuring=True)
        policy.hidden(ids, layout, routing=routing)
        return torch.stack([routing.loads[layer] for layer in sorted(routing.loads)]).float()

    before = loads()
    for _ in range(200):
        update_expert_bias(policy, loads(), 0.01)
    assert (loads().amax(1) < before.amax(1)).all()
    for mixture in mixtures(policy).values():
        assert abs(float(mixture.gate.expert_bias.mean())) < 1e-5
        assert not mixture.gate.expert_bias.requires_grad
        assert mixture.gate.expert_bias.dtype is torch.float32
    assert mixtures(policy.to(torch.bfloat16))["model.layers.0.mlp"].gate.expert_bias.dtype is torch.float32


def biased_learner(rate=0.01):
    policy = build_moe(has_expert_bias=True)
    model = ModelSection(moe_bias_update_rate=rate)
    plain = build_learner()
    return Learner(
        policy, model=model, optim=plain._optim, scheduler=plain._scheduler, max_steps=None
    )  # fmt: skip


def test_biases_are_trained_saved_resumed_and_exported(tmp_path):
    learner, fresh = biased_learner(), biased_learner()
    for _ in range(2):
        learner.forward_backward([pack(documents())])
        learner.optim_step()
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    exported = dict(learner.export_tensors())[name].clone()
    assert exported.abs().max() > 0
    fresh.load_state(learner.state())
    assert torch.equal(dict(fresh.export_tensors())[name], exported)
    hub.save_hf(learner.policy, tmp_path)
    again = hub.load_model(tmp_path, dtype=torch.float32)
    assert again.config.moe.has_expert_bias
    assert torch.equal(mixtures(again)["model.layers.0.mlp"].gate.expert_bias, exported)


def test_a_frozen_router_does_not_move_and_all_else_does():
    policy = build_moe()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    plain = build_learner()
    learner = Learner(
        policy, model=ModelSection(freeze_moe_router=True), optim=plain._optim, scheduler=plain._scheduler,
        max_steps=None,
    )  # fmt: skip
    learner.forward_backward([pack(documents())])
    learner.optim_step()
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name]) == name.endswith("gate.weight"), name
    assert dict(learner.export_tensors()).keys() == dict(hub.export_tensors(build_moe())).keys()


@pytest.mark.parametrize(
    ("model", "replay", "words"),
    [
        ({}, True, "enable_router_replay = true, but the policy has no experts"),
        ({"freeze_moe_router": True}, False, "freeze_moe_router = true, but the policy has no experts"),
        ({"moe_bias_update_rate": 0.1}, False, "moe_bias_update_rate = 0.1, but the policy has no experts"),
    ],
)
def test_settings_about_experts_are_refused_for_a_dense_model(model, replay, words):
    with pytest.raises(ConfigError, match=words):
        build_routers(build_policy(), ModelSection(**model), is_replaying=replay)


def test_a_bias_rate_without_a_bias_is_refused():
    with pytest.raises(ConfigError, match="has no bias on the choice of experts"):
        build_routers(build_moe(), ModelSection(moe_bias_update_rate=0.1), is_replaying=False)


def test_choices_of_another_model_are_refused():
    policy = build_moe()
    mb = sampled(policy, num=2)
    learner = build_learner(policy, enable_router_replay=True)
    for routes, words in (
        (mb.routed_experts[:, :1], r"shape \[\d+, 1, 2\], the policy needs \[\d+, 2, 2\]"),
        (np.where(np.arange(2) == 0, 9, mb.routed_experts).astype(np.uint8), "names experts beyond 7"),
    ):
        with pytest.raises(DataError, match=words):
            learner.forward_backward([msgspec.structs.replace(mb, routed_experts=routes)])


def test_a_turn_keeps_the_choices_that_tokens_were_computed_with_first():
    old = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    new = np.arange(10, 17, dtype=np.uint8).reshape(7, 1, 1)
    assert merge_expert_choices(None, new, 7) is new and merge_expert_choices(old, None, 7) is None
    for start in range(4):  # the engine may send choices that are known already, or omit them
        assert merge_expert_choices(old, new[start:], 7).ravel().tolist() == [0, 1, 2, 13, 14, 15, 16]
    assert merge_expert_choices(old, new[4:], 7) is None and merge_expert_choices(None, new[1:], 7) is None


def test_samples_without_choices_are_marked_so_and_mixed_models_refused():
    policy = build_moe()
    known = sampled(policy, num=1)
    assert known.routed_experts is not None
    from stretto.records.sample import TrainSample

    def sample(name, routes):
        ids = np.arange(4, dtype=np.int32)
        zeros = np.zeros(4, np.float32)
        return TrainSample(
            sample_id=name, env="e", token_ids=ids, loss_mask=ids > 0, logprobs=zeros, advantages=zeros,
            routed_experts=routes,
        )  # fmt: skip

    routes = np.zeros((4, 2, 2), np.uint8)
    mb = to_micro_batch([sample("a", routes), sample("b", None)])
    assert (mb.routed_experts[:4] == 0).all() and (mb.routed_experts[4:] == 255).all()
    assert to_micro_batch([sample("b", None)]).routed_experts is None
    with pytest.raises(DataError, match="a and c were routed by different models"):
        to_micro_batch([sample("a", routes), sample("c", np.zeros((4, 2, 3), np.uint8))])


@pytest.mark.heavy
@pytest.mark.parametrize("is_all_sent", [True, False])
def test_two_turns_are_replayed_as_they_were_computed(is_all_sent):
    """All but the end of the second turn's prompt comes from the prefix cache; no choices are lost between turns."""
    policy = build_moe()
    core = build_core(perturbed(policy, 0.2), enable_return_routed_experts=True)
    branch, prompt = OpenBranch(1.0), np.arange(2, 36, dtype=np.int32)
    for turn in range(2):
        asked = ask(f"t{turn}", prompt, max_tokens=15, salt="s")
        start = 0 if is_all_sent else branch.num_known_routes
        asked = msgspec.structs.replace(asked, routed_experts_start=start)
        completion = run(core, asked)[0][0]
        assert len(completion.routed_experts) == len(prompt) + 15 - start
        branch.add_turn(prompt, completion, 0)
        prompt = np.concatenate((prompt, completion.token_ids, np.array([5, 6, 7], np.int32)))
    assert completion.cached_tokens >= 32
    closed = branch.close()
    routes = closed.routed_experts
    assert len(routes) == len(closed.token_ids) and (routes[:-1] < 8).all() and (routes[-1] == 255).all()
    rollout = Rollout(
        rollout_id="g0.0", group_id=0, member=0, status=RolloutStatus.FINISHED,
        task=Task(env="env", task_id="0", data={}), branches=(closed,),
    )  # fmt: skip
    mb = to_micro_batch(samples_of(rollout, 1.0))
    exact = perturbed(policy, 0.2)
    assert mismatch(exact, mb, enable_router_replay=True) < 1e-7


def test_routers_work_in_float32_whatever_the_dtype():
    policy = build_moe().to(torch.bfloat16)
    gate = mixtures(policy)["model.layers.0.mlp"].gate
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    chosen, gates = gate(x, 0, Routing(), None)
    scores = (x.double() @ gate.weight.double().T).softmax(-1)
    expected = scores.topk(2, dim=-1)
    assert torch.equal(chosen, expected.indices) and gates.dtype is torch.bfloat16
    normed = expected.values / expected.values.sum(-1, keepdim=True)
    torch.testing.assert_close(gates.double(), normed, atol=2**-9, rtol=0)


@pytest.mark.heavy
def test_choices_are_dropped_where_the_trainer_does_not_replay():
    policy = build_moe()
    mb = sampled(perturbed(policy, 0.2), num=2)
    plain = msgspec.structs.replace(mb, routed_experts=None)
    assert mismatch(perturbed(policy, 0.0), mb) == mismatch(perturbed(policy, 0.0), plain)
    assert np.isfinite(mismatch(perturbed(policy, 0.0), plain, enable_router_replay=True))


def test_a_reference_policy_chooses_for_itself():
    from stretto.config.sections.algorithm import DefaultLoss

    policy = build_moe()
    mb = sampled(perturbed(policy, 0.2), num=2)
    reference = perturbed(policy, 0.0).requires_grad_(False)
    loss = DefaultLoss.model_validate({"reference_kl": {"coef": 0.1}})
    learner = build_learner(perturbed(policy, 0.0), enable_router_replay=True, loss=loss, reference=reference)
    learner.forward_backward([mb])
    assert np.isfinite(learner.optim_step()["loss/mean"])
