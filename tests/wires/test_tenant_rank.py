"""A rank of a training service in a process of its own: operations there, answers back, until the hub is gone."""

from __future__ import annotations

import asyncio

import numpy as np
from peers import peer
from ports import free_port
from tenant_runs import assert_equal, batch_of, build_tenants, cases, create, train, weights_of

from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.models.lora import load_adapter
from stretto_service.wires.operations import CreateTenant, ExportAdapter, OptimStep, Pass, Shutdown, SumLoss, TenantWork
from stretto_service.wires.tenants import TenantServer

RANK = """
import sys
sys.path[:0] = sys.argv[2].split(",")
from tenant_runs import build_tenants
from stretto.base.errors import StrettoError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.control import Register
from stretto.trainer.process import stop_on_signal
from stretto_service.tenants.main import run
from stretto_service.wires.tenants import TenantClient
import torch

torch.set_num_threads(1)
cfg = ControlSection(port=int(sys.argv[1]), heartbeat_s=0.05, dead_after_s=120)
client = TenantClient(cfg, "service", Secret("s" * 32))
client.register(Register(rank=0, world_size=1))
print("registered", flush=True)
try:
    with stop_on_signal() as interrupt:
        run(build_tenants("moe"), client, interrupt)
    print("ended", flush=True)
except StrettoError as error:
    print(f"over: {error}", flush=True)
client.close()
"""


def run(body):
    """Run the hub's side against a rank in another process."""
    section = ControlSection(port=free_port(), heartbeat_s=0.05, dead_after_s=120, register_timeout_s=120)

    async def main(rank):
        server = TenantServer(section, "service", Secret("s" * 32))
        await server.open()
        try:
            await server.wait_registered()
            await body(server, rank)
        finally:
            await server.close()

    with peer(RANK, section.port, paths()) as rank:
        asyncio.run(main(rank))


def paths() -> str:
    import tenant_runs

    return tenant_runs.__file__.rpartition("/")[0]


def test_a_rank_trains_what_the_hub_asks_ahead_of_the_answers(tmp_path):
    some = cases(3)

    async def body(server, rank):
        futures = [await server.submit(CreateTenant(spec=case.spec)) for case in some]
        for step in range(2):
            works = tuple(
                TenantWork(tenant=c.spec.name, micro_batches=tuple(batch_of(c, step)[0]), loss=c.loss) for c in some
            )
            futures.append(await server.submit(Pass(works=works)))
            futures += [await server.submit(OptimStep(tenant=c.spec.name)) for c in some]
        scored = TenantWork(
            tenant="run-0",
            micro_batches=tuple(batch_of(some[0], 0)[0]),
            sum_loss=SumLoss(type="cross_entropy"),
            is_forward_only=True,
            wants_logprobs=True,
        )
        futures.append(await server.submit(Pass(works=(scored,))))
        directory = str(tmp_path / "adapter")
        futures.append(await server.submit(ExportAdapter(tenant="run-1", directory=directory)))
        answers = [(await future)[0] for future in futures]
        for done in answers:
            assert all(result.error is None for result in done.results.values()), done
        steps = {name: result.metrics["step"] for done in answers[-5:-2] for name, result in done.results.items()}
        assert steps == dict.fromkeys(("run-0", "run-1", "run-2"), 2)
        await server.execute(Shutdown(reason="test"))
        assert rank.line() == "registered" and rank.line() == "ended"
        rank.end()
        here = build_tenants("moe")
        create(here, some)
        train(here, some, range(2))
        same = here.execute(Pass(number=1, works=(scored,))).results["run-0"].logprobs
        for ours, theirs in zip(answers[-2].results["run-0"].logprobs, same, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        here.execute(ExportAdapter(number=1, tenant="run-1", directory=str(tmp_path / "here")))
        found, wanted = (load_adapter(tmp_path / name).tensors() for name in ("adapter", "here"))
        assert_equal(dict(found), dict(wanted))
        assert weights_of(here, "run-1")

    run(body)


def test_a_rank_ends_with_its_hub():
    async def body(server, rank):
        await server.execute(OptimStep(tenant="nobody"))
        assert await asyncio.to_thread(rank.line) == "registered"
        await server.close()
        assert "ended while this rank was still working" in await asyncio.to_thread(rank.line)

    run(body)
