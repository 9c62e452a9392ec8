"""Muon updates matrices as torch's own, other weights as AdamW, and experts as one matrix each."""

from __future__ import annotations

import pytest
import torch
from tiny import build_learner, build_policy, documents, pack
from torch import nn

from stretto.config.sections.trainer import AdamWOptim, MuonOptim, SignSgdOptim
from stretto.models.hf import load_hf_model
from stretto.models.hub import save_hf
from stretto.models.moe import Experts
from stretto.models.value_head import with_value_head
from stretto.trainer.optim.build import MasterWeights, build_optimizer
from stretto_optimizers.muon import find_matrices, muon_step, orthogonalise

MOE = {"family": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}


def step(policy, optim, num_steps=3):
    """Weights after some steps with given gradients."""
    weights = MasterWeights(policy, torch.float32)
    optimizer = build_optimizer(weights, optim)
    for seed in range(num_steps):
        generator = torch.Generator().manual_seed(seed)
        for parameter in weights.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return dict(zip(weights.names, weights.parameters)), optimizer


def test_matrices_of_blocks_are_found_and_nothing_else():
    found = find_matrices(build_policy(**MOE, tie_word_embeddings=False))
    assert all(name.startswith("model.layers.") and "norm" not in name for name in found)
    assert "model.layers.0.mlp.gate.weight" in found and "model.layers.1.self_attn.o_proj.weight" in found
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == 2
    assert found["model.layers.0.mlp.experts.down_proj"] == 1
    assert not any("lm_head" in name for name in find_matrices(with_value_head(build_policy())))


def test_the_matrices_of_a_transformers_model_are_found(tmp_path):
    save_hf(build_policy(**MOE), tmp_path)
    found = find_matrices(load_hf_model(tmp_path, dtype=torch.float32))
    assert len(found) == 2 * (4 + 1 + 2) and not any("embed" in name or "norm" in name for name in found)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 20, 20)])
def test_orthogonalised_matrices_keep_their_directions_and_lose_their_lengths(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrices)
    values = torch.linalg.svdvals(result)
    assert values.max() < 1.25 and values.median() > 0.6
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    exact = u @ vh
    cosine = (result * exact).sum((-2, -1)) / (result.norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1)))
    assert cosine.min() > 0.95


def test_a_matrix_moves_as_torchs_muon_moves_it():
    """torch iterates in bfloat16, so updates agree up to its rounding."""
    cfg = MuonOptim(lr=1e-2, weight_decay=0.1, mu=0.9)
    policy = build_policy()
    name = "model.layers.0.mlp.up_proj.weight"
    twin = nn.Parameter(dict(policy.named_parameters())[name].detach().clone())
    start = twin.detach().clone()
    moved, _ = step(policy, cfg)
    reference = torch.optim.Muon([twin], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for other, parameter in policy.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if other == name:
                twin.grad = gradient
        reference.step()
    change = (twin - start).norm()
    assert (moved[name] - twin).norm() < 0.02 * change


def test_other_weights_move_as_under_adamw():
    policy = build_policy(**MOE)
    moved, _ = step(policy, MuonOptim(lr=1e-3))
    want, _ = step(build_policy(**MOE), AdamWOptim(lr=1e-3, betas2=0.95))
    matrices = find_matrices(policy)
    for name, weight in want.items():
        assert torch.equal(moved[name], weight) != (name in matrices), name


def test_a_stack_of_experts_moves_as_matrices_one_by_one():
    experts = torch.randn(4, 48, 64, generator=torch.Generator().manual_seed(0))
    together = muon_step(experts, 2)
    for expert, got in zip(experts, together):
        for half, part in zip(expert.chunk(2), got.chunk(2)):
            torch.testing.assert_close(part, muon_step(half, 1), rtol=1e-4, atol=1e-5)
    assert issubclass(Experts, nn.Module)


def test_a_learner_with_muon_learns_and_its_state_continues():
    batch = [pack(documents())]
    learner = build_learner(optim=MuonOptim(lr=1e-2))
    for _ in range(2):
        learner.forward_backward(batch)
        learner.optim_step()
    again = build_learner(build_policy(seed=5), optim=MuonOptim(lr=1e-2))
    again.load_state(learner.state())
    for each in (learner, again):
        each.forward_backward(batch)
        each.optim_step()
    for (name, ours), theirs in zip(again.policy.named_parameters(), learner.policy.parameters()):
        assert torch.equal(ours, theirs), name


# -- sign SGD --


def test_a_step_is_lr_in_the_direction_of_the_sign():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    idle = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1e-9, -5.0, 0.0])
    weights = MasterWeights(nn.ParameterList([weight, idle]), torch.float32)
    optimizer = build_optimizer(weights, SignSgdOptim(lr=0.1, weight_decay=0.5))
    optimizer.step()
    expected = torch.tensor([1.0, -2.0, 3.0]) * 0.95 - 0.1 * torch.tensor([1.0, -1.0, 0.0])
    assert torch.equal(weight.detach(), expected) and torch.equal(idle.detach(), torch.ones(2))
    assert not optimizer.state_dict()["state"]
