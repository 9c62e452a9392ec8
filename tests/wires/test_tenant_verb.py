"""`stretto tenants`, the ranks of a training service as a launcher starts them, against a hub in this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest
from ports import free_port

from stretto.base.errors import EngineError
from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.config.sections.transport import ControlSection
from stretto.records.sample import MicroBatch
from stretto_service.wires.operations import (
    AdamSettings,
    CreateTenant,
    OptimStep,
    Pass,
    Shutdown,
    SumLoss,
    TenantSpec,
    TenantWork,
)
from stretto_service.wires.tenants import TenantServer

NAMES = ("a", "b")


@asynccontextmanager
async def service(folder, world_size):
    """A hub's server and the processes of its ranks, which have registered."""
    control, meeting = free_port(), free_port()
    section = ControlSection(port=control, heartbeat_s=0.2, dead_after_s=10.0, register_timeout_s=120)
    run = RunDir(folder / "svc")
    run.path.mkdir(parents=True)
    server = TenantServer(section, "svc", load_secret(run), world_size=world_size)
    await server.open()
    keys = {
        "output-dir": folder, "run.name": "svc", "model.scratch.hidden-size": 32, "control.port": control,
        "control.heartbeat-s": 0.2, "control.dead-after-s": 10, "trainer.num-ranks": world_size,
    }  # fmt: skip
    words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "stretto", "tenants", *words],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    try:
        await server.wait_registered()
        yield server, ranks
    finally:
        await server.close()
        for rank in ranks:
            rank.kill()
            rank.wait()


def row(num_tokens: int = 40) -> MicroBatch:
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        token_ids=np.arange(num_tokens, dtype=np.int32) % 20 + 3,
        cu_seqlens=np.array([0, num_tokens], np.int32),
        loss_mask=np.arange(num_tokens) > 0,
        logprobs=zeros - 2,
        advantages=zeros + 1,
        temperatures=zeros + 1,
        sample_ids=("a/0",),
        envs=("env",),
    )


def both() -> Pass:
    loss = SumLoss(type="importance_sampling")
    works = tuple(TenantWork(tenant=name, micro_batches=(row(),), sum_loss=loss) for name in NAMES)
    return Pass(works=works, max_tokens=500)


async def test_ranks_train_tenants_and_end_when_asked(tmp_path):
    async with service(tmp_path, 2) as (server, ranks):
        for rank, name in enumerate(NAMES, 3):
            (first, second) = await server.execute(CreateTenant(spec=TenantSpec(name=name, rank=rank)))
            assert first.results == second.results and first.results[name].error is None
        losses = []
        for _ in range(3):
            first, second = await server.execute(both())
            assert first.results == second.results
            losses.append(first.results["a"].metrics["loss"])
            for name in NAMES:
                ends = await server.execute(OptimStep(tenant=name, adam=AdamSettings(lr=1e-2)))
        assert losses[0] > losses[1] > losses[2]
        assert [done.results["b"].metrics["step"] for done in ends] == [3, 3]
        await server.execute(Shutdown(reason="test"))
        assert [await asyncio.to_thread(rank.wait, 60) for rank in ranks] == [0, 0]


@pytest.mark.slow
async def test_a_rank_that_is_killed_ends_the_service_of_all_ranks(tmp_path):
    async with service(tmp_path, 2) as (server, ranks):
        await server.execute(CreateTenant(spec=TenantSpec(name="a")))
        await server.execute(CreateTenant(spec=TenantSpec(name="b")))
        ranks[1].kill()
        with pytest.raises(EngineError, match="trainer rank"):
            await asyncio.wait_for(await server.submit(both()), 60)
        await server.close()
        assert await asyncio.to_thread(ranks[0].wait, 60) != 0
