"""A thousand trainer ranks on one control wire: over real sockets, each with a connection and keys of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from ports import free_port

from stretto.base.runtime import raise_file_limit
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.codec import decode, encode
from stretto.records.control import Bye, Message, Register, StepDone, Stop, VersionLoaded
from stretto.transports.control import WIRE, ControlServer, Event
from stretto.transports.guard import guard_client
from stretto.transports.stream import ACK, HEARTBEAT, MESSAGE, REGISTER

NUM_RANKS = 1000
NUM_STEPS = 3
SECRET = Secret("s" * 32)
DEADLINE_S = 240.0  # for a wire that stands still, never reached otherwise


class Ranks:
    """All ranks in one thread: they register, send heartbeats and acknowledge; the first one reports steps."""

    def __init__(self, cfg: ControlSection) -> None:
        self._cfg = cfg
        self._is_over = threading.Event()
        self.loaded = [0] * NUM_RANKS
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._play()
        except BaseException as error:
            self.error = error

    def _play(self) -> None:
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * NUM_RANKS)
        sockets, poller, sent = [], zmq.Poller(), [0] * NUM_RANKS
        for rank in range(NUM_RANKS):
            dealer = context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 1000)
            guard_client(dealer, SECRET, WIRE)
            dealer.connect(f"tcp://127.0.0.1:{self._cfg.port}")
            info = Register(rank=rank, world_size=NUM_RANKS, run_id="run", session=str(rank))
            dealer.send_multipart([REGISTER, b"", *encode(info)])
            sockets.append(dealer)
            poller.register(dealer, zmq.POLLIN)
        by_socket = {dealer: rank for rank, dealer in enumerate(sockets)}

        def send(rank: int, message: Message) -> None:
            sent[rank] += 1
            sockets[rank].send_multipart([MESSAGE, sent[rank].to_bytes(8, "little"), *encode(message)])

        beat_at = 0.0
        while not self._is_over.is_set():
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + self._cfg.heartbeat_s
                for dealer in sockets:
                    dealer.send_multipart([HEARTBEAT, b""])
            for dealer, _ in poller.poll(50):
                rank = by_socket[dealer]
                kind, number, *body = dealer.recv_multipart()
                if kind != MESSAGE:
                    continue
                dealer.send_multipart([ACK, number])
                match decode(body, Message):
                    case VersionLoaded(version=version):
                        assert version == self.loaded[rank] + 1
                        self.loaded[rank] = version
                        if rank == 0:
                            send(0, StepDone(step=version))
                    case Stop():
                        send(rank, Bye())
        for dealer in sockets:
            dealer.close(linger=0)
        context.term()

    @contextlib.contextmanager
    def running(self) -> Iterator[Ranks]:
        self.thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self.thread.join()
            if self.error is not None:
                raise self.error


@pytest.mark.slow
async def test_a_thousand_ranks_register_beat_step_and_leave() -> None:
    limit = raise_file_limit()
    if limit is not None and limit < 8 * NUM_RANKS:
        pytest.fail(f"this test needs {8 * NUM_RANKS} open files, and the limit is {limit}; raise it (ulimit -Hn)")
    cfg = ControlSection(port=free_port(), heartbeat_s=0.5, dead_after_s=120.0, register_timeout_s=DEADLINE_S)
    server = ControlServer(cfg, "run", SECRET, world_size=NUM_RANKS)
    await server.open()
    try:
        async with asyncio.timeout(DEADLINE_S):
            with Ranks(cfg).running() as ranks:
                infos = await server.wait_registered()
                assert [info.rank for info in infos] == list(range(NUM_RANKS))
                assert server.sessions == {rank: str(rank) for rank in range(NUM_RANKS)}
                for step in range(1, NUM_STEPS + 1):
                    await server.send(VersionLoaded(version=step))
                    assert await server.next_event() == Event(0, StepDone(step=step))
                await asyncio.sleep(3 * cfg.heartbeat_s)
                await server.send(Stop(reason="enough"))
                left = [event async for event in server.events()]
                assert sorted(event.rank for event in left) == list(range(NUM_RANKS))
                assert {type(event.message) for event in left} == {Bye}
                assert ranks.loaded == [NUM_STEPS] * NUM_RANKS
    finally:
        await server.close()
