"""A batch reaches every rank once, in order, through lost connections and dead receivers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from peers import peer
from ports import free_port

from stretto.base.errors import EngineError, WireError
from stretto.base.paths import RunDir
from stretto.base.secret import Secret, load_secret
from stretto.config.sections.transport import FilesystemRollouts, RolloutTransport, ZmqRollouts
from stretto.records.codec import encode
from stretto.records.control import Register
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.transports.guard import guard_client
from stretto.transports.rollouts import Receiver, Sender, build_receiver, build_sender
from stretto.transports.rollouts.delivery import StepGate
from stretto.transports.rollouts.zmq import WIRE, ZmqReceiver
from stretto.transports.stream import ACK, HEARTBEAT, MESSAGE, REGISTER, REGISTERED


@pytest.fixture(params=["zmq", "filesystem"])
def cfg(request: pytest.FixtureRequest) -> RolloutTransport:
    if request.param == "zmq":
        return ZmqRollouts(port=free_port(), timeout_s=20)
    return FilesystemRollouts(timeout_s=20)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def batches(step: int, world_size: int = 2, num_tokens: int = 1000) -> list[TrainBatch]:
    def micro(rank: int) -> MicroBatch:
        floats = np.full(num_tokens, step + rank / 10, np.float32)
        return MicroBatch(
            token_ids=np.arange(num_tokens, dtype=np.int32) + step,
            cu_seqlens=np.array([0, num_tokens], np.int32),
            loss_mask=np.ones(num_tokens, bool),
            logprobs=floats,
            advantages=floats,
            temperatures=floats,
            sample_ids=(f"g{step}.0/0",),
            envs=("e",),
        )

    return [
        TrainBatch(step=step, rank=rank, world_size=world_size, micro_batches=(micro(rank),))
        for rank in range(world_size)
    ]


SESSIONS = {0: "first", 1: "second", 2: "third"}
"""What the control wire would have registered."""


def connected(cfg: RolloutTransport, run_dir: RunDir, rank: int) -> Receiver:
    return build_receiver(cfg, run_dir, rank, SESSIONS[rank])


@contextlib.asynccontextmanager
async def opened(
    cfg: RolloutTransport, run_dir: RunDir, world_size: int = 2, sessions: dict[int, str] = SESSIONS
) -> AsyncIterator[Sender]:
    sender = build_sender(cfg, run_dir, world_size, sessions)
    await sender.open()
    try:
        yield sender
    finally:
        await sender.close()


def take(receiver: Receiver, num: int) -> list[TrainBatch]:
    return [receiver.receive(20) for _ in range(num)]


def assert_same(got: TrainBatch, sent: TrainBatch) -> None:
    assert (got.step, got.rank, got.world_size) == (sent.step, sent.rank, sent.world_size)
    assert encode(got)[0] == encode(sent)[0]
    assert all(bytes(a) == bytes(b) for a, b in zip(encode(got)[1:], encode(sent)[1:], strict=True))


async def test_every_rank_gets_its_own_batches_once_and_in_order(cfg: RolloutTransport, run_dir: RunDir) -> None:
    async with opened(cfg, run_dir) as sender:
        receivers = [connected(cfg, run_dir, rank) for rank in range(2)]
        taking = [asyncio.create_task(asyncio.to_thread(take, receiver, 5)) for receiver in receivers]
        for step in range(1, 6):
            await sender.send(batches(step))
        for rank, got in enumerate(await asyncio.gather(*taking)):
            for step, batch in enumerate(got, 1):
                assert_same(batch, batches(step)[rank])
            assert receivers[rank].receive(0.0) is None
            receivers[rank].close()


async def test_a_large_batch_arrives_whole_and_in_order(cfg: RolloutTransport, run_dir: RunDir) -> None:
    sizes = [*range(1, 60), *(20_000 + n for n in range(60)), 0]
    micro = tuple(batches(n, 1, num_tokens)[0].micro_batches[0] for n, num_tokens in enumerate(sizes))
    (sent,) = (msgspec.structs.replace(batch, micro_batches=micro) for batch in batches(1, 1))
    async with opened(cfg, run_dir, 1) as sender:
        receiver = connected(cfg, run_dir, 0)
        taking = asyncio.create_task(asyncio.to_thread(take, receiver, 1))
        await sender.send([sent])
        (got,) = await taking
        receiver.close()
    assert_same(got, sent)


async def test_a_step_that_is_sent_again_is_acknowledged_and_not_delivered_again(
    cfg: RolloutTransport, run_dir: RunDir
) -> None:
    async with opened(cfg, run_dir, 1) as sender:
        receiver = connected(cfg, run_dir, 0)
        taking = asyncio.create_task(asyncio.to_thread(take, receiver, 2))
        for step in (1, 2):
            await sender.send(batches(step, 1))
        assert [batch.step for batch in await taking] == [1, 2]
        again = asyncio.create_task(asyncio.to_thread(receiver.receive, 0.5))
        await sender.send(batches(2, 1))
        assert await again is None
        receiver.close()


async def test_a_rank_that_comes_late_or_restarts_gets_the_batch(cfg: RolloutTransport, run_dir: RunDir) -> None:
    sessions: dict[int, str] = {}
    async with opened(cfg, run_dir, 1, sessions) as sender:
        sending = asyncio.create_task(sender.send(batches(4, 1)))
        await asyncio.sleep(0.2)
        assert not sending.done()
        for step in (4, 5):  # a new process each time: it begins with whatever step comes
            sessions[0] = f"life {step}"
            receiver = build_receiver(cfg, run_dir, 0, sessions[0])
            (batch,) = await asyncio.to_thread(take, receiver, 1)
            assert batch.step == step
            await sending
            receiver.close()
            sending = asyncio.create_task(sender.send(batches(step + 1, 1)))
        sending.cancel()


async def test_a_restarted_sender_is_not_confused_by_old_files(cfg: RolloutTransport, run_dir: RunDir) -> None:
    """Resume: step 3 is shipped again to new ranks, while files of the earlier incarnation are still there."""
    for _ in range(2):
        async with opened(cfg, run_dir, 1) as sender:
            sending = asyncio.create_task(sender.send(batches(3, 1)))
            await asyncio.sleep(0.1)
            assert not sending.done()
            receiver = connected(cfg, run_dir, 0)
            assert (await asyncio.to_thread(take, receiver, 1))[0].step == 3
            await sending
            receiver.close()


@pytest.mark.parametrize("kind", ["zmq", "filesystem"])
async def test_the_deadline_names_the_ranks_that_did_not_receive(kind: str, run_dir: RunDir) -> None:
    cfg = ZmqRollouts(port=free_port(), timeout_s=0.5) if kind == "zmq" else FilesystemRollouts(timeout_s=0.5)
    async with opened(cfg, run_dir, 3) as sender:
        receiver = connected(cfg, run_dir, 1)
        taking = asyncio.create_task(asyncio.to_thread(take, receiver, 1))
        with pytest.raises(EngineError, match=r"step 1 .* 0\.5 s by trainer rank 0 \(.*never.*rank 2 \(") as error:
            await sender.send(batches(1, 3))
        assert "rank 1" not in str(error.value)
        await taking
        receiver.close()


def test_a_rank_waits_for_a_batch_no_longer_than_it_should(cfg: RolloutTransport, run_dir: RunDir) -> None:
    receiver = connected(cfg, run_dir, 1)
    assert receiver.receive(0.1) is None
    receiver.close()


def test_steps_pass_the_gate_once_and_without_gaps() -> None:
    gate = StepGate(0)
    assert [gate.admits(batches(step)[0]) for step in (7, 7, 8, 7)] == [True, False, True, False]
    with pytest.raises(WireError, match="received step 10; expected step 9"):
        gate.admits(batches(10)[0])
    with pytest.raises(WireError, match="batch of rank 1"):
        gate.admits(batches(9)[1])


# -- zmq only --


@pytest.fixture
def port() -> ZmqRollouts:
    return ZmqRollouts(port=free_port(), timeout_s=20)


async def test_a_rank_takes_a_batch_while_it_still_computes(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1) as sender:
        receiver = connected(port, run_dir, 0)
        for step in (1, 2):
            await sender.send(batches(step, 1))  # acknowledged although nobody has called receive
        ahead = asyncio.create_task(sender.send(batches(3, 1)))
        await asyncio.sleep(0.3)
        assert not ahead.done()  # but no more than two are taken ahead
        assert [batch.step for batch in take(receiver, 1)] == [1]
        await ahead
        assert [batch.step for batch in take(receiver, 2)] == [2, 3]
        receiver.close()


async def test_a_rank_of_another_run_is_refused_with_both_names(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1):
        outsider = ZmqReceiver(port, "other", load_secret(run_dir), 0, SESSIONS[0])
        with pytest.raises(WireError, match="of run 'other', the orchestrator of run 'run'"):
            await asyncio.to_thread(outsider.receive, 10)
        outsider.close()
        surplus = build_receiver(port, run_dir, 1, SESSIONS[1])
        with pytest.raises(WireError, match="rank 1: the orchestrator expects 1 ranks"):
            await asyncio.to_thread(surplus.receive, 10)
        surplus.close()


async def test_batches_go_to_the_process_that_is_registered_and_to_no_other(port: ZmqRollouts, run_dir: RunDir) -> None:
    """A second trainer of the same rank is refused, and the first one goes on."""
    sessions: dict[int, str] = {}
    async with opened(port, run_dir, 1, sessions) as sender:
        early = build_receiver(port, run_dir, 0, "early")
        with pytest.raises(WireError, match="rank 0: it has not registered on the control wire"):
            await asyncio.to_thread(early.receive, 10)
        early.close()
        sessions[0] = "first"
        receiver = build_receiver(port, run_dir, 0, "first")
        await sender.send(batches(1, 1))
        second = build_receiver(port, run_dir, 0, "second")
        with pytest.raises(WireError, match="rank 0: another process is registered as this rank"):
            await asyncio.to_thread(second.receive, 10)
        second.close()
        await sender.send(batches(2, 1))
        assert [batch.step for batch in await asyncio.to_thread(take, receiver, 2)] == [1, 2]
        receiver.close()


async def test_a_rank_without_the_secret_gets_nothing_but_the_reason(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1) as sender:
        outsider = ZmqReceiver(port, "run", Secret("x" * 32), 0, SESSIONS[0])
        with pytest.raises(WireError, match=r"rejects this process.*secret"):
            await asyncio.to_thread(outsider.receive, 10)
        outsider.close()
        receiver = connected(port, run_dir, 0)
        await sender.send(batches(1, 1))
        assert (await asyncio.to_thread(take, receiver, 1))[0].step == 1
        receiver.close()


async def test_a_taken_port_is_named(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1):
        with pytest.raises(EngineError, match=f"cannot bind.*{port.port}.*rollout_transport.port"):
            await build_sender(port, run_dir, 1, SESSIONS).open()


async def test_garbage_on_the_port_does_no_harm(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1) as sender:
        _, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        guard_client(dealer, load_secret(run_dir), WIRE)
        dealer.connect(f"tcp://127.0.0.1:{port.port}")
        for frames in ([b""], [b"x", b"y"], [REGISTER, b""], [REGISTER, b"", b"STRF\x01\x00\xff"], [ACK, b"123456789"]):
            dealer.send_multipart(frames)
        await asyncio.sleep(0.2)
        receiver = connected(port, run_dir, 0)
        await sender.send(batches(1, 1))
        assert (await asyncio.to_thread(take, receiver, 1))[0].step == 1
        receiver.close()
        dealer.close(linger=0)
        context.term()
        writer.close()


async def test_a_lost_acknowledgement_is_made_good_by_the_next_heartbeat(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1) as sender:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        guard_client(dealer, load_secret(run_dir), WIRE)
        dealer.connect(f"tcp://127.0.0.1:{port.port}")
        await dealer.send_multipart([REGISTER, b"", *encode(Register(run_id="run", session=SESSIONS[0]))])
        assert (await dealer.recv_multipart())[0] == REGISTERED
        sending = asyncio.create_task(sender.send(batches(1, 1)))
        while (kind := (await dealer.recv_multipart())[0]) != MESSAGE:
            assert kind == HEARTBEAT
        await dealer.send_multipart([HEARTBEAT, (0).to_bytes(8, "little")])
        await asyncio.sleep(0.1)
        assert not sending.done()
        await dealer.send_multipart([HEARTBEAT, (1).to_bytes(8, "little")])
        await sending
        dealer.close(linger=0)
        context.term()


RANK = """
import sys
from pathlib import Path
from stretto.base.paths import RunDir
from stretto.config.sections.transport import ZmqRollouts
from stretto.transports.rollouts import build_receiver
receiver = build_receiver(ZmqRollouts(port=int(sys.argv[2])), RunDir(Path(sys.argv[1])), 0, sys.argv[3])
print("ready", flush=True)
while True:
    batch = receiver.receive(60)
    print(batch.step, int(batch.micro_batches[0].token_ids[0]), flush=True)
    sys.stdin.readline()
"""


async def test_a_killed_rank_is_followed_by_another_that_gets_the_same_step(port: ZmqRollouts, run_dir: RunDir) -> None:
    sessions = {0: "killed"}
    async with opened(port, run_dir, 1, sessions) as sender:
        with peer(RANK, run_dir.path, port.port, "killed") as first:
            await asyncio.to_thread(first.line)
            await sender.send(batches(1, 1))
            assert await asyncio.to_thread(first.line) == "1 1"
            first.kill()
        sending = asyncio.create_task(sender.send(batches(2, 1)))  # to a dead rank
        sessions[0] = "second"
        with peer(RANK, run_dir.path, port.port, "second") as second:
            assert await asyncio.to_thread(second.line) == "ready"
            assert await asyncio.to_thread(second.line) == "2 2"
            await sending
            second.kill()


async def test_a_rank_outlives_the_restart_of_its_orchestrator(port: ZmqRollouts, run_dir: RunDir) -> None:
    with peer(RANK, run_dir.path, port.port, SESSIONS[0]) as rank:
        await asyncio.to_thread(rank.line)
        for step in (1, 2):
            async with opened(port, run_dir, 1) as sender:
                await sender.send(batches(step, 1))
                assert await asyncio.to_thread(rank.line) == f"{step} {step}"
                rank.write_line("go on")
        rank.kill()


SENDER = """
import asyncio, sys
from pathlib import Path
from stretto.base.paths import RunDir
from stretto.config.sections.transport import ZmqRollouts
from stretto.records.sample import TrainBatch
from stretto.transports.rollouts import build_sender
async def main():
    sender = build_sender(ZmqRollouts(port=int(sys.argv[2])), RunDir(Path(sys.argv[1])), 1, {0: sys.argv[3]})
    await sender.open()
    await sender.send([TrainBatch(step=1, rank=0, world_size=1, micro_batches=())])
    print("sent", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_rank_outlives_an_orchestrator_that_is_killed(port: ZmqRollouts, run_dir: RunDir) -> None:
    receiver = connected(port, run_dir, 0)
    with peer(SENDER, run_dir.path, port.port, SESSIONS[0]) as orchestrator:
        assert await asyncio.to_thread(orchestrator.line) == "sent"
        orchestrator.kill()
    async with opened(port, run_dir, 1) as sender:
        await sender.send(batches(1, 1))  # as a resumed run may: the rank has it
        await sender.send(batches(2, 1))
        assert [batch.step for batch in await asyncio.to_thread(take, receiver, 2)] == [1, 2]
        assert receiver.receive(0.0) is None
    receiver.close()


async def test_big_batches_arrive_whole(port: ZmqRollouts, run_dir: RunDir) -> None:
    async with opened(port, run_dir, 1) as sender:
        receiver = connected(port, run_dir, 0)
        sent = batches(1, 1, num_tokens=2_000_000)
        await sender.send(sent)
        assert_same(take(receiver, 1)[0], sent[0])
        receiver.close()


# -- files only --


async def test_old_batches_are_deleted(run_dir: RunDir) -> None:
    cfg = FilesystemRollouts(timeout_s=20, keep_steps=2)
    async with opened(cfg, run_dir, 1) as sender:
        receiver = connected(cfg, run_dir, 0)
        taking = asyncio.create_task(asyncio.to_thread(take, receiver, 5))
        for step in range(1, 6):
            await sender.send(batches(step, 1))
        await taking
        assert sorted(path.name for path in run_dir.rollouts.glob("step_*")) == ["step_4", "step_5"]


async def test_a_damaged_file_is_refused(run_dir: RunDir) -> None:
    cfg = FilesystemRollouts(timeout_s=20)
    async with opened(cfg, run_dir, 1) as sender:
        receiver = connected(cfg, run_dir, 0)
        sending = asyncio.create_task(sender.send(batches(1, 1)))
        path = run_dir.rollout(1, 0)
        while not path.exists():
            await asyncio.sleep(0.001)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(WireError, match=r"step 1: .*rank_0.bin.*cut off"):
            await asyncio.to_thread(receiver.receive, 10)
        sending.cancel()
