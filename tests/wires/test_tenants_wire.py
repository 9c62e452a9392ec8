"""The wire between hub and trainer ranks: order, several ranks, a rank that dies, a hub that ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from peers import peer
from ports import free_port

from stretto.base.errors import EngineError, WireError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.control import Register
from stretto.records.sample import MicroBatch
from stretto_service.wires.operations import ExportAdapter, OptimStep, Pass, Shutdown, TenantWork
from stretto_service.wires.tenants import TenantClient, TenantServer

SECRET = "s" * 32
RANK = """
import sys
import numpy as np
from stretto.base.errors import EngineError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.control import Register
from stretto_service.wires.operations import Done, ExportAdapter, Pass, RankFailed, Shutdown, TenantResult
from stretto_service.wires.tenants import TenantClient

port, rank, world_size, dead_after_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
client = TenantClient(
    ControlSection(port=port, heartbeat_s=0.05, dead_after_s=dead_after_s), "service", Secret("s" * 32)
)
print(client.register(Register(rank=rank, world_size=world_size)).run_id, flush=True)
seen = []
while True:
    try:
        operation = client.receive(60.0)
    except EngineError as error:
        print(f"over: {error}", flush=True)
        break
    seen.append(operation.number)
    results = {}
    if isinstance(operation, Pass):
        for work in operation.works:
            logprobs = tuple(rank + mb.advantages for mb in work.micro_batches)
            results[work.tenant] = TenantResult(metrics={"loss": 1.0}, logprobs=logprobs)
    if isinstance(operation, ExportAdapter):
        client.flush(RankFailed(reason="out of memory"))
        break
    if isinstance(operation, Shutdown):
        client.flush(Done(number=operation.number))
        break
    client.answer(Done(number=operation.number, results=results))
print(",".join(map(str, seen)), flush=True)
client.close()
"""


def cfg(dead_after_s: float = 120.0) -> ControlSection:
    return ControlSection(port=free_port(), heartbeat_s=0.05, dead_after_s=dead_after_s, register_timeout_s=120)


def run(section, world_size, body, *, dead_after_s=120.0):
    """Run the hub's side with ranks in processes of their own."""

    async def main(ranks):
        server = TenantServer(section, "service", Secret(SECRET), world_size=world_size)
        await server.open()
        try:
            await server.wait_registered()
            await body(server, ranks)
        finally:
            await server.close()

    peers = [peer(RANK, section.port, rank, world_size, dead_after_s) for rank in range(world_size)]
    ranks = [each.__enter__() for each in peers]
    try:
        asyncio.run(main(ranks))
    finally:
        for each in peers:
            each.__exit__(None, None, None)


def micro_batch_of(num_tokens: int) -> MicroBatch:
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        cu_seqlens=np.array([0, num_tokens], np.int32),
        loss_mask=np.arange(num_tokens) > 0,
        logprobs=zeros,
        advantages=np.arange(num_tokens, dtype=np.float32),
        temperatures=zeros + 1,
        sample_ids=("a/0",),
        envs=("env",),
    )


def work(rank: int) -> TenantWork:
    return TenantWork(tenant="a", micro_batches=(micro_batch_of(5000 + rank),), counts=(1.0, 1.0, 1.0, 1.0))


async def test_messages_to_a_refused_rank_name_the_hub():
    section = cfg()
    server = TenantServer(section, "service", Secret(SECRET), world_size=2)
    await server.open()
    client = TenantClient(section, "service", Secret(SECRET))
    with pytest.raises(WireError, match=r"^the hub at .* refused: .* world_size 3, the hub expects 2 ranks"):
        await asyncio.to_thread(client.register, Register(rank=0, world_size=3))
    client.close()
    await server.close()


def test_every_rank_executes_all_operations_in_order_and_answers_with_its_own_arrays():
    async def body(server, ranks):
        passes = [await server.submit([Pass(works=(work(rank),)) for rank in range(2)]) for _ in range(20)]
        step = await server.submit(OptimStep(tenant="a"))
        for number, future in enumerate(passes, 1):
            answers = await future
            assert [done.number for done in answers] == [number] * 2
            for rank, done in enumerate(answers):
                (logprobs,) = done.results["a"].logprobs
                want = rank + work(rank).micro_batches[0].advantages
                np.testing.assert_array_equal(logprobs, want)
        assert [done.number for done in await step] == [21, 21]
        assert len(await server.execute(Shutdown(reason="test"))) == 2
        for rank in ranks:
            assert rank.line() == "service"
            assert rank.line() == ",".join(str(n) for n in range(1, 23))
            rank.end()

    run(cfg(), 2, body)


def test_a_rank_that_is_killed_ends_every_wait_with_an_error_that_names_it():
    async def body(server, ranks):
        assert await server.execute(OptimStep(tenant="a"))
        ranks[1].kill()
        future = await server.submit(OptimStep(tenant="a"))
        with pytest.raises(EngineError, match=r"trainer rank 1 .*silent"):
            await asyncio.wait_for(future, 60)
        with pytest.raises(EngineError, match=r"trainer rank 1"):
            await server.submit(OptimStep(tenant="a"))

    run(cfg(dead_after_s=2.0), 2, body)


def test_a_rank_that_fails_says_why():
    async def body(server, ranks):
        with pytest.raises(EngineError, match="trainer rank 0 failed: out of memory"):
            await server.execute(ExportAdapter(tenant="a", directory="/nowhere"))

    run(cfg(), 1, body)


def test_ranks_end_when_the_hub_ends():
    async def body(server, ranks):
        future = await server.submit(OptimStep(tenant="a"))
        await future
        await server.close()
        assert ranks[0].line() == "service"
        assert "ended while this rank was still working" in ranks[0].line()

    run(cfg(), 1, body)


def test_ranks_end_when_the_hub_is_silent():
    async def body(server, ranks):
        assert ranks[0].line() == "service"
        for task in server._tasks:
            task.cancel()
        assert "silent" in await asyncio.to_thread(ranks[0].line)

    run(cfg(), 1, body, dead_after_s=1.0)
