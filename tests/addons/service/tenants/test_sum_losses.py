"""Losses of a training API, each against its formula; log-probabilities come from the same pass."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from msgspec.structs import replace
from tenant_runs import MODEL, assert_equal, batch_of, build_tenants, cases, create, train, weights_of
from tiny import branches, build_learner, build_policy, documents, pack

from stretto.config.sections.algorithm import DefaultLoss, ReferenceKlSection
from stretto.trainer.learner import Learner
from stretto_service.wires.operations import OptimStep, Pass, SumLoss, TenantWork

CASE = cases(1)[0]
LOSSES = [
    SumLoss(type="cross_entropy"),
    SumLoss(type="importance_sampling"),
    SumLoss(type="ppo", clip_low_threshold=0.7, clip_high_threshold=1.1),
    SumLoss(type="cispo", clip_low_threshold=0.9, clip_high_threshold=1.2),
    SumLoss(type="dro", beta=0.3),
    SumLoss(type="gspo", clip_low_threshold=0.9, clip_high_threshold=1.1),
]


def row(seed: int = 3):
    """Documents with weights of their own for cross entropy, some negative."""
    mb = pack(documents(seed))
    weights = np.random.default_rng(seed).standard_normal(len(mb.token_ids)).astype(np.float32)
    return replace(mb, ce_weights=np.where(mb.loss_mask, weights, 0).astype(np.float32))


def value_of(spec: SumLoss, mb, logprobs) -> float:
    """The loss, from log-probabilities of all tokens."""
    bounds, total = mb.cu_seqlens, 0.0
    for start, end in itertools.pairwise(bounds):
        tokens = [t for t in range(start, end) if mb.loss_mask[t]]
        log_ratios = [float(logprobs[t]) - float(mb.logprobs[t]) for t in tokens]
        mean = sum(log_ratios) / max(len(tokens), 1)
        for t, log_ratio in zip(tokens, log_ratios):
            p, advantage = float(logprobs[t]), float(mb.advantages[t])
            ratio = math.exp(mean if spec.type == "gspo" else log_ratio)
            clipped = min(max(ratio, spec.clip_low_threshold), spec.clip_high_threshold)
            total += {
                "cross_entropy": -float(mb.ce_weights[t]) * p,
                "importance_sampling": -ratio * advantage,
                "ppo": -min(ratio * advantage, clipped * advantage),
                "gspo": -min(ratio * advantage, clipped * advantage),
                "cispo": -clipped * advantage * p,
                "dro": spec.beta / 2 * log_ratio**2 - advantage * p,
            }[spec.type]
    return total


def run(tenants, mb, **how):
    work = TenantWork(tenant="run-0", micro_batches=(mb,), wants_logprobs=True, **how)
    result = tenants.execute(Pass(number=1, works=(work,))).results["run-0"]
    assert result.error is None, result.error
    return result


@pytest.mark.heavy
@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.type)
def test_a_loss_is_the_sum_that_its_formula_says(spec):
    tenants = build_tenants("dense")
    create(tenants, [CASE])
    train(tenants, [CASE], range(1))
    mb = row()
    forward = run(tenants, mb, sum_loss=spec, is_forward_only=True)
    (logprobs,) = forward.logprobs
    assert forward.metrics["loss"] == pytest.approx(value_of(spec, mb, logprobs), rel=1e-4)
    assert "no gradient" in tenants.execute(OptimStep(number=1, tenant="run-0")).results["run-0"].error
    result = run(tenants, mb, sum_loss=spec)
    np.testing.assert_allclose(result.logprobs[0], logprobs, atol=1e-6)
    assert result.metrics["loss"] == pytest.approx(forward.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.type)
def test_a_gradient_is_the_slope_of_its_loss(spec):
    """Along the gradient itself, by differences; for cispo and gspo of the formula with constants."""
    if spec.type in ("cispo", "gspo"):
        pytest.skip("their losses have parts without a gradient")
    tenants = build_tenants("dense")
    create(tenants, [CASE])
    train(tenants, [CASE], range(1))
    mb, weights = row(), tenants["run-0"].weights
    run(tenants, mb, sum_loss=spec)
    direction = [parameter.grad.clone() for parameter in weights.parameters]
    square = sum(float(each.double().square().sum()) for each in direction)
    values, step = [], 1e-3 / math.sqrt(square)
    for sign in (1, -1):
        for parameter, each in zip(weights.parameters, direction):
            parameter.data.add_(each, alpha=sign * step)
        values.append(run(tenants, mb, sum_loss=spec, is_forward_only=True).metrics["loss"])
        for parameter, each in zip(weights.parameters, direction):
            parameter.data.sub_(each, alpha=sign * step)
    assert (values[0] - values[1]) / (2 * step * square) == pytest.approx(1, rel=0.05)


def test_importance_sampling_and_reinforce_agree_on_policy():
    tenants, other = build_tenants("dense"), build_tenants("dense")
    mb = replace(row(), ce_weights=None)
    for each in (tenants, other):
        create(each, [CASE])
        train(each, [CASE], range(1))
    (own,) = run(tenants, mb, sum_loss=SumLoss(type="dro"), is_forward_only=True).logprobs
    mb = replace(mb, logprobs=own)
    run(tenants, mb, sum_loss=SumLoss(type="importance_sampling"))
    run(other, mb, loss={"type": "reinforce"}, counts=(1.0, 1.0, 1.0, 1.0))
    for a, b in zip(tenants["run-0"].weights.parameters, other["run-0"].weights.parameters):
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_custom_loss_is_a_forward_pass_and_weights():
    """The gradient of any function of log-probabilities is that of cross entropy with its slopes as weights."""
    tenants, direct = build_tenants("dense"), build_tenants("dense")
    mb = row()
    for each in (tenants, direct):
        create(each, [CASE])
        train(each, [CASE], range(1))
    spec = SumLoss(type="importance_sampling")
    (logprobs,) = run(tenants, mb, sum_loss=spec, is_forward_only=True).logprobs
    slopes = np.where(mb.loss_mask, mb.advantages * np.exp(logprobs - mb.logprobs), 0).astype(np.float32)
    run(tenants, replace(mb, ce_weights=slopes), sum_loss=SumLoss(type="cross_entropy"))
    run(direct, mb, sum_loss=spec)
    for a, b in zip(tenants["run-0"].weights.parameters, direct["run-0"].weights.parameters):
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4)


def test_targets_are_scored_instead_of_the_next_tokens():
    tenants = build_tenants("dense")
    create(tenants, [CASE])
    mb = row()
    spec = SumLoss(type="cross_entropy")
    (plain,) = run(tenants, mb, sum_loss=spec, is_forward_only=True).logprobs
    own = mb.token_ids.astype(np.int32)
    (same,) = run(tenants, mb, sum_loss=spec, targets=(own,), is_forward_only=True).logprobs
    np.testing.assert_array_equal(same, plain)
    (other,) = run(tenants, mb, sum_loss=spec, targets=((own + 1) % 40,), is_forward_only=True).logprobs
    is_scored = plain != 0
    assert is_scored.sum() == len(own) - len(mb.cu_seqlens) + 1 and not np.allclose(other[is_scored], plain[is_scored])


def test_targets_of_samples_that_begin_alike_may_differ():
    """Tokens that samples share are computed once, and each sample's target is scored."""
    mb = pack(branches(1))
    targets = np.random.default_rng(0).integers(0, 40, len(mb.token_ids)).astype(np.int32)
    found = []
    for sharing in ("tree", "off"):
        tenants = build_tenants("dense", model=MODEL.model_copy(update={"shared_prefixes": sharing}))
        create(tenants, [CASE])
        spec = SumLoss(type="cross_entropy")
        found += run(tenants, mb, sum_loss=spec, targets=(targets,), is_forward_only=True).logprobs
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_all_log_probabilities_are_those_of_a_learner():
    """A new adapter changes nothing: its second matrix is 0."""
    tenants = build_tenants("moe")
    create(tenants, [CASE])
    learner = build_learner(build_policy(**{"hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16}))  # fmt: skip
    mb = row()
    (found,) = run(tenants, mb, sum_loss=LOSSES[0], is_forward_only=True).logprobs
    np.testing.assert_allclose(found, learner.logprobs(mb)[0], atol=1e-5)


@pytest.mark.heavy
def test_the_reference_of_an_adapter_is_the_model_without_it():
    loss = DefaultLoss(reference_kl=ReferenceKlSection(coef=0.1))
    case = type(CASE)(CASE.spec, {"type": "default", "reference_kl": {"coef": 0.1}})
    tenants = build_tenants("dense")
    create(tenants, [case])
    metrics = train(tenants, [case])
    from tenant_runs import KINDS, build_alone, weights_alone

    like = build_alone(CASE, "dense")
    reference = build_policy(**KINDS["dense"]).requires_grad_(False)
    learner = Learner(
        build_policy(**KINDS["dense"]), model=MODEL.model_copy(update={"lora": like._lora}), optim=like._optim,
        scheduler=like._scheduler, max_steps=10, loss=loss, reference=reference,
    )  # fmt: skip
    weights = dict(zip(learner.network.weights.names, learner.network.weights.parameters))
    for name, tensor in weights_alone(like).items():
        weights[name].data.copy_(tensor)
    for step in range(3):
        learner.forward_backward(batch_of(case, step)[0])
        wanted = learner.optim_step()
    assert metrics[-1]["run-0"]["reference_kl/mean"] == pytest.approx(wanted["reference_kl/mean"], rel=1e-5)
    assert_equal(weights_of(tenants, "run-0"), weights_alone(learner))
