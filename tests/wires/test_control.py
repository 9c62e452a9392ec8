"""The control wire: ranks register, no message is lost, and a dead peer is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import pytest
import zmq
from peers import peer
from ports import free_port

from stretto.base.errors import EngineError, WireError
from stretto.base.ports import is_own_address
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
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
from stretto.records.weight_manifest import TensorEntry, WeightManifest
from stretto.transports.control import MAX_POSTED, WIRE, ControlClient, ControlServer, Event
from stretto.transports.guard import guard_client
from stretto.transports.stream import MESSAGE, REGISTER, RESEND_AFTER_S, Link

SECRET = Secret("s" * 32)
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
    """Nobody is thought dead, however busy the machine is."""
    return ControlSection(port=free_port(), heartbeat_s=0.05, dead_after_s=120, register_timeout_s=120)


@pytest.fixture
def brisk(cfg: ControlSection) -> ControlSection:
    """Who is silent for two seconds is dead."""
    return cfg.model_copy(update={"dead_after_s": 2.0})


@contextlib.asynccontextmanager
async def opened(cfg: ControlSection, world_size: int = 1, resume_step: int | None = None) -> AsyncIterator:
    server = ControlServer(cfg, "run", SECRET, world_size=world_size, resume_step=resume_step)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def registered_client(
    cfg: ControlSection, server: ControlServer, rank: int = 0, world_size: int = 1
) -> AsyncIterator:
    client = ControlClient(cfg, "run", SECRET)
    await asyncio.to_thread(client.register, Register(rank=rank, world_size=world_size))
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


async def test_registration_gives_the_resume_step_to_the_rank_and_its_identity_to_the_server(
    cfg: ControlSection,
) -> None:
    async with opened(cfg, resume_step=40) as server:
        client = ControlClient(cfg, "run", SECRET)
        answer = await asyncio.to_thread(client.register, Register(rank=0, resumed_step=40, version=40))
        assert (answer.run_id, answer.resume_step) == ("run", 40) and answer.pid and answer.host
        (info,) = await server.wait_registered()
        assert (info.rank, info.resumed_step, info.version, info.run_id) == (0, 40, 40, "run")
        assert info.pid and info.host
        await asyncio.to_thread(client.send, Bye())
        await asyncio.to_thread(client.close)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_every_message_arrives_once_and_in_order_both_ways(cfg: ControlSection, host: str) -> None:
    if not is_own_address(host):
        pytest.skip(f"this machine does not have {host}")
    cfg = cfg.model_copy(update={"host": host})
    async with opened(cfg) as server, registered_client(cfg, server) as client:
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
    async with opened(cfg) as server, registered_client(cfg, server) as client:
        sends = [asyncio.to_thread(client.send, CheckpointSaved(step=step)) for step in range(100)]
        await asyncio.gather(*sends)
        assert sorted([(await server.next_event()).message.step for _ in range(100)]) == list(range(100))
        await asyncio.to_thread(client.send, Bye())


async def test_posted_messages_arrive_in_order_and_before_what_is_sent_after_them(cfg: ControlSection) -> None:
    posted = [CheckpointSaved(step=step) for step in range(MAX_POSTED + 1)]
    async with opened(cfg) as server, registered_client(cfg, server) as client:
        await server.wait_registered()
        for message in posted[:-1]:
            client.post(message)  # blocks the loop that would acknowledge it
        assert len(client._link.unacked) == MAX_POSTED
        await asyncio.to_thread(client.post, posted[-1])
        await asyncio.to_thread(client.send, Bye())
        assert not client._link.unacked
        assert [event.message async for event in server.events()] == [*posted, Bye()]


async def test_a_rank_does_not_post_for_ever_to_an_orchestrator_that_takes_nothing(brisk: ControlSection) -> None:
    async with opened(brisk) as server, registered_client(brisk, server) as client:
        await server.wait_registered()
        with pytest.raises(EngineError, match=r"orchestrator .* (acknowledged none of 8 messages|silent)"):
            for step in range(MAX_POSTED + 1):
                client.post(CheckpointSaved(step=step))


async def test_several_ranks_register_and_are_distinguished(cfg: ControlSection) -> None:
    async with opened(cfg, 3) as server, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(registered_client(cfg, server, rank, 3)) for rank in (2, 0, 1)]
        assert [info.rank for info in await server.wait_registered()] == [0, 1, 2]
        await server.send(Stop(reason="all"))
        assert all(client.wait(1) == [Stop(reason="all")] for client in clients)
        await server.send(Stop(reason="one"), rank=2)
        assert [client.poll() for client in clients] == [[Stop(reason="one")], [], []]
        for client in clients:
            await asyncio.to_thread(client.send, Bye())
        assert {event.rank async for event in server.events()} == {0, 1, 2}


async def test_the_ranks_that_are_missing_are_named(cfg: ControlSection) -> None:
    async with opened(cfg, 4) as server:
        with pytest.raises(EngineError, match=r"no trainer rank registered at tcp://.* within 0\.1 s"):
            await server.wait_registered(0.1)
        async with registered_client(cfg, server, rank=1, world_size=4):
            with pytest.raises(EngineError, match=r"ranks \[0, 2, 3\] did not register"):
                await server.wait_registered(0.1)


def test_an_orchestrator_that_never_comes_is_named(cfg: ControlSection) -> None:
    client = ControlClient(cfg.model_copy(update={"register_timeout_s": 0.2}), "run", SECRET)
    with pytest.raises(EngineError, match=rf"no orchestrator answered at tcp://.*{cfg.port}"):
        client.register(Register())
    client.close()


async def test_a_rank_may_come_before_the_orchestrator(cfg: ControlSection) -> None:
    client = ControlClient(cfg, "run", SECRET)
    registering = asyncio.create_task(asyncio.to_thread(client.register, Register()))
    await asyncio.sleep(0.3)
    async with opened(cfg):
        assert (await registering).run_id == "run"
        await asyncio.to_thread(client.close)


async def refusal(cfg: ControlSection, info: Register, run_id: str = "run") -> str:
    client = ControlClient(cfg, run_id, SECRET)
    with pytest.raises(WireError) as error:
        await asyncio.to_thread(client.register, info)
    client.close()
    return str(error.value)


async def test_a_rank_that_does_not_belong_is_refused_with_the_reason(cfg: ControlSection) -> None:
    async with opened(cfg, 2) as server, registered_client(cfg, server, 0, 2):
        reason = await refusal(cfg, Register(rank=1, world_size=2), run_id="other")
        assert "of run 'other', the orchestrator of run 'run'" in reason
        assert "rank 0 is taken by trainer rank 0 (pid" in await refusal(cfg, Register(rank=0, world_size=2))
        for many in (5, 1, 2**62):
            reason = await refusal(cfg, Register(rank=1, world_size=many))
            assert f"world_size {many}, the orchestrator expects 2" in reason
        assert "rank 2 is not below" in await refusal(cfg, Register(rank=2, world_size=2))


async def test_a_client_without_the_secret_reaches_nothing_and_gets_no_answer(cfg: ControlSection) -> None:
    """Neither a client with another secret, nor plain sockets, whatever else they know about the run."""
    async with opened(cfg) as server, registered_client(cfg, server) as client:
        outsider = ControlClient(cfg, "run", Secret("x" * 32))
        with pytest.raises(WireError, match=r"rejects this process.*`secret` in its run directory.*STRETTO_RUN_SECRET"):
            await asyncio.to_thread(outsider.register, Register())
        await asyncio.to_thread(outsider.close)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        await dealer.send_multipart([REGISTER, b"", *encode(Register(run_id="other"))])
        assert await dealer.poll(500) == 0
        dealer.close(linger=0)
        context.term()
        await asyncio.to_thread(client.send, CheckpointSaved(step=1))
        assert await server.next_event() == Event(0, CheckpointSaved(step=1))
        await asyncio.to_thread(client.send, Bye())


async def test_recorded_traffic_cannot_be_replayed(cfg: ControlSection) -> None:
    """The bytes of a whole connection, sent again, are no message."""
    recorded = bytearray()
    async with opened(cfg) as server:
        async with relay(cfg.port, recorded) as port:
            near = cfg.model_copy(update={"port": port})
            async with registered_client(near, server) as client:
                await asyncio.to_thread(client.send, CheckpointSaved(step=1))
                assert await server.next_event() == Event(0, CheckpointSaved(step=1))
                await asyncio.to_thread(client.send, Bye())
        assert (await server.next_event()).message == Bye()
        reader, writer = await asyncio.open_connection("127.0.0.1", cfg.port)
        writer.write(recorded)
        async with asyncio.timeout(60):
            while await reader.read(4096):
                pass  # until it hangs up
        writer.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.next_event(), 0.3)


@contextlib.asynccontextmanager
async def relay(port: int, recorded: bytearray) -> AsyncIterator[int]:
    """A port in front of another one, which records what clients send."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                record += data
                writer.write(data)
        writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, far_writer, recorded), pump(far_reader, writer, bytearray()))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_refusals_are_logged_once_in_a_while(cfg: ControlSection, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(cfg) as server, registered_client(cfg, server) as client:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        guard_client(dealer, SECRET, WIRE)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        for _ in range(200):
            await dealer.send_multipart([REGISTER, b"", b"garbage"])
        for _ in range(200):
            await dealer.recv_multipart()
        assert len([line for line in caplog.messages if "refused a trainer" in line]) == 1
        dealer.close(linger=0)
        context.term()
        await asyncio.to_thread(client.send, Bye())


async def test_another_schema_is_refused_with_both_numbers(
    cfg: ControlSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(cfg):
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        guard_client(dealer, SECRET, WIRE)
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


async def test_a_rank_that_sent_bye_may_be_silent(brisk: ControlSection) -> None:
    async with opened(brisk) as server:
        async with registered_client(brisk, server) as client:
            await asyncio.to_thread(client.send, Bye())
        assert (await server.next_event()).message == Bye()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.next_event(), 1.5 * brisk.dead_after_s)


@pytest.mark.parametrize("last_message", [Bye(), Failed(reason="out of memory")])
async def test_nobody_waits_for_a_rank_that_has_sent_its_last_message(
    cfg: ControlSection, last_message: Bye | Failed
) -> None:
    async with opened(cfg) as server:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        guard_client(dealer, SECRET, WIRE)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        await dealer.send_multipart([REGISTER, b"", *encode(Register(run_id="run"))])
        await server.wait_registered()
        sending = asyncio.create_task(server.send(VersionLoaded(version=1)))
        await asyncio.sleep(2 * cfg.heartbeat_s)
        assert not sending.done()
        await dealer.send_multipart([MESSAGE, (1).to_bytes(8, "little"), *encode(last_message)])
        await asyncio.wait_for(sending, 60)
        assert (await server.next_event()).message == last_message
        dealer.close(linger=0)
        context.term()


async def test_an_orchestrator_that_ends_early_ends_every_call_of_the_rank(cfg: ControlSection) -> None:
    async with opened(cfg) as server, registered_client(cfg, server) as client:
        await server.wait_registered()
        waiting = asyncio.create_task(asyncio.to_thread(client.wait, 30))
        await server.close()
        with pytest.raises(EngineError, match=r"orchestrator \(pid \d+ on .*\) ended while"):
            await waiting
        for call in (client.poll, lambda: client.send(Bye())):
            with pytest.raises(EngineError, match="ended while"):
                call()


async def test_a_blocked_event_loop_does_not_make_the_rank_count_as_dead(
    cfg: ControlSection, brisk: ControlSection
) -> None:
    # The rank is patient: it receives nothing meanwhile.
    async with opened(brisk) as server, registered_client(cfg, server) as client:
        await server.wait_registered()
        # Blocks the orchestrator's event loop, as a long computation would.
        time.sleep(1.5 * brisk.dead_after_s)
        await asyncio.sleep(4 * cfg.heartbeat_s)
        await server.send(Stop(reason="still there"))
        assert Stop(reason="still there") in client.wait(60)
        await asyncio.to_thread(client.send, Bye())


async def test_a_taken_port_is_named(cfg: ControlSection) -> None:
    async with opened(cfg):
        with pytest.raises(EngineError, match=f"cannot bind.*{cfg.port}.*control.port"):
            await ControlServer(cfg, "run", SECRET).open()


async def test_garbage_on_the_port_does_no_harm(cfg: ControlSection) -> None:
    async with opened(cfg) as server:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        guard_client(dealer, SECRET, WIRE)
        dealer.connect(f"tcp://127.0.0.1:{cfg.port}")
        for frames in (
            [b""],
            [b"?"],
            [MESSAGE, b"\0" * 8, b"x"],
            [REGISTER, b"", b"STRF\x01\x00\xc1"],
            [REGISTER, b""],
        ):
            await dealer.send_multipart(frames)
        async with registered_client(cfg, server) as client:
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
            wire.append(("message", sender.add_message(encode(Bye()), now)[0]))
        wire += [("message", int.from_bytes(frames[1], "little")) for frames in sender.due_resends(now)]
        rng.shuffle(wire)
        arriving, wire = wire, []
        for kind, number in arriving:
            if rng.random() < 0.3:
                continue  # lost
            for _ in range(rng.choice((1, 1, 2))):
                if kind == "ack":
                    sender.mark_acknowledged(number)
                    continue
                deliver, ack = receiver.accept(number)
                if deliver:
                    got.append(number)
                if ack:
                    wire.append(("ack", number))
    assert got == list(range(1, 21))


# -- two processes --

TRAINER = """
import sys, time
from stretto.base.ports import is_own_address
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.control import Bye, Register, StepDone
from stretto.transports.control import ControlClient
SECRET = Secret("s" * 32)
cfg = ControlSection(port=int(sys.argv[1]), heartbeat_s=0.05, dead_after_s=2, register_timeout_s=120)
client = ControlClient(cfg, "run", SECRET)
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
from stretto.base.ports import is_own_address
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.transports.control import ControlServer
SECRET = Secret("s" * 32)
async def main():
    cfg = ControlSection(port=int(sys.argv[1]), heartbeat_s=0.05, dead_after_s=120)
    server = ControlServer(cfg, "run", SECRET)
    await server.open()
    print("open", flush=True)
    async for event in server.events():
        print(event, flush=True)
asyncio.run(main())
"""


async def test_heartbeats_go_on_while_the_trainer_computes(brisk: ControlSection) -> None:
    async with opened(brisk) as server:
        with peer(TRAINER, brisk.port, 1.5 * brisk.dead_after_s) as trainer:
            await server.wait_registered()
            assert (await server.next_event()).message == StepDone(step=1)
            await server.send(Stop(reason="enough"))  # read when it has computed for longer than a dead one is silent
            assert (await server.next_event()).message == Bye()
            await asyncio.to_thread(trainer.end)


async def test_a_killed_trainer_is_noticed_and_named(brisk: ControlSection) -> None:
    async with opened(brisk) as server:
        with peer(TRAINER, brisk.port, 0.01) as trainer:
            (info,) = await server.wait_registered()
            await server.next_event()
            trainer.kill()
            expected = rf"trainer rank 0 \(pid {info.pid} on {info.host}\) has been silent for \d+ s"
            with pytest.raises(EngineError, match=expected):
                async with asyncio.timeout(60):
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
    client = ControlClient(cfg, "run", SECRET)
    with peer(ORCHESTRATOR, cfg.port) as orchestrator:
        await asyncio.to_thread(orchestrator.line)
        await asyncio.to_thread(client.register, Register())
        orchestrator.kill()
    async with opened(cfg):
        with pytest.raises(WireError, match="orchestrator was restarted"):
            await asyncio.to_thread(client.wait, 60)
    await asyncio.to_thread(client.close)
