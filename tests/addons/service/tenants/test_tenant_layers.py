"""Products of many adapters at once equal those one after another, forward and backward."""

from __future__ import annotations

import pytest
import torch
from tiny import build_policy
from torch import nn

from stretto.config.sections.model import LoRASection
from stretto.models.lora import adapted_rows
from stretto.models.moe import Experts
from stretto.models.parts.router import Routing
from stretto_service.tenants import layers
from stretto_service.tenants.layers import Pair, TenantExperts, TenantLinear, Turn, prepare_layers

COUNTS = (5, 0, 11, 3)


def pairs_of(rows: int, columns: int, lead: tuple[int, ...] = (), seed: int = 0) -> list[Pair | None]:
    """Pairs of different ranks; the last tenant has none."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: nn.Parameter(0.2 * torch.randn(*lead, *shape, generator=generator))
    pairs = [Pair(make(rank, columns), make(rows, rank), 0.5 + rank, 0.0) for rank in (3, 8, 4)]
    return [*pairs, None]


def gradients(pairs) -> list[torch.Tensor]:
    found = []
    for pair in pairs:
        if pair is not None:
            found += [torch.zeros_like(half) if half.grad is None else half.grad.clone() for half in (pair.a, pair.b)]
            pair.a.grad = pair.b.grad = None
    return found


def looped_rows(out, x, pairs, counts):
    """The slow reference: one tenant's product after another."""
    parts = [
        part.new_zeros(len(part), out.shape[1])
        if pair is None
        else adapted_rows(part, pair.a, pair.b, pair.scaling, 0.0)
        for part, pair in zip(x.split(counts), pairs, strict=True)
    ]
    return out + torch.cat(parts)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("counts", [COUNTS, (4, 4, 4, 4), (6, 6, 6, 0), (1, 90, 40, 9)])
def test_a_grouped_product_equals_one_product_per_tenant(is_grouped, counts, monkeypatch):
    monkeypatch.setattr(layers, "_use_grouped_mm", lambda x, num_out: is_grouped)
    torch.manual_seed(0)
    pairs = pairs_of(24, 16)
    x, base = torch.randn(sum(counts), 16, requires_grad=True), torch.randn(16, 24)
    weights = torch.randn(sum(counts), 24)
    results = []
    for function in (layers.add_rows, looped_rows):
        out = function(x @ base, x, pairs, counts)
        (out * weights).sum().backward()
        results.append([out.detach(), x.grad.clone(), *gradients(pairs)])
        x.grad = None
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    if counts == COUNTS:
        last = slice(-COUNTS[-1], None)
        assert torch.equal(results[0][0][last], (x @ base)[last].detach()), "a tenant without an adapter"
        assert not results[0][4].any() and not results[0][5].any(), "gradients of a tenant without rows"


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), COUNTS])
def test_what_is_not_finite_stays_with_its_tenant(counts):
    pairs = pairs_of(24, 16)
    with torch.no_grad():
        pairs[0].a.fill_(torch.nan)
        pairs[0].b.fill_(torch.inf)
    x = torch.randn(sum(counts), 16, requires_grad=True)
    out = layers.add_rows(x @ torch.randn(16, 24), x, pairs, counts)
    out.sum().backward()
    assert not out[: counts[0]].isfinite().any() and out[counts[0] :].isfinite().all()
    assert x.grad[counts[0] :].isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(pairs)[2:])


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_scale_is_not_rounded_to_16_bits(is_grouped, monkeypatch):
    monkeypatch.setattr(layers, "_use_grouped_mm", lambda x, num_out: is_grouped)
    scaling = 1 + 1 / 256  # bfloat16 has 1 and 1 + 1/128
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(64, 16, generator=generator) + 1).bfloat16()
    one = torch.eye(16).bfloat16()
    pairs = [Pair(one, one, scaling, 0.0)] * 2
    found = layers.add_rows(torch.zeros_like(x), x, pairs, (32, 32))
    torch.testing.assert_close(found, (x.float() * scaling).bfloat16(), rtol=0, atol=0)


def test_a_pass_without_gradients_leaves_none():
    pairs = pairs_of(24, 16)
    x = torch.randn(sum(COUNTS), 16)
    with torch.no_grad():
        out = layers.add_rows(torch.zeros(sum(COUNTS), 24), x, pairs, COUNTS)
        torch.testing.assert_close(out, looped_rows(torch.zeros_like(out), x, pairs, COUNTS))
    assert not out.requires_grad and not any(grad.any() for grad in gradients(pairs))


@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_a_tenant_are_those_of_a_layer_with_its_adapter_alone(has_bias):
    base = nn.Linear(16, 24, bias=has_bias).requires_grad_(False)
    turn = Turn()
    layer = TenantLinear(base, turn)
    pairs = pairs_of(24, 16)
    layer.pairs = {f"t{i}": pair for i, pair in enumerate(pairs) if pair is not None}
    x = torch.randn(sum(COUNTS), 16)
    turn.set(["t0", "t1", "t2", "t3"], COUNTS, COUNTS)
    mixed = layer(x).split(COUNTS)
    for i, rows in enumerate(x.split(COUNTS)):
        turn.set([f"t{i}"], [len(rows)], [len(rows)])
        torch.testing.assert_close(mixed[i], layer(rows), rtol=1e-5, atol=1e-5)
    turn.set()
    assert torch.equal(layer(x), base(x))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"][: 1 + has_bias]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_experts_give_every_tenant_its_own_adapter(is_grouped, monkeypatch):
    monkeypatch.setattr(layers, "_use_grouped_mm", lambda x, num_out: is_grouped)
    policy = build_policy(
        family="qwen3_moe", num_experts=4, num_experts_per_tok=2, hidden_size=32, intermediate_size=64
    )
    turn = prepare_layers(policy).turn
    mixture = policy.model.layers[0].mlp
    experts = mixture.experts
    assert isinstance(experts, TenantExperts) and isinstance(experts, Experts)
    first, second = tuple(experts.gate_up_proj.shape[1:]), tuple(experts.down_proj.shape[1:])
    gate_up, down = pairs_of(*first, lead=(4,)), pairs_of(*second, lead=(4,), seed=1)
    for i, (a, b) in enumerate(zip(gate_up, down)):
        if a is not None:
            experts.pairs[f"t{i}"] = {"gate_up_proj": a, "down_proj": b}
    x = torch.randn(sum(COUNTS), 32)
    weights = torch.randn(sum(COUNTS), 32)
    turn.set(["t0", "t1", "t2", "t3"], COUNTS, COUNTS)
    mixed = mixture(x, 0, Routing(), None)
    (mixed * weights).sum().backward()
    together = gradients([*gate_up, *down])
    for i, (rows, own) in enumerate(zip(x.split(COUNTS), weights.split(COUNTS))):
        turn.set([f"t{i}"], [len(rows)], [len(rows)])
        if not len(rows):
            continue
        out = mixture(rows, 0, Routing(), None)
        torch.testing.assert_close(mixed.split(COUNTS)[i], out, rtol=1e-4, atol=1e-4)
        if out.requires_grad:
            (out * own).sum().backward()
    for ours, theirs in zip(together, gradients([*gate_up, *down]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_prepared_policy_has_the_names_and_values_of_before():
    plain, prepared = build_policy(), build_policy()
    found = prepare_layers(prepared)
    assert list(dict(prepared.named_parameters())) == list(dict(plain.named_parameters()))
    assert not any(parameter.requires_grad for parameter in prepared.parameters())
    assert {path.rpartition(".")[2] for path in found.by_path} <= set(LoRASection().target_modules)
    assert "lm_head" not in found.by_path
