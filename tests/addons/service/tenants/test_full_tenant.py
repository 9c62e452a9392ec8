"""A tenant that trains all weights is a run without an adapter: its bits, its state, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from pydantic import TypeAdapter
from tenant_runs import (
    KINDS,
    MODEL,
    Case,
    assert_equal,
    build_tenants,
    cases,
    create,
    train,
    train_alone,
    weights_alone,
    weights_of,
)
from tiny import build_policy

from stretto.config.sections.algorithm import Loss
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import Optim, Scheduler
from stretto.models import hub
from stretto.records.weight_manifest import load_manifest
from stretto.trainer.learner import Learner
from stretto.trainer.state.checkpoint import SavedState
from stretto.transports.weights import receive
from stretto_service.tenants.tenants import Tenants
from stretto_service.wires.operations import (
    CreateTenant,
    ExportAdapter,
    LoadTenant,
    OptimStep,
    RemoveTenant,
    SaveTenant,
)

pytestmark = pytest.mark.heavy


def full(number: int = 0) -> Case:
    case = cases()[number]
    return Case(replace(case.spec, rank=0, target_modules=None), case.loss)


def build_learner(case: Case, kind: str, model: ModelSection = MODEL) -> Learner:
    """The same run alone, as `rl` without [model.lora] trains it."""
    return Learner(
        build_policy(**KINDS[kind]).to(hub.DTYPES[model.dtype]),
        model=model,
        optim=TypeAdapter(Optim).validate_python(case.spec.optim),
        scheduler=TypeAdapter(Scheduler).validate_python(case.spec.scheduler),
        max_steps=case.spec.max_steps,
        loss=TypeAdapter(Loss).validate_python(case.loss),
    )


def policy_of(tenants: Tenants) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in tenants.policy.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "change", "number"),
    [("dense", {}, 0), ("dense", {"dtype": "bfloat16"}, 4), ("moe", {}, 5)],
    ids=["dense", "bfloat16 with float32 copies", "moe"],
)
def test_its_steps_are_those_of_a_learner_bit_for_bit(kind: str, change: dict, number: int) -> None:
    case, model = full(number), MODEL.model_copy(update=change)
    tenants = build_tenants(kind, model=model, trains_all=True)
    create(tenants, [case])
    metrics = train(tenants, [case])
    learner = build_learner(case, kind, model)
    wanted = train_alone(learner, case)
    assert_equal(weights_of(tenants, case.spec.name), weights_alone(learner))
    assert_equal(policy_of(tenants), {n: p.detach() for n, p in learner.policy.named_parameters()})
    for ours, theirs in zip(metrics, wanted):
        for key in ("loss/mean", "optim/grad_norm", "optim/lr"):
            assert ours[case.spec.name][key] == pytest.approx(theirs[key], rel=1e-6), key


def test_its_state_goes_on_in_another_tenant_and_in_a_learner(tmp_path: Path) -> None:
    case = full()
    name, path = case.spec.name, str(tmp_path / "state")
    tenants = build_tenants("dense", trains_all=True)
    create(tenants, [case])
    train(tenants, [case], range(2))
    assert tenants.execute(SaveTenant(tenant=name, path=path)).results[name].error is None
    train(tenants, [case], range(2, 3))
    wanted = weights_of(tenants, name)
    loaded = LoadTenant(tenant=name, path=path, with_optimizer=True)
    assert tenants.execute(loaded).results[name].error is None
    train(tenants, [case], range(2, 3))
    assert_equal(weights_of(tenants, name), wanted)
    again = build_tenants("dense", trains_all=True)
    create(again, [case], path=path)
    train(again, [case], range(2, 3))
    assert_equal(weights_of(again, name), wanted)
    learner = build_learner(case, "dense")
    learner.load_state(SavedState(Path(path), advice=""))
    train_alone(learner, case, range(2, 3))
    assert_equal(weights_alone(learner), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_one_starts_with_the_models_own_weights(dtype: str) -> None:
    first, second, model = full(0), full(2), MODEL.model_copy(update={"dtype": dtype})
    tenants = build_tenants("dense", model=model, trains_all=True)
    own = policy_of(tenants)
    create(tenants, [first])
    name = second.spec.name
    refused = tenants.execute(CreateTenant(spec=second.spec)).results[name]
    assert f"all weights are those of {first.spec.name}" in refused.error
    train(tenants, [first])
    assert not torch.equal(policy_of(tenants)["model.norm.weight"], own["model.norm.weight"])
    tenants.execute(RemoveTenant(tenant=first.spec.name))
    assert_equal(policy_of(tenants), own)
    # One that cannot be created leaves nothing behind.
    broken = tenants.execute(CreateTenant(spec=second.spec, path="/nowhere")).results[name]
    assert broken.error is not None
    assert_equal(policy_of(tenants), own)
    create(tenants, [second])
    train(tenants, [second])
    learner = build_learner(second, "dense", model)
    train_alone(learner, second)
    assert_equal(weights_of(tenants, name), weights_alone(learner))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_what_it_exports_is_a_model_and_a_version_for_engines(kind: str, tmp_path: Path) -> None:
    case, directory = full(), tmp_path / "runs" / "v1"
    tenants = build_tenants(kind, trains_all=True)
    create(tenants, [case])
    train(tenants, [case])
    exported = ExportAdapter(tenant=case.spec.name, directory=str(directory))
    assert tenants.execute(exported).results[case.spec.name].error is None
    model = hub.load_model(directory, dtype=torch.float32, device="cpu")
    wanted = policy_of(tenants)
    assert_equal({name: p.detach() for name, p in model.named_parameters()}, wanted)
    other = build_policy(**KINDS[kind])
    with receive(load_manifest(directory)) as tensors, torch.no_grad():
        hub.load_tensors(other, tensors)
    assert_equal({name: p.detach() for name, p in other.named_parameters()}, wanted)


def test_an_adapter_and_all_weights_are_not_mistaken_for_each_other() -> None:
    adapter, whole = cases(1)[0], full()
    refused = build_tenants("dense").execute(CreateTenant(spec=whole.spec)).results["run-0"]
    assert "rank = 0" in refused.error and "service.full_finetuning" in refused.error
    tenants = build_tenants("dense", trains_all=True)
    refused = tenants.execute(CreateTenant(spec=adapter.spec)).results["run-0"]
    assert "this service trains all weights" in refused.error
    create(tenants, [whole])
    refused = tenants.execute(OptimStep(tenant="run-0")).results["run-0"]
    assert "there is no gradient" in refused.error
