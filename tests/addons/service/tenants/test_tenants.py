"""A tenant among others ends as it does alone: weights, state, memory, and what goes wrong with one of them."""

from __future__ import annotations

import functools
import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tenant_runs import (
    MODEL,
    assert_close,
    assert_equal,
    batch_of,
    build_alone,
    build_tenants,
    cases,
    create,
    train,
    train_alone,
    weights_alone,
    weights_of,
)

from stretto.base.paths import RunDir
from stretto.config.sections.model import ActivationCheckpointSection
from stretto.models.lora import load_adapter
from stretto.trainer.state import checkpoint
from stretto_service.tenants.tenant import Tenant
from stretto_service.wires.operations import (
    AdamSettings,
    CreateTenant,
    DropGradients,
    ExportAdapter,
    LoadTenant,
    OptimStep,
    Pass,
    RemoveTenant,
    SaveTenant,
    TenantSpec,
    TenantWork,
)

pytestmark = pytest.mark.heavy


@functools.cache
def alone(kind: str, number: int) -> tuple[dict, list[dict]]:
    """Weights and metrics of a run that an ordinary learner trained."""
    case = cases()[number]
    learner = build_alone(case, kind)
    metrics = train_alone(learner, case)
    return weights_alone(learner), metrics


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_tenant_among_eight_ends_bit_for_bit_as_a_run_alone(kind):
    some = cases()
    tenants = build_tenants(kind)
    create(tenants, some)
    metrics = train(tenants, some)
    for number, case in enumerate(some):
        weights, wanted = alone(kind, number)
        assert_equal(weights_of(tenants, case.spec.name), weights)
        for ours, theirs in zip(metrics, wanted):
            found = ours[case.spec.name]
            for key in ("loss/mean", "optim/grad_norm", "optim/lr", "entropy/mean", "mismatch_kl/mean"):
                assert found[key] == pytest.approx(theirs[key], rel=1e-6), key


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_a_tenant_whose_tokens_share_passes_with_others_ends_as_alone(kind, max_tokens):
    some = cases()
    tenants = build_tenants(kind)
    create(tenants, some)
    train(tenants, some, max_tokens=max_tokens)
    for number, case in enumerate(some):
        assert_close(weights_of(tenants, case.spec.name), alone(kind, number)[0])


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"ac": ActivationCheckpointSection()}],
    ids=["bfloat16 with float32 copies", "blocks computed again"],
)
def test_other_dtypes_and_less_memory_give_the_bits_of_a_run_alone(change):
    some, model = cases(3), MODEL.model_copy(update=change)
    tenants = build_tenants("dense", model=model)
    create(tenants, some)
    train(tenants, some)
    for case in some:
        learner = build_alone(case, "dense", model)
        train_alone(learner, case)
        assert_equal(weights_of(tenants, case.spec.name), weights_alone(learner))


def test_dropout_is_the_same_for_a_tenant_among_others():
    some = cases(3)
    some[1] = type(some[1])(replace(some[1].spec, dropout=0.3), some[1].loss)
    together, alone = build_tenants("dense"), build_tenants("dense")
    create(together, some)
    create(alone, some[1:2])
    train(together, some, max_tokens=10_000)
    torch.rand(7)
    train(alone, some[1:2], max_tokens=10_000)
    assert_equal(weights_of(together, "run-1"), weights_of(alone, "run-1"))
    learner = build_alone(some[1], "dense")
    train_alone(learner, some[1])
    assert_equal(weights_of(together, "run-1"), weights_alone(learner))


@pytest.mark.parametrize("max_tokens", [None, 10_000])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_tenant_that_diverges_harms_none(kind, max_tokens):
    some = cases(4)
    tenants, without = build_tenants(kind), build_tenants(kind)
    create(tenants, some)
    create(without, some[:3])
    with torch.no_grad():
        for parameter in tenants["run-3"].weights.parameters:
            parameter.fill_(torch.nan)
    works = [
        TenantWork(tenant=case.spec.name, micro_batches=tuple(batch_of(case, 0)[0]), loss=case.loss) for case in some
    ]
    tenants.execute(Pass(number=1, works=tuple(works), max_tokens=max_tokens))
    bad = tenants.execute(OptimStep(number=2, tenant="run-3")).results["run-3"]
    assert "nan" in bad.error and "step is dropped" in bad.error
    for case in some[:3]:
        assert tenants.execute(OptimStep(number=3, tenant=case.spec.name)).results[case.spec.name].error is None
    train(tenants, some[:3], range(1, 3), max_tokens=max_tokens)
    train(without, some[:3], max_tokens=max_tokens)
    for case in some[:3]:
        check = assert_equal if max_tokens is None else assert_close
        check(weights_of(tenants, case.spec.name), weights_of(without, case.spec.name))


def test_a_gradient_that_is_not_finite_leaves_weights_and_the_next_step_as_they_were():
    case = cases(1)[0]
    tenants, clean = build_tenants("dense"), build_tenants("dense")
    create(tenants, [case])
    create(clean, [case])
    train(tenants, [case], range(1))
    train(clean, [case], range(1))
    before = weights_of(tenants, "run-0")
    bad = batch_of(case, 1)[0]
    bad = [replace(mb, advantages=np.where(mb.loss_mask, np.float32("inf"), np.float32(0))) for mb in bad]
    tenants.execute(Pass(number=1, works=(TenantWork(tenant="run-0", micro_batches=tuple(bad)),)))
    result = tenants.execute(OptimStep(number=2, tenant="run-0")).results["run-0"]
    assert "gradient's norm is nan" in result.error
    assert_equal(weights_of(tenants, "run-0"), before)
    train(tenants, [case], range(1, 3))
    train(clean, [case], range(1, 3))
    assert_equal(weights_of(tenants, "run-0"), weights_of(clean, "run-0"))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_saved_tenant_continues_bit_for_bit_in_another_service(kind, tmp_path):
    some = [type(c)(replace(c.spec, dropout=0.2 if i == 1 else 0.0), c.loss) for i, c in enumerate(cases(3))]
    tenants = build_tenants(kind)
    create(tenants, some)
    train(tenants, some, range(2))
    other = build_tenants(kind)
    for case in some:
        name, path = case.spec.name, str(tmp_path / case.spec.name)
        saved = tenants.execute(SaveTenant(number=1, tenant=name, path=path, progress={"step": 2}))
        assert saved.results[name].error is None
        found = other.execute(CreateTenant(number=1, spec=case.spec, path=path)).results[name]
        assert found.error is None and found.progress == {"step": 2} and found.metrics["step"] == 2
    train(tenants, some, range(2, 5))
    train(other, some, range(2, 5))
    for case in some:
        assert_equal(weights_of(other, case.spec.name), weights_of(tenants, case.spec.name))


def test_a_state_saved_between_a_pass_and_its_step_continues_with_the_same_dropout(tmp_path):
    [case] = cases(1)
    case = type(case)(replace(case.spec, dropout=0.3), case.loss)
    tenants, resumed = build_tenants("dense"), build_tenants("dense")
    create(tenants, [case])
    train(tenants, [case], range(1))
    work = TenantWork(tenant="run-0", micro_batches=tuple(batch_of(case, 1)[0]), loss=case.loss)
    tenants.execute(Pass(number=1, works=(work,)))
    path = str(tmp_path / "saved")
    tenants.execute(SaveTenant(number=2, tenant="run-0", path=path))
    tenants.execute(OptimStep(number=3, tenant="run-0"))
    train(tenants, [case], range(2, 3))
    create(resumed, [case], path=path)
    train(resumed, [case], range(1, 3))  # the pass is computed again
    assert_equal(weights_of(resumed, "run-0"), weights_of(tenants, "run-0"))


def test_passes_that_are_dropped_or_have_no_gradient_change_no_dropout():
    [case] = cases(1)
    case = type(case)(replace(case.spec, dropout=0.3), case.loss)
    tenants, clean = build_tenants("dense"), build_tenants("dense")
    create(tenants, [case])
    create(clean, [case])
    work = TenantWork(tenant="run-0", micro_batches=tuple(batch_of(case, 5)[0]), loss=case.loss)
    for step in range(2):
        tenants.execute(Pass(number=1, works=(work,)))
        tenants.execute(DropGradients(number=2, tenant="run-0"))
        tenants.execute(Pass(number=3, works=(replace(work, is_forward_only=True),)))
        train(tenants, [case], [step])
        train(clean, [case], [step])
    assert_equal(weights_of(tenants, "run-0"), weights_of(clean, "run-0"))


def test_a_tenant_becomes_an_ordinary_run_and_comes_back(tmp_path):
    case = cases(1)[0]
    tenants = build_tenants("moe")
    create(tenants, [case])
    train(tenants, [case], range(2))
    tenants.execute(SaveTenant(number=1, tenant="run-0", path=str(tmp_path / "saved")))
    run = RunDir(tmp_path / "run")
    shutil.copytree(tmp_path / "saved", run.checkpoint(2) / "trainer")
    learner = build_alone(case, "moe")
    assert checkpoint.load(run, learner, 2) == {} and learner.step == 2
    train_alone(learner, case, range(2, 4))
    train(tenants, [case], range(2, 4))
    assert_equal(weights_of(tenants, "run-0"), weights_alone(learner))
    checkpoint.Saver(run, is_async=False, on_written=lambda step: None).save(learner)
    path = str(run.checkpoint(4) / "trainer")
    back = tenants.execute(LoadTenant(number=1, tenant="run-0", path=path)).results["run-0"]
    assert back.error is None and back.metrics["step"] == 4
    train_alone(learner, case, range(4, 6))
    train(tenants, [case], range(4, 6))
    assert_equal(weights_of(tenants, "run-0"), weights_alone(learner))


def test_weights_alone_can_be_loaded_and_states_of_others_are_refused(tmp_path):
    first, second = cases(2)
    tenants = build_tenants("dense")
    create(tenants, [first, second])
    train(tenants, [first], range(1))
    path = str(tmp_path / "weights")
    tenants.execute(SaveTenant(number=1, tenant="run-0", path=path, with_optimizer=False))
    trained = weights_of(tenants, "run-0")
    load = lambda name, **how: tenants.execute(LoadTenant(number=1, tenant=name, path=path, **how)).results[name]
    assert "without optimizer state" in load("run-0").error
    train(tenants, [first], range(1, 2))
    assert load("run-0", with_optimizer=False).error is None
    assert_equal(weights_of(tenants, "run-0"), trained)
    before = weights_of(tenants, "run-1")
    assert "alpha / rank" in load("run-1", with_optimizer=False).error
    (tmp_path / "weights" / "state.json").write_text("{")
    assert "cannot be read" in load("run-0", with_optimizer=False).error
    assert_equal(weights_of(tenants, "run-1"), before)


def test_an_exported_adapter_is_what_peft_and_engines_load(tmp_path):
    case = cases(1)[0]
    tenants = build_tenants("moe")
    create(tenants, [case])
    train(tenants, [case], range(1))
    done = tenants.execute(ExportAdapter(number=1, tenant="run-0", directory=str(tmp_path / "adapter")))
    assert done.results["run-0"].error is None
    adapter, weights = load_adapter(tmp_path / "adapter"), weights_of(tenants, "run-0")
    assert adapter.rank == 4 and adapter.scaling == 2.0
    assert sum(len(pair) for pair in adapter.pairs.values()) == len(weights)
    for name, (a, b) in adapter.pairs.items():
        path = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        assert torch.equal(a, weights[f"{path}lora_A"]) and torch.equal(b, weights[f"{path}lora_B"])


def held_by(tenant: Tenant) -> tuple[int, int]:
    """Bytes of a tenant's weights and gradients, and of its optimizer's state without its step counts."""
    weights = [each for _, _, p in tenant._parameters() for each in (p, p.grad) if each is not None]
    state = [value for values in tenant.optimizer.state.values() for value in values.values() if value.dim()]
    return sum(each.nbytes for each in weights), sum(each.nbytes for each in state)


def test_more_tenants_than_fit_wait_elsewhere_and_train_as_if_they_had_not(tmp_path, monkeypatch):
    moves, move = [], Tenant.move
    monkeypatch.setattr(Tenant, "move", lambda self, to, *a: (moves.append((self.place, to)), move(self, to, *a)))
    some = cases(5)
    few, all_ = build_tenants("dense", max_resident=2, swap_folder=tmp_path), build_tenants("dense")
    create(few, some)
    create(all_, some)
    for step in range(3):
        for case in some:
            train(few, [case], [step])
            train(all_, [case], [step])
    assert [few[case.spec.name].place for case in some] == ["disk", "disk", "disk", "device", "device"]
    assert moves.count(("disk", "device")) >= 12 and len(list(tmp_path.iterdir())) == 3
    waiting, here = few["run-0"], few["run-4"]
    weights, state = held_by(here)
    assert held_by(waiting)[0] == 0 and weights >= 4 * here.num_parameters and state >= 8 * here.num_parameters
    for case in some:
        few.execute(DropGradients(number=1, tenant=case.spec.name))  # brings it back
        assert_equal(weights_of(few, case.spec.name), weights_of(all_, case.spec.name))
        few.execute(RemoveTenant(number=1, tenant=case.spec.name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["host", "disk"])
def test_gradients_wait_with_their_tenant(place, tmp_path):
    case = cases(1)[0]
    moved, stayed = build_tenants("dense"), build_tenants("dense")
    work = TenantWork(tenant="run-0", micro_batches=tuple(batch_of(case, 0)[0]), loss=case.loss)
    for tenants in (moved, stayed):
        create(tenants, [case])
        tenants.execute(Pass(number=1, works=(work,)))
        if tenants is moved:
            tenants["run-0"].move(place, tmp_path)
            assert tenants["run-0"].place == place
        tenants.execute(OptimStep(number=3, tenant="run-0"))
    assert_equal(weights_of(moved, "run-0"), weights_of(stayed, "run-0"))


def test_settings_of_a_step_replace_those_of_the_spec():
    spec = TenantSpec(name="a", rank=4, optim={"type": "adamw", "lr": 1e-2})
    other = replace(spec, optim={"type": "adamw", "lr": 3e-3, "betas2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
                                 "max_norm": None})  # fmt: skip
    case, plain = (type(cases(1)[0])(each, {"type": "default"}) for each in (spec, other))
    given, own = build_tenants("dense"), build_tenants("dense")
    create(given, [case])
    create(own, [plain])
    for step in range(2):
        work = TenantWork(tenant="a", micro_batches=tuple(batch_of(cases(1)[0], step)[0]))
        for tenants, adam in ((given, AdamSettings(lr=3e-3)), (own, None)):
            tenants.execute(Pass(number=1, works=(work,)))
            assert tenants.execute(OptimStep(number=1, tenant="a", adam=adam)).results["a"].error is None
    assert_equal(weights_of(given, "a"), weights_of(own, "a"))


def test_what_is_wrong_with_one_tenant_is_said_and_touches_no_other():
    good, bad = cases(2)
    tenants, clean = build_tenants("dense", max_rank=8), build_tenants("dense")
    create(tenants, [good, bad])
    create(clean, [good])
    mb = batch_of(bad, 0)[0][0]
    ids = mb.token_ids.copy()
    ids[3] = 4000
    wrong = {
        "token id 4000": replace(mb, token_ids=ids),
        "advantages has shape": replace(mb, advantages=mb.advantages[:-1]),
        "samples in": replace(mb, cu_seqlens=mb.cu_seqlens[:-1]),
        "temperature": replace(mb, temperatures=mb.temperatures * 0),
        "no tenant 'ghost'": None,
        'type = "custom"': None,
        "reference_kl.model": None,
    }
    for text, row in wrong.items():
        work = TenantWork(tenant="run-1", micro_batches=(mb if row is None else row,))
        if "ghost" in text:
            work = replace(work, tenant="ghost")
        if "custom" in text:
            work = replace(work, loss={"type": "custom", "import_path": "os:system"})
        if "reference" in text:
            work = replace(work, loss={"type": "default", "reference_kl": {"model": "/x"}})
        mine = TenantWork(tenant="run-0", micro_batches=tuple(batch_of(good, 0)[0]), loss=good.loss)
        results = tenants.execute(Pass(number=1, works=(work, mine))).results
        assert text in results[work.tenant].error and results["run-0"].error is None
        tenants.execute(DropGradients(number=1, tenant="run-0"))
    assert "no gradient" in tenants.execute(OptimStep(number=1, tenant="run-1")).results["run-1"].error
    train(tenants, [good])
    train(clean, [good])
    assert_equal(weights_of(tenants, "run-0"), weights_of(clean, "run-0"))
    for text, spec in {
        "at most rank 8": replace(good.spec, name="x", rank=9),
        "there is a tenant 'run-0'": good.spec,
        "name '../x'": replace(good.spec, name="../x"),
        "optim.adamw.lr": replace(good.spec, name="x", optim={"type": "adamw", "lr": -1}),
        "no layer of these names": replace(good.spec, name="x", target_modules=("nothing",)),
        "share of max_steps": replace(
            good.spec, name="x", max_steps=None, scheduler={"type": "linear", "warmup_steps": 0.1}
        ),
    }.items():
        assert text in tenants.execute(CreateTenant(number=1, spec=spec)).results[spec.name].error
    assert tenants.execute(RemoveTenant(number=1, tenant="nobody")).results["nobody"].error is None
