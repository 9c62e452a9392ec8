"""The control wire between trainer ranks and orchestrator: who is there, what was done, what to do next.

The orchestrator binds (`ControlServer`, asyncio); every trainer rank connects (`ControlClient`, synchronous,
with an IO thread so that heartbeats go on while the rank computes). Messages arrive once and in order in each
direction: they are numbered, acknowledged on receipt, and sent again until they are (`Link`). What is not
heard of for `dead_after_s` is dead, and every wait on either side then ends with an error that names it.

States of a rank on the server: unknown -> registered -> gone (it said Bye). A rank of another run or record
schema, or a second one of the same number, is refused with the reason, which its `register` raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from stretto.base.errors import EngineError, StrettoError, WireError
from stretto.config.transport import ControlSection
from stretto.records.codec import decode, encode
from stretto.records.control import Bye, Failed, Message, Register, Registered

logger = logging.getLogger(__name__)

RESEND_AFTER_S = 2.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Event:
    """A message and the rank that sent it."""

    rank: int
    message: Message


Frames = list[Any]

# Frames are [kind, number, ...]; the kinds mean the same in every schema.
REGISTER, REGISTERED, MESSAGE, ACK, HEARTBEAT, REFUSED, END = b"R", b"D", b"M", b"A", b"H", b"X", b"E"


@dataclass
class Link:
    """One end of an ordered, acknowledged stream over a socket that may lose messages. No IO in here."""

    heard_at: float
    sent: int = 0  # numbers given out
    received: int = 0  # numbers delivered
    unacked: OrderedDict[int, tuple[float, Frames]] = field(default_factory=OrderedDict)

    def outgoing(self, message: Message, now: float) -> tuple[int, Frames]:
        """The frames of the next message, and its number."""
        self.sent += 1
        frames = [MESSAGE, self.sent.to_bytes(8, "little"), *encode(message)]
        self.unacked[self.sent] = (now, frames)
        return self.sent, frames

    def acknowledged(self, number: int) -> None:
        self.unacked.pop(number, None)

    def incoming(self, number: int) -> tuple[bool, bool]:
        """(deliver it, acknowledge it): once each, in order; what is early comes again."""
        if number == self.received + 1:
            self.received = number
            return True, True
        return False, number <= self.received

    def due(self, now: float) -> list[Frames]:
        """Frames to send again."""
        late = [n for n, (at, _) in self.unacked.items() if now - at >= RESEND_AFTER_S]
        for n in late:
            self.unacked[n] = (now, self.unacked[n][1])
        return [self.unacked[n][1] for n in late]


@dataclass
class _Peer:
    identity: bytes
    info: Register
    link: Link
    is_gone: bool = False
    acks: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"trainer rank {self.info.rank} (pid {self.info.pid} on {self.info.host})"


class ControlServer:
    """The orchestrator's end. Every coroutine raises the first error of the wire: a dead rank ends waits."""

    def __init__(self, cfg: ControlSection, run_id: str, *, resume_step: int | None = None) -> None:
        self._cfg = cfg
        self._run_id = run_id
        self._registered = Registered(
            run_id=run_id, resume_step=resume_step, pid=os.getpid(), host=socket.gethostname()
        )
        self._peers: dict[int, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._error: StrettoError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ranks(self) -> dict[int, Register]:
        """What every registered rank said of itself."""
        return {rank: peer.info for rank, peer in sorted(self._peers.items())}

    async def open(self) -> None:
        """Bind.

        Raises: EngineError when the port is taken.
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        address = f"tcp://{self._cfg.host}:{self._cfg.port}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as cause:
            self._context.destroy(linger=0)
            raise EngineError(
                f"control wire: cannot bind {address}: {cause}; end what uses it or set another control.port."
            ) from cause
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._tick())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def wait_registered(self, timeout_s: float | None = None) -> list[Register]:
        """Wait until every rank has registered; what they said, by rank.

        Raises: EngineError naming the ranks that are missing.
        """
        timeout_s = self._cfg.register_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while self._missing() != []:
                    self._check()
                    self._changed.clear()
                    await self._changed.wait()
                self._check()
        except TimeoutError:
            missing = self._missing()
            who = "no trainer rank" if missing is None else f"trainer ranks {missing} did not"
            did = "registered" if missing is None else "register"
            raise EngineError(
                f"{who} {did} at tcp://{self._cfg.host}:{self._cfg.port} within {timeout_s:g} s; see its log."
            ) from None
        return list(self.ranks.values())

    async def next_event(self) -> Event:
        """The next message of any rank, in each rank's order."""
        if self._events.empty():
            self._check()
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
            self._check()
            raise EngineError("the control wire was closed.")
        return event

    async def events(self) -> AsyncIterator[Event]:
        """Every message until each rank said Bye (which is the last event)."""
        while True:
            event = await self.next_event()
            yield event
            if self._events.empty() and all(peer.is_gone for peer in self._peers.values()):
                return

    async def send(
        self, message: Message, *, rank: int | None = None, timeout_s: float | None = None
    ) -> None:
        """Send to one rank, or to all that are not gone; returns when each has acknowledged or is gone.

        Raises: EngineError naming the rank that did not.
        """
        self._check()
        timeout_s = self._cfg.dead_after_s if timeout_s is None else timeout_s
        peers = list(self._peers.values()) if rank is None else [self._peers[rank]]
        waits = {}
        for peer in peers:
            if not peer.is_gone:
                number, frames = peer.link.outgoing(message, time.monotonic())
                waits[peer.info.rank] = peer.acks[number] = asyncio.get_running_loop().create_future()
                await self._send(peer, frames)
        for index, future in waits.items():
            try:
                # Not asyncio.wait_for: before Python 3.12 it returns where it is cancelled as the answer comes.
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(future)
            except TimeoutError:
                raise EngineError(
                    f"{self._peers[index].name} did not acknowledge {type(message).__name__} "
                    f"within {timeout_s:g} s."
                ) from None

    async def close(self) -> None:
        """Tell ranks that are still there, and unbind."""
        if not self._tasks:
            return
        for peer in self._peers.values():
            if not peer.is_gone and self._error is None:
                await self._send(peer, [END, b""])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._events.put_nowait(None)
        self._tasks = []
        self._socket.close()
        self._context.term()

    # -- inside --

    def _missing(self) -> list[int] | None:
        """Ranks not yet registered; None while nobody is."""
        if not self._peers:
            return None
        world_size = next(iter(self._peers.values())).info.world_size
        return [rank for rank in range(world_size) if rank not in self._peers]

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self._fail(EngineError(f"control wire: {type(cause).__name__}: {cause}"))

    def _fail(self, error: StrettoError) -> None:
        self._error = self._error or error
        self._changed.set()
        self._events.put_nowait(None)
        for peer in self._peers.values():
            for future in peer.acks.values():
                if not future.done():
                    future.set_exception(self._error)
                    future.exception()  # read: a sender that was cancelled does not come back for it

    async def _send(self, peer: _Peer, frames: Frames) -> None:
        await self._socket.send_multipart([peer.identity, *frames])

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) < 3:
                continue  # not one of ours
            identity, kind, number, *body = frames
            peer = self._by_identity.get(identity)
            if peer:
                peer.link.heard_at = time.monotonic()
            if kind == REGISTER:
                await self._register(identity, body)
            elif peer is None:
                await self._refuse(
                    identity, "this rank is not registered here; the orchestrator was restarted."
                )
            elif kind == HEARTBEAT:
                continue
            elif kind == ACK:
                self._acknowledged(peer, int.from_bytes(number, "little"))
            elif kind == MESSAGE:
                await self._receive(peer, number, body)

    def _acknowledged(self, peer: _Peer, number: int) -> None:
        peer.link.acknowledged(number)
        future = peer.acks.pop(number, None)
        if future and not future.done():
            future.set_result(None)

    async def _receive(self, peer: _Peer, number: bytes, body: list[bytes]) -> None:
        deliver, ack = peer.link.incoming(int.from_bytes(number, "little"))
        if deliver:
            try:
                message = decode(body, Message)
            except WireError as error:
                return self._fail(WireError(f"from {peer.name}: {error}"))
            if isinstance(message, (Bye, Failed)):  # its last word: it acknowledges nothing any more
                peer.is_gone = True
                for waiting in list(peer.acks):
                    self._acknowledged(peer, waiting)
            self._events.put_nowait(Event(peer.info.rank, message))
        if ack:
            await self._send(peer, [ACK, number])

    async def _register(self, identity: bytes, body: list[bytes]) -> None:
        try:
            info = decode(body, Register)
        except WireError as error:
            return await self._refuse(identity, str(error))
        known = self._peers.get(info.rank)
        first = next(iter(self._peers.values()), None)
        if info.run_id != self._run_id:
            reason = (
                f"it is of run {info.run_id!r}, the orchestrator of run {self._run_id!r}; see control.port."
            )
        elif known and known.identity != identity:
            reason = f"rank {info.rank} is taken by {known.name}; is an older trainer still running?"
        elif first and first.info.world_size != info.world_size:
            reason = f"it says world_size {info.world_size}, {first.name} said {first.info.world_size}."
        elif not 0 <= info.rank < info.world_size:
            reason = f"its rank {info.rank} is not below its world_size {info.world_size}."
        else:
            if not known:
                known = self._peers[info.rank] = _Peer(identity, info, Link(time.monotonic()))
                self._by_identity[identity] = known
                logger.info("%s registered", known.name)
                self._changed.set()
            return await self._send(known, [REGISTERED, b"", *encode(self._registered)])
        await self._refuse(identity, f"trainer rank {info.rank} (pid {info.pid} on {info.host}): {reason}")

    async def _refuse(self, identity: bytes, reason: str) -> None:
        logger.warning("refused a trainer: %s", reason)
        await self._socket.send_multipart([identity, REFUSED, b"", reason.encode()])

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._cfg.heartbeat_s)
            now = time.monotonic()
            late, last = now - last - 2 * self._cfg.heartbeat_s, now
            for peer in self._peers.values():
                if peer.is_gone:
                    continue
                if (
                    late > 0
                ):  # our own loop was held up: what it did not read meanwhile is no silence of the peer
                    peer.link.heard_at += late
                silence = now - peer.link.heard_at
                if silence > self._cfg.dead_after_s:
                    return self._fail(_silent(peer.name, silence, self._cfg.dead_after_s))
                for frames in ([HEARTBEAT, b""], *peer.link.due(now)):
                    await self._send(peer, frames)


class ControlClient:
    """A trainer rank's end. Any thread may call it; the socket belongs to an IO thread.

    Once the wire has failed (orchestrator dead or ended, refused), every call raises that error.
    """

    def __init__(self, cfg: ControlSection, run_id: str) -> None:
        self._cfg = cfg
        self._run_id = run_id
        self._address = f"tcp://{cfg.host}:{cfg.port}"
        self._link = Link(time.monotonic())
        self._state = threading.Condition()  # guards everything below and the link
        self._outbox: deque[Frames] = deque()
        self._inbox: deque[Message] = deque()
        self._registered: Registered | None = None
        self._error: StrettoError | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)

    def register(self, info: Register) -> Registered:
        """Make this rank known and start the heartbeats; waits for the orchestrator to appear.

        Raises: WireError with the reason when it refuses, EngineError when there is none in time.
        """
        assert self._thread is None, "register twice"
        info = msgspec.structs.replace(
            info, run_id=self._run_id, pid=info.pid or os.getpid(), host=info.host or socket.gethostname()
        )
        self._thread = threading.Thread(target=self._run, args=(info,), name="control", daemon=True)
        self._thread.start()
        timeout_s = self._cfg.register_timeout_s
        with self._state:
            self._state.wait_for(lambda: self._registered or self._error, timeout_s)
            self._check()
            if self._registered is None:
                raise EngineError(
                    f"no orchestrator answered at {self._address} within {timeout_s:g} s; see its log."
                )
            return self._registered

    def send(self, message: Message, *, timeout_s: float | None = None) -> None:
        """Returns when the orchestrator has acknowledged it.

        Raises: EngineError when it did not in time (default: dead_after_s).
        """
        timeout_s = self._cfg.dead_after_s if timeout_s is None else timeout_s
        with self._state:
            self._check()
            number, frames = self._link.outgoing(message, time.monotonic())
            self._outbox.append(frames)
            self._wake()
            self._state.wait_for(lambda: number not in self._link.unacked or self._error, timeout_s)
            if number in self._link.unacked:
                self._check()
                raise EngineError(
                    f"{self._peer} did not acknowledge {type(message).__name__} within {timeout_s:g} s."
                )

    def poll(self) -> list[Message]:
        """Messages that arrived since the last call, without waiting."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> list[Message]:
        """Wait until there is at least one message; [] when none came in time."""
        with self._state:
            if not self._inbox:
                self._state.wait_for(lambda: self._inbox or self._error, timeout_s)
            if not self._inbox:
                self._check()
            messages = list(self._inbox)
            self._inbox.clear()
            return messages

    def close(self) -> None:
        """Stop the IO thread. Say Bye before, or the orchestrator takes this rank for dead."""
        with self._state:
            self._is_closing = True
            self._wake()
        if self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        os.close(self._wake_write)
        os.close(self._wake_read)

    # -- inside --

    @property
    def _peer(self) -> str:
        if self._registered is None:
            return f"orchestrator at {self._address}"
        return f"orchestrator (pid {self._registered.pid} on {self._registered.host})"

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _fail(self, error: StrettoError) -> None:
        self._error = self._error or error
        self._state.notify_all()

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _run(self, info: Register) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 1000)
        dealer.set(zmq.IDENTITY, f"rank-{info.rank}-{secrets.token_hex(8)}".encode())
        dealer.connect(self._address)
        try:
            self._loop(dealer, [REGISTER, b"", *encode(info)])
        except Exception as error:
            with self._state:
                self._fail(EngineError(f"control wire of rank {info.rank}: {type(error).__name__}: {error}"))
        finally:
            dealer.close()
            context.term()

    def _loop(self, dealer: zmq.Socket[bytes], registration: Frames) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        beat_at = last = time.monotonic()
        while True:
            poller.poll(int(max(beat_at - time.monotonic(), 0) * 1000) + 1)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            with self._state:
                replies = []
                while dealer.poll(0):
                    replies += self._receive(dealer.recv_multipart())
                now = time.monotonic()
                if now >= beat_at:
                    late, last = now - last - 2 * self._cfg.heartbeat_s, now
                    beat_at = now + self._cfg.heartbeat_s
                    replies += self._beat(now, late, registration)
                replies += self._outbox
                self._outbox.clear()
                is_done = self._is_closing or self._error
            for frames in replies:
                dealer.send_multipart(frames)
            if is_done:
                return

    def _beat(self, now: float, late: float, registration: Frames) -> list[Frames]:
        """What is due every heartbeat; an orchestrator that is silent for too long ends the wire."""
        if self._registered is None:
            return [registration]
        if late > 0:  # this process was held up (stopped, swapped): that was no silence of the peer
            self._link.heard_at += late
        silence = now - self._link.heard_at
        if silence > self._cfg.dead_after_s:
            self._fail(_silent(self._peer, silence, self._cfg.dead_after_s))
        return [[HEARTBEAT, b""], *self._link.due(now)]

    def _receive(self, frames: list[bytes]) -> list[Frames]:
        """Take in one message; the frames to answer with."""
        if len(frames) < 2:
            return []  # not one of ours
        kind, number, *body = frames
        self._link.heard_at = time.monotonic()
        try:
            if kind == REGISTERED:
                self._registered = self._registered or decode(body, Registered)
            elif kind == REFUSED:
                self._fail(WireError(f"the orchestrator at {self._address} refused: {body[0].decode()}"))
            elif kind == END:
                self._fail(EngineError(f"{self._peer} ended while this rank was still working; see its log."))
            elif kind == ACK:
                self._link.acknowledged(int.from_bytes(number, "little"))
            elif kind == MESSAGE:
                deliver, ack = self._link.incoming(int.from_bytes(number, "little"))
                if deliver:
                    self._inbox.append(decode(body, Message))
                if ack:
                    return [[ACK, number]]
        except WireError as error:
            self._fail(WireError(f"from {self._peer}: {error}"))
        finally:
            self._state.notify_all()
        return []


def _silent(peer: str, silence_s: float, dead_after_s: float) -> EngineError:
    return EngineError(
        f"{peer} has been silent for {silence_s:.0f} s (control.dead_after_s = {dead_after_s:g}): "
        "it died or hangs; see its log."
    )
