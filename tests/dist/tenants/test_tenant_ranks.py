"""Tenants of a backbone that is sharded over ranks, which may split the rows too: as on one rank, and as alone."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from ranks import run_ranks
from tenant_ranks import NUM_TENANTS
from tenant_runs import assert_close, assert_equal, build_tenants, cases, create, train, weights_of

from stretto.models.lora import load_adapter

pytestmark = pytest.mark.heavy


@functools.cache
def on_one_rank(kind):
    torch.set_num_threads(1)
    tenants = build_tenants(kind)
    create(tenants, cases(NUM_TENANTS))
    metrics = train(tenants, cases(NUM_TENANTS))
    return metrics, {case.spec.name: weights_of(tenants, case.spec.name) for case in cases(NUM_TENANTS)}


CASES = [(2, 1, "auto", "dense"), (2, 1, "auto", "moe"), (2, 2, "auto", "dense")]
SLOW = [
    (2, 2, "auto", "moe"),
    *((*mesh, kind) for mesh in ((4, 1, "auto"), (4, 2, "ring")) for kind in ("dense", "moe")),
]


@pytest.fixture(
    scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def results(request, tmp_path_factory):
    """(ranks, ranks of cp), kind of policy, its folder, and what its ranks have found."""
    folder, (world_size, cp, style, kind) = tmp_path_factory.mktemp("ranks"), request.param
    run_ranks(
        "tenants/tenant_ranks.py",
        folder,
        str(cp),
        style,
        kind,
        world_size=world_size,
        log=folder / "log",
        deadline_s=400.0,
    )
    return (world_size, cp), kind, folder / kind, torch.load(folder / f"{kind}.pt", weights_only=False)


def test_tenants_end_on_several_ranks_as_on_one(results):
    _, kind, _, found = results
    metrics, wanted = on_one_rank(kind)
    for how in ("own", "mixed"):
        for name, weights in wanted.items():
            assert_close(found[how][name], weights)
        for ours, theirs in zip(found[f"metrics_{how}"], metrics, strict=True):
            for name, of_tenant in theirs.items():
                for key in ("loss/mean", "optim/grad_norm", "optim/lr", "step"):
                    assert ours[name][key] == pytest.approx(of_tenant[key], rel=1e-5, abs=1e-7), (name, key)
    assert all(of_rank == found["ranks"][0] for of_rank in found["ranks"])


def test_a_tenant_alone_on_these_ranks_ends_bit_for_bit_alike(results):
    *_, found = results
    assert_equal(found["own"]["run-2"], found["alone"])


def test_what_one_rank_cannot_compute_is_an_error_of_that_tenant_on_all(results):
    (world_size, cp), *_, found = results
    errors = found["errors"]
    assert "token id 40" in errors["of run-0"]
    assert errors["of run-1"] is None and errors["step"] is None and errors["moved"] == "run-1"
    assert errors["scored"] == ",".join(["0"] * (world_size - cp) + ["4"] * cp)


def test_a_tenant_of_several_ranks_is_saved_loaded_and_exported(results):
    *_, folder, found = results
    assert found["continued"]
    assert load_adapter(folder / "adapter").rank == 4
