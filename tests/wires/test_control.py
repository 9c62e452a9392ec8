"""Trainer and orchestrator know of each other, miss no message, and notice when the other one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import pytest
import zmq
from peers import free_port, peer

from stretto.base.errors import EngineError, WireError
from stretto.config.transport import ControlSection
from stretto.records import codec
from stretto.records.codec import encode
from stretto.records.control import (
    Bye,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    Register,
    StepDone,
    Stop,
    VersionLoaded,
    VersionReady,
)
from stretto.records.weights import TensorEntry, WeightManifest
from stretto.transports.control import (
    MESSAGE,
    REGISTER,
    RESEND_AFTER_S,
    ControlClient,
    ControlServer,
    Event,
    Link,
)

MANIFEST = WeightManifest(
    version=3,
    transport="shm",
    location="/dev/shm",
    shards=("a",),
    tensors=(TensorEntry("w", "float32", (2, 3), 0, 64, 24),),
    checksum=7,
)
EVERY_MESSAGE = [
    StepDone(step=1, metrics={"loss": 0.5}, num_tokens=9, time_s=1.0, wait_s=0.5),
    VersionReady(manifest=MANIFEST),
    VersionLoaded(version=3),
    CheckpointSaved(step=1),
    CheckpointComplete(step=1),
    Stop(reason="Ctrl-C", save=False),
    Failed(reason="out of memory"),
]


@pytest.fixture
def cfg() -> ControlSection:
    return ControlSection(port=free_port(), heartbeat_s=0.05, dead_after_s=0.6, register_timeout_s=10)


@contextlib.asynccontextmanager
async def opened(cfg: ControlSection, run_id: str = "run", resume_step: int | None = None) -> AsyncIterator:
    server = ControlServer(cfg, run_id, resume_step=resume_step)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def joined(
    cfg: ControlSection, server: ControlServer, rank: int = 0, world_size: int = 1
) -> AsyncIterator:
    client = ControlClient(cfg, "run")
    await asyncio.to_thread(client.register, Register(rank=rank, world_size=world_size))
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


async def test_a_rank_is_told_where_to_resume_and_the_server_who_it_is(cfg: ControlSection) -> None:
    async with opened(cfg, resume_step=40) as server:
        client = ControlClient(cfg, "run")
        told = await asyncio.to_thread(client.register, Register(rank=0, resumed_step=40, version=40))
        assert (told.run_id, told.resume_step) == ("run", 40) and told.pid and told.host
        (info,) = await server.wait_registered()
        assert (info.rank, info.resumed_step, info.version, info.run_id) == (0, 40, 40, "run")
        assert info.pid and info.host
        await asyncio.to_thread(client.send, Bye())
        await asyncio.to_thread(client.close)


async def test_every_message_arrives_once_and_in_order_both_ways(cfg: ControlSection) -> None:
    async with opened(cfg) as server, joined(cfg, server) as client:
        await server.wait_registered()
        got = []
        for message in EVERY_MESSAGE:
            await server.send(message)
            got += client.poll()
        assert got == EVERY_MESSAGE and client.poll() == []
        for message in EVERY_MESSAGE:
            await asyncio.to_thread(client.send, message)
        assert [await server.next_event() for _ in EVERY_MESSAGE] == [Event(0, m) for m in EVERY_MESSAGE]
        await asyncio.to_thread(client.send, Bye())
        assert [event async for event in server.events()] == [Event(0, Bye())]


async def test_sends_from_many_threads_all_arrive(cfg: ControlSection) -> None:
    async with opened(cfg) as server, joined(cfg, server) as client:
        sends = [asyncio.to_thread(client.send, CheckpointSaved(step=step)) for step in range(100)]
        await asyncio.gather(*sends)
        assert sorted([(await server.next_event()).message.step for _ in range(100)]) == list(range(100))
        await asyncio.to_thread(client.send, Bye())


async def test_several_ranks_register_and_are_told_apart(cfg: ControlSection) -> None:
    async with opened(cfg) as server, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(joined(cfg, server, rank, 3)) for rank in (2, 0, 1)]
        assert [info.rank for info in await server.wait_registered()] == [0, 1, 2]
        await server.send(Stop(reason="all"))
        assert all(client.wait(1) == [Stop(reason="all")] for client in clients)
        await server.send(Stop(reason="one"), rank=2)
        assert [client.poll() for client in clients] == [[Stop(reason="one")], [], []]
        for client in clients:
            await asyncio.to_thread(client.send, Bye())
        assert {event.rank async for event in server.events()} == {0, 1, 2}


async def test_the_ranks_that_are_missing_are_named(cfg: ControlSection) -> None:
    async with opened(cfg) as server:
        with pytest.raises(EngineError, match=r"no trainer rank registered at tcp://.* within 0\.1 s"):
            await server.wait_registered(0.1)
        async with joined(cfg, server, rank=1, world_size=4):
            with pytest.raises(EngineError, match=r"ranks \[0, 2, 3\] did not register"):
                await server.wait_registered(0.1)


def test_an_orchestrator_that_never_comes_is_named(cfg: ControlSection) -> None:
    client = ControlClient(cfg.model_copy(update={"register_timeout_s": 0.2}), "run")
    with pytest.raises(EngineError, match=rf"no orchestrator answered at tcp://.*{cfg.port}"):
        client.register(Register())
    client.close()


async def test_a_rank_may_come_before_the_orchestrator(cfg: ControlSection) -> None:
    client = ControlClient(cfg, "run")
    registering = asyncio.create_task(asyncio.to_thread(client.register, Register()))
    await asyncio.sleep(0.3)
    async with opened(cfg):
        assert (await registering).run_id == "run"
        await asyncio.to_thread(client.close)


async def refusal(cfg: ControlSection, info: Register, run_id: str = "run") -> str:
    client = ControlClient(cfg, run_id)
    with pytest.raises(WireError) as error:
        await asyncio.to_thread(client.register, info)
    client.close()
    return str(error.value)


async def test_who_does_not_belong_is_refused_with_the_reason(cfg: ControlSection) -> None:
    async with opened(cfg) as server, joined(cfg, server, 0, 2):
        reason = await refusal(cfg, Register(rank=1, world_size=2), run_id="other")
        assert "of run 'other', the orchestrator of run 'run'" in reason
        assert "rank 0 is taken by trainer rank 0 (pid" in await refusal(cfg, Register(rank=0, world_size=2))
        assert "world_size 5, trainer rank 0" in await refusal(cfg, Register(rank=1, world_size=5))
        assert "rank 2 is not below" in await refusal(cfg, Register(rank=2, world_size=2))


async def test_another_schema_is_refused_with_both_numbers(
    cfg: ControlSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(cfg):
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        monkeypatch.setattr(codec, "SCHEMA", codec.SCHEMA + 1)
        frames = encode(Register(run_id="run"))
        monkeypatch.undo()
        await dealer.send_multipart([REGISTER, b"", *frames])
        reason = (await dealer.recv_multipart())[-1].decode()
        assert f"schema {codec.SCHEMA + 1}, this process reads schema {codec.SCHEMA}" in reason
        assert "this process is older" in reason
        dealer.close(linger=0)
        context.term()


async def test_a_rank_that_said_bye_may_be_silent(cfg: ControlSection) -> None:
    async with opened(cfg) as server:
        async with joined(cfg, server) as client:
            await asyncio.to_thread(client.send, Bye())
        assert (await server.next_event()).message == Bye()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.next_event(), 3 * cfg.dead_after_s)


@pytest.mark.parametrize("last_word", [Bye(), Failed(reason="out of memory")])
async def test_nobody_waits_for_an_answer_of_a_rank_that_has_said_its_last_word(
    cfg: ControlSection, last_word: Bye | Failed
) -> None:
    async with opened(cfg.model_copy(update={"dead_after_s": 20.0})) as server:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        await dealer.send_multipart([REGISTER, b"", *encode(Register(run_id="run"))])
        await server.wait_registered()
        sending = asyncio.create_task(server.send(VersionLoaded(version=1)))
        await asyncio.sleep(2 * cfg.heartbeat_s)
        assert not sending.done()
        await dealer.send_multipart([MESSAGE, (1).to_bytes(8, "little"), *encode(last_word)])
        await asyncio.wait_for(sending, 2)
        assert (await server.next_event()).message == last_word
        dealer.close(linger=0)
        context.term()


async def test_an_orchestrator_that_ends_early_ends_every_call_of_the_rank(cfg: ControlSection) -> None:
    async with opened(cfg) as server, joined(cfg, server) as client:
        await server.wait_registered()
        waiting = asyncio.create_task(asyncio.to_thread(client.wait, 30))
        await server.close()
        with pytest.raises(EngineError, match=r"orchestrator \(pid \d+ on .*\) ended while"):
            await waiting
        for call in (client.poll, lambda: client.send(Bye())):
            with pytest.raises(EngineError, match="ended while"):
                call()


async def test_a_loop_that_was_held_up_does_not_take_the_rank_for_dead(cfg: ControlSection) -> None:
    patient = cfg.model_copy(update={"dead_after_s": 20.0})  # the rank, which hears nothing meanwhile
    async with opened(cfg) as server, joined(patient, server) as client:
        await server.wait_registered()
        time.sleep(2 * cfg.dead_after_s)  # blocks the orchestrator's event loop, as a long computation would
        await asyncio.sleep(4 * cfg.heartbeat_s)
        await server.send(Stop(reason="still there"))
        assert Stop(reason="still there") in client.wait(1)
        await asyncio.to_thread(client.send, Bye())


async def test_a_taken_port_is_named(cfg: ControlSection) -> None:
    async with opened(cfg):
        with pytest.raises(EngineError, match=f"cannot bind.*{cfg.port}.*control.port"):
            await ControlServer(cfg, "run").open()


async def test_garbage_on_the_port_does_no_harm(cfg: ControlSection) -> None:
    async with opened(cfg) as server:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        for frames in (
            [b""],
            [b"?"],
            [MESSAGE, b"\0" * 8, b"x"],
            [REGISTER, b"", b"STRF\x01\x00\xc1"],
            [REGISTER, b""],
        ):
            await dealer.send_multipart(frames)
        async with joined(cfg, server) as client:
            await asyncio.to_thread(client.send, CheckpointSaved(step=1))
            assert await server.next_event() == Event(0, CheckpointSaved(step=1))
            await asyncio.to_thread(client.send, Bye())
        dealer.close(linger=0)
        context.term()


@pytest.mark.parametrize("seed", range(20))
def test_a_link_over_a_lossy_wire_delivers_once_and_in_order(seed: int) -> None:
    """Messages and acknowledgements are lost, doubled and reordered; time passes; in the end all is there."""
    rng = random.Random(seed)
    sender, receiver = Link(0.0), Link(0.0)
    now, wire, got = 0.0, [], []
    to_send = list(range(1, 21))
    while sender.unacked or to_send:
        now += RESEND_AFTER_S / 3
        if to_send and rng.random() < 0.7:
            to_send.pop(0)
            wire.append(("message", sender.outgoing(Bye(), now)[0]))
        wire += [("message", int.from_bytes(frames[1], "little")) for frames in sender.due(now)]
        rng.shuffle(wire)
        arriving, wire = wire, []
        for kind, number in arriving:
            if rng.random() < 0.3:
                continue  # lost
            for _ in range(rng.choice((1, 1, 2))):
                if kind == "ack":
                    sender.acknowledged(number)
                    continue
                deliver, ack = receiver.incoming(number)
                if deliver:
                    got.append(number)
                if ack:
                    wire.append(("ack", number))
    assert got == list(range(1, 21))


# -- two processes --

TRAINER = """
import sys, time
from stretto.config.transport import ControlSection
from stretto.records.control import Bye, Register, StepDone
from stretto.transports.control import ControlClient
cfg = ControlSection(port=int(sys.argv[1]), heartbeat_s=0.05, dead_after_s=0.6, register_timeout_s=20)
client = ControlClient(cfg, "run")
client.register(Register())
print("registered", flush=True)
try:
    for step in range(1, 10_000_000):
        client.send(StepDone(step=step))
        end = time.monotonic() + float(sys.argv[2])
        while time.monotonic() < end:  # computing: only the IO thread speaks
            sum(range(1000))
        for message in client.poll():
            print(message, flush=True)
            client.send(Bye())
            client.close()
            sys.exit(0)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""

ORCHESTRATOR = """
import asyncio, sys
from stretto.config.transport import ControlSection
from stretto.transports.control import ControlServer
async def main():
    cfg = ControlSection(port=int(sys.argv[1]), heartbeat_s=0.05, dead_after_s=0.6)
    server = ControlServer(cfg, "run")
    await server.open()
    print("open", flush=True)
    async for event in server.events():
        print(event, flush=True)
asyncio.run(main())
"""


async def test_heartbeats_go_on_while_the_trainer_computes(cfg: ControlSection) -> None:
    async with opened(cfg) as server:
        with peer(TRAINER, cfg.port, 3 * cfg.dead_after_s) as trainer:
            await server.wait_registered()
            assert (await server.next_event()).message == StepDone(step=1)
            assert (await server.next_event()).message == StepDone(step=2)
            await server.send(Stop(reason="enough"))
            assert (await server.next_event()).message == Bye()
            await asyncio.to_thread(trainer.end)


async def test_a_killed_trainer_is_noticed_and_named(cfg: ControlSection) -> None:
    async with opened(cfg) as server:
        with peer(TRAINER, cfg.port, 0.01) as trainer:
            (info,) = await server.wait_registered()
            await server.next_event()
            trainer.kill()
            expected = rf"trainer rank 0 \(pid {info.pid} on {info.host}\) has been silent for 1 s"
            with pytest.raises(EngineError, match=expected):
                async with asyncio.timeout(10):
                    while True:
                        await server.next_event()
            for call in (server.send(Stop(reason="x")), server.next_event(), server.wait_registered()):
                with pytest.raises(EngineError, match=expected):
                    await call


async def test_a_killed_orchestrator_is_noticed_and_named(cfg: ControlSection) -> None:
    with peer(ORCHESTRATOR, cfg.port) as orchestrator:
        await asyncio.to_thread(orchestrator.line)
        with peer(TRAINER, cfg.port, 0.01) as trainer:
            assert await asyncio.to_thread(trainer.line) == "registered"
            assert "StepDone(step=1" in await asyncio.to_thread(orchestrator.line)
            orchestrator.kill()
            line = await asyncio.to_thread(trainer.line)
            assert line.startswith(f"EngineError orchestrator (pid {orchestrator.process.pid} on ")
            assert "silent" in line or "did not acknowledge StepDone" in line
            await asyncio.to_thread(trainer.end)


async def test_an_orchestrator_that_was_restarted_refuses_the_old_rank(cfg: ControlSection) -> None:
    patient = cfg.model_copy(update={"dead_after_s": 20.0})
    client = ControlClient(patient, "run")
    with peer(ORCHESTRATOR, cfg.port) as orchestrator:
        await asyncio.to_thread(orchestrator.line)
        await asyncio.to_thread(client.register, Register())
        orchestrator.kill()
    async with opened(cfg):
        with pytest.raises(WireError, match="orchestrator was restarted"):
            await asyncio.to_thread(client.wait, 10)
    await asyncio.to_thread(client.close)
