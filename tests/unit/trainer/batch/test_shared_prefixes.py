"""A step with shared_prefixes = "tree" is the step of samples computed one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from processes.add_ons import needs
from tiny import VOCAB, branches, build_learner, build_policy, gradients, pack, with_streams

from stretto.algorithms.losses import UserFunctions
from stretto.config.sections.algorithm import (
    CorrectionSection,
    DefaultLoss,
    GspoLoss,
    PpoLoss,
    ReferenceKlSection,
    ReinforceLoss,
    WeightsSection,
)
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import ConstantScheduler, SgdOptim, TrainerSection
from stretto.trainer.batch.pass_inputs import build_pass_inputs
from stretto.trainer.learner import Learner
from stretto.trainer.parallel.scores import sharing_of
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.updates import Updates

CPU = torch.device("cpu")


def run_step(mb, sharing: str, *, policy=None, **settings) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and metrics of a step."""
    learner = build_learner(policy or build_policy(), optim=SgdOptim(lr=1e-3), **settings)
    learner.network.sharing = sharing
    learner.forward_backward([mb] if not isinstance(mb, list) else mb)
    return gradients(learner), learner.optim_step()


def assert_same_step(ours, expected) -> None:
    """To 1e-6 of the largest gradient."""
    scale = max(1.0, max(float(gradient.abs().max()) for gradient in expected[0].values()))
    for name, gradient in expected[0].items():
        torch.testing.assert_close(ours[0][name], gradient, atol=1e-6 * scale, rtol=1e-5)
    same = lambda step: {name: value for name, value in step[1].items() if "time" not in name}
    assert same(ours) == pytest.approx(same(expected), rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_each_trained_token_has_the_predictor_that_it_has_alone(seed):
    mb = pack(branches(seed), padding=3)
    shared = build_pass_inputs(mb, VOCAB, CPU, sharing="tree")
    plain = build_pass_inputs(mb, VOCAB, CPU)
    assert len(shared.token_ids) < 0.6 * len(plain.token_ids)
    assert (shared.sources == plain.sources).all() and torch.equal(shared.targets, plain.targets)
    for inputs in (shared, plain):
        predicting = inputs.rows[inputs.predictors].numpy()
        starts = mb.cu_seqlens[np.searchsorted(mb.cu_seqlens, inputs.sources, side="right") - 1]
        assert (inputs.layout.position_ids.numpy()[predicting] == inputs.sources - 1 - starts).all()
        for source, start, row in zip(inputs.sources, starts, predicting):
            segment = int(np.searchsorted(inputs.layout.tree.bounds, row, side="right")) - 1
            own = np.arange(inputs.layout.tree.bounds[segment], row + 1)
            before = np.concatenate((inputs.layout.tree.prefix_rows(segment), own))
            assert (inputs.token_ids.numpy()[before] == mb.token_ids[start:source]).all()
    repeats = shared.repeats
    assert len(repeats.firsts) < 0.7 * len(shared.targets)
    for stream in (shared.predictors, shared.targets, shared.temperatures):
        assert torch.equal(stream[repeats.firsts][repeats.places], stream)


LOSSES = {
    "default": DefaultLoss(),
    "sample": DefaultLoss(reduction="sample"),
    "ppo-entropy": PpoLoss(entropy_coef=0.1, clip_dual=3.0),
    "gspo": GspoLoss(clip_low=0.5, clip_high=0.5),
    "reference": ReinforceLoss(reference_kl=ReferenceKlSection(coef=0.5, is_unbiased=True)),
    "corrected": ReinforceLoss(correction=CorrectionSection(weights=WeightsSection(level="geometric", high=4.0))),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_tokens_and_of_whole_samples_are_those_of_samples_alone(loss):
    mb, settings = pack(branches(1)), {"loss": LOSSES[loss]}
    if loss == "reference":
        settings["reference"] = build_policy(7).requires_grad_(False)
    expected = run_step(mb, "off", **settings)
    assert max(float(gradient.abs().max()) for gradient in expected[0].values()) > 1e-3
    assert_same_step(run_step(mb, "tree", **settings), expected)


def test_all_components_and_the_alternatives_of_teachers():
    """Shared tokens have other weights, references and alternatives in each sample."""
    mb = with_streams(pack(branches(2)))
    assert_same_step(run_step(mb, "tree"), run_step(mb, "off"))
    assert build_pass_inputs(mb, VOCAB, CPU, sharing="tree").repeats is None


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
        pytest.param(
            {"family": "gpt_oss", "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
            marks=needs("families"),
        ),
        {"family": "llama", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    ],
    ids=lambda shape: shape["family"],
)
def test_families_in_steps(shape):
    mb = pack(branches(3))
    ours, expected = (run_step(mb, sharing, policy=build_policy(1, **shape)) for sharing in ("tree", "off"))
    by_token = {name for name in expected[1] if "vio" in name or "confidence" in name}  # a shared token counts once
    assert_same_step((ours[0], {n: v for n, v in ours[1].items() if n not in by_token}),
                     (expected[0], {n: v for n, v in expected[1].items() if n not in by_token}))  # fmt: skip


def test_tokens_with_other_recorded_experts_are_not_shared():
    mb = pack(branches(4))
    policy = lambda: build_policy(1, family="qwen3_moe", num_experts=8, num_experts_per_tok=2)
    rng = np.random.default_rng(0)
    by_token = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (VOCAB, 4, 1)), axis=2)[
        :, : policy().config.num_layers
    ]
    routes = by_token[mb.token_ids][..., :2].copy()
    second = slice(mb.cu_seqlens[1], mb.cu_seqlens[2])
    routes[second][30:] = (routes[second][30:] + 1) % 8
    mb = replace(mb, routed_experts=routes)
    count = lambda **how: len(build_pass_inputs(mb, VOCAB, CPU, sharing="tree", **how).token_ids)
    assert count(with_routes=True) > count(), "the second sample is computed by itself from token 30 on"
    steps = [run_step(mb, s, policy=policy(), enable_router_replay=True) for s in ("tree", "off")]
    assert_same_step((steps[0][0], {}), (steps[1][0], {}))


def test_a_users_loss_sees_the_logits_of_every_sample():
    mb, seen = pack(branches(5)), []

    def loss(mb, sources, logits, sum_of_mean):
        seen.append(logits.detach())
        picked = logits.log_softmax(-1).gather(1, torch.from_numpy(mb.token_ids[sources].astype(np.int64))[:, None])
        return sum_of_mean(picked.squeeze(1) * torch.from_numpy(mb.advantages[sources])), {}

    found = []
    for sharing in ("tree", "off"):
        learner = build_learner(optim=SgdOptim(lr=1e-3))
        learner.network.sharing, learner.user = sharing, UserFunctions(loss=loss)
        learner.forward_backward([mb])
        found.append(gradients(learner))
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=1e-5)
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.heavy
def test_adapters_and_a_whole_run_of_steps():
    mbs = [pack(branches(seed)) for seed in range(3)]
    results = []
    for sharing in ("tree", "off"):
        torch.manual_seed(0)  # adapters begin with it
        model = ModelSection(dtype="float32", lora=LoRASection(rank=4), shared_prefixes=sharing)
        learner = Learner(
            build_policy(), model=model, optim=SgdOptim(lr=0.05), scheduler=ConstantScheduler(), max_steps=None
        )
        assert learner.network.sharing == sharing
        for mb in mbs:
            learner.forward_backward([mb])
            learner.optim_step()
        results.append({n: p.detach() for n, p in learner.policy.named_parameters() if p.requires_grad})
    for name, weight in results[1].items():
        torch.testing.assert_close(results[0][name], weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu"),
    [("auto", "tree", "off"), ("prompts", "prompts", "off"), ("tree", "tree", "tree"), ("off", "off", "off")],
)
def test_by_default_all_that_samples_begin_with_is_shared_on_a_cpu_and_nothing_on_a_gpu(asked, on_cpu, on_gpu):
    assert ModelSection().shared_prefixes == "auto"
    model, policy = ModelSection(shared_prefixes=asked), build_policy()
    found = [sharing_of(policy, Mesh.single_rank(torch.device(kind)), model) for kind in ("cpu", "cuda")]
    assert found == [on_cpu, on_gpu]


@needs("families")
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text"])
def test_models_with_a_state_compute_each_sample(family):
    model = ModelSection(dtype="float32", shared_prefixes="tree")
    learner = Learner(
        build_policy(family=family), model=model, optim=SgdOptim(), scheduler=ConstantScheduler(), max_steps=None
    )
    assert learner.network.sharing == "off"


def test_parts_of_a_step_are_packed_by_what_they_share():
    """Rows of two parts of a batch have no more tokens to compute than those of the batch."""
    mb = pack(branches(7, width=4))
    section = TrainerSection(updates_per_step=2)
    learner = build_learner(optim=SgdOptim(lr=1e-3))
    learner.network.sharing = "tree"
    other = build_learner(optim=SgdOptim(lr=1e-3))
    other.network.sharing = "off"
    for each in (learner, other):
        assert Updates(each, section).train([mb])["optim/updates"] == 2
    for ours, theirs in zip(learner.policy.parameters(), other.policy.parameters()):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
