"""Tenants on several ranks; run by every rank.

`python tenant_ranks.py OUT CP STYLE KIND`: rank 0 writes OUT/<kind>.pt; CP ranks split each row, in this style.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from ranks import gather_anything
from tenant_runs import MODEL, batch_of, build_tenants, cases, create, train, weights_of

from stretto.trainer.ranks.mesh import Degrees, Mesh, num_ranks, process_group, training_device
from stretto_service.tenants.tenants import Tenants
from stretto_service.wires.operations import (
    CreateTenant,
    DropGradients,
    ExportAdapter,
    LoadTenant,
    OptimStep,
    Pass,
    SaveTenant,
    SumLoss,
    TenantWork,
)

NUM_TENANTS = 4


def main(out: Path, cp: int, style: str, kind: str) -> None:
    torch.set_num_threads(1)
    with process_group(120.0):
        mesh = Mesh(Degrees(dp_shard=num_ranks() // cp, cp=cp), training_device())
        model = MODEL.model_copy(update={"cp": cp, "cp_style": style})
        result = run(functools.partial(build_tenants, kind, mesh, model), mesh, out / kind)
        if mesh.is_lead:
            torch.save(result, out / f"{kind}.pt")


def run(build: Callable[[], Tenants], mesh: Mesh, folder: Path) -> dict:
    some, where = cases(NUM_TENANTS), {"rank": mesh.dp_rank, "num_ranks": mesh.degrees.dp}
    result: dict = {}
    for name, max_tokens in (("own", None), ("mixed", 10_000)):
        tenants = build()
        create(tenants, some)
        result[f"metrics_{name}"] = train(tenants, some, max_tokens=max_tokens, **where)
        result[name] = {case.spec.name: weights_of(tenants, case.spec.name) for case in some}
    result["ranks"] = [
        {n: [t.sum().item() for t in found.values()] for n, found in of_rank.items()}
        for of_rank in gather_anything(result["mixed"])
    ]
    alone = build()
    create(alone, some[2:3])
    train(alone, some[2:3], **where)
    result["alone"] = weights_of(alone, some[2].spec.name)
    result["errors"] = go_wrong(tenants, some, mesh)
    result["continued"] = save_and_load(build, tenants, some[0], folder, where)
    return result


def go_wrong(tenants, some, mesh: Mesh) -> dict[str, str | None]:
    """Data that one rank alone cannot compute, and ranks without any data."""
    work = lambda case, mbs: TenantWork(tenant=case.spec.name, micro_batches=tuple(mbs), loss=case.loss)
    rows = batch_of(some[0], 0, mesh.degrees.dp)[mesh.dp_rank]
    is_last = mesh.dp_rank == mesh.degrees.dp - 1
    bad = [replace(mb, token_ids=mb.token_ids + 4000) for mb in rows] if is_last else rows
    only_last = batch_of(some[1], 0)[0] if is_last else []
    before = {case.spec.name: weights_of(tenants, case.spec.name) for case in some}
    done = tenants.execute(Pass(number=1, works=(work(some[0], bad), work(some[1], only_last))))
    found = {name: result.error for name, result in done.results.items()}
    step = tenants.execute(OptimStep(number=1, tenant="run-1")).results["run-1"]
    moved = [name for name, old in before.items() for n, t in old.items()
             if not torch.equal(t, weights_of(tenants, name)[n])]  # fmt: skip
    forward = TenantWork(
        tenant="run-2",
        micro_batches=tuple(only_last),
        sum_loss=SumLoss(type="cross_entropy"),
        is_forward_only=True,
        wants_logprobs=True,
    )
    scored = tenants.execute(Pass(number=1, works=(forward,))).results["run-2"]
    tenants.execute(DropGradients(number=1, tenant="run-0"))
    return {
        "of run-0": found["run-0"], "of run-1": found["run-1"], "step": step.error,
        "moved": ",".join(sorted(set(moved))),
        "scored": ",".join(str(len(each)) for each in gather_anything(scored.logprobs)),
    }  # fmt: skip


def save_and_load(build: Callable[[], Tenants], tenants, case, folder: Path, where) -> bool:
    """Whether a tenant continues bit for bit from its files in another service."""
    name, path = case.spec.name, str(folder / "saved")
    for operation in (
        SaveTenant(number=1, tenant=name, path=path),
        ExportAdapter(number=1, tenant=name, directory=str(folder / "adapter")),
    ):
        assert tenants.execute(operation).results[name].error is None
    other = build()
    missing = other.execute(CreateTenant(number=1, spec=case.spec, path=str(folder / "none"))).results[name]
    assert "cannot be read" in missing.error
    for service in (other,):
        create(service, [case], path=path)
    assert other.execute(LoadTenant(number=1, tenant=name, path=path)).results[name].metrics["step"] == 3
    for service in (tenants, other):
        train(service, [case], range(3, 5), **where)
    pairs = zip(weights_of(tenants, name).values(), weights_of(other, name).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
