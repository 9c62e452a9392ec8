"""A wire between one process and trainer ranks: messages arrive exactly once and in order, in both directions.

The orchestrator, or the hub of a training service, binds (`LinkServer`, asyncio); every rank connects (`LinkClient`,
whose IO thread keeps the wire alive while the rank computes). control.py, tenants.py and rollouts/zmq.py define the
messages and decide which ranks may register.

Only processes with the run's secret can connect (guard.py). Messages are numbered, acknowledged on receipt, and sent
again until they are acknowledged (stream.py, which also lists the frames); heartbeats repeat the acknowledgement.
States of a rank on the server:

    unknown -> registered -> gone (it sent its last message)
      registered -> registered: a new process has this rank and gets what the old one did not acknowledge
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
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from stretto.base.errors import ENDED_FIRST, EngineError, StrettoError, WireError
from stretto.base.log import RateLimitedLogger
from stretto.base.ports import is_ipv6
from stretto.base.secret import Secret
from stretto.records.codec import BytesLike, decode, encode
from stretto.records.control import Register, Registered
from stretto.transports.guard import RejectionMonitor, guard_client, guard_server
from stretto.transports.stream import (
    ACK,
    END,
    HEARTBEAT,
    MESSAGE,
    REFUSED,
    REGISTER,
    REGISTERED,
    UNKNOWN,
    Frames,
    Link,
    Wire,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class Peer:
    """One trainer rank, as the server knows it."""

    rank: int
    link: Link
    identity: bytes | None = None
    info: Register | None = None
    is_gone: bool = False

    def __str__(self) -> str:
        who = f"pid {self.info.pid} on {self.info.host}" if self.info else "never connected"
        return f"trainer rank {self.rank} ({who})"


class LinkServer(Generic[T]):
    """The end of a wire that binds: the orchestrator's or the hub's.

    Every coroutine raises the first error of the wire, so that a dead rank ends all waits.
    """

    def __init__(self, wire: Wire, run_id: str, secret: Secret, resume_step: int | None = None) -> None:
        self._wire, self._run_id, self._secret = wire, run_id, secret
        self._session = secrets.token_bytes(8)
        self._registered = Registered(
            run_id=run_id, resume_step=resume_step, pid=os.getpid(), host=socket.gethostname()
        )
        self.sessions: dict[int, str] = {}
        """By rank: the session of the registered process, which identifies it on other wires too."""
        self._peers: dict[int, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._limited_logger = RateLimitedLogger(logger)
        self._events: asyncio.Queue[T | None] = asyncio.Queue()
        self._changed = asyncio.Event()  # a rank has registered, or the wire has failed
        self._error: StrettoError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _refusal(self, info: Register, known: Peer | None) -> str | None:
        """Why this process may not register; None if it may.

        known: the peer that already has its rank.
        """
        raise NotImplementedError

    def _decode_event(self, peer: Peer, body: list[bytes]) -> T:
        """Decode a rank's message into an event.

        Raises: WireError, which ends the wire.
        """
        raise NotImplementedError

    async def open(self) -> None:
        """Bind the port and start to receive.

        Raises: EngineError if the port is taken.
        """
        wire = self._wire
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.ipv6 = is_ipv6(wire.host)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        guard_server(self._socket, self._secret, wire.name, max_bytes=wire.max_bytes)
        try:
            self._socket.bind(wire.address)
        except zmq.ZMQError as cause:
            self._context.destroy(linger=0)
            what = f"{wire.title}: cannot bind {wire.address}: {cause}"
            raise EngineError(f"{what}; end the process that uses it or set another {wire.section}.port.") from cause
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._send_heartbeats())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def next_event(self) -> T:
        """The next message of any rank; messages of the same rank come in order."""
        if self._events.empty():
            self._check()
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
            self._check()
            raise EngineError(f"the {self._wire.title} was closed.")
        return event

    async def close(self) -> None:
        """Tell the ranks that this process ends, and unbind."""
        if not self._tasks:
            return
        for peer in list(self._peers.values()):
            if not peer.is_gone and self._error is None:
                await self._send(peer, [END, b""])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._events.put_nowait(None)
        self._tasks = []
        self._socket.close()
        self._context.term()

    # -- for subclasses --

    def _peer(self, rank: int) -> Peer:
        """The peer of a rank, even if it has not registered yet."""
        return self._peers.setdefault(rank, Peer(rank, self._wire.link()))

    async def _post(self, peer: Peer, body: Iterable[BytesLike]) -> asyncio.Future[None]:
        """Send a message now, or when the rank registers; the future ends when it is acknowledged.

        It is also done if the rank is gone or the wire has failed.
        """
        assert self._tasks, "send before open"
        self._check()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._send(peer, peer.link.add_message(body, time.monotonic(), done)[1])
        return done

    async def _wait_acknowledged(self, posted: Mapping[Peer, asyncio.Future[None]], timeout_s: float) -> list[Peer]:
        """Wait until all have acknowledged; returns those that did not in time."""
        if posted:
            await asyncio.wait(posted.values(), timeout=timeout_s)
        self._check()
        return [peer for peer, done in posted.items() if not done.done()]

    def _mark_gone(self, peer: Peer) -> None:
        """The rank has sent its last message: it acknowledges nothing any more, and may be silent."""
        peer.is_gone = True
        peer.link.mark_acknowledged(peer.link.sent)

    def _check(self) -> None:
        if self._error:
            raise self._error

    # -- inside --

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            if not isinstance(cause, StrettoError):
                cause = EngineError(f"{self._wire.title}: {type(cause).__name__}: {cause}")
            self._fail(cause)

    def _fail(self, error: StrettoError) -> None:
        self._error = self._error or error
        self._changed.set()
        self._events.put_nowait(None)
        for peer in self._peers.values():  # ends all waits for them, which then raise the error
            peer.link.mark_acknowledged(peer.link.sent)

    async def _send(self, peer: Peer, frames: Frames) -> None:
        if peer.identity is not None:
            await self._socket.send_multipart([peer.identity, *frames], copy=self._wire.copies)

    async def _read(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            if len(frames) < 2:
                continue  # not a message of ours
            kind, number, *body = frames
            peer = self._by_identity.get(identity)
            if peer:
                peer.link.last_received_at = time.monotonic()
            if kind == REGISTER:
                await self._register(identity, body)
            elif peer is None:
                await self._socket.send_multipart([identity, UNKNOWN, b""])
            elif kind in (ACK, HEARTBEAT):
                peer.link.mark_acknowledged(int.from_bytes(number, "little"))
            elif kind == MESSAGE:
                await self._receive(peer, number, body)

    async def _receive(self, peer: Peer, number: bytes, body: list[bytes]) -> None:
        deliver, ack = peer.link.accept(int.from_bytes(number, "little"))
        if deliver:
            try:
                self._events.put_nowait(self._decode_event(peer, body))
            except WireError as error:
                return self._fail(WireError(f"from {peer}: {error}"))
        if ack:
            await self._send(peer, [ACK, number])

    async def _register(self, identity: bytes, body: list[bytes]) -> None:
        peer = self._by_identity.get(identity)
        if peer is None:
            try:
                info = decode(body, Register)
            except WireError as error:
                return await self._refuse(identity, str(error))
            if reason := self._refusal_reason(info):
                who = f"process {info.pid} on {info.host} as trainer rank {info.rank}"
                return await self._refuse(identity, f"{who}: {reason}")
            peer = self._peer(info.rank)
            self._by_identity.pop(peer.identity or b"", None)
            self._by_identity[identity], self.sessions[info.rank] = peer, info.session
            peer.identity, peer.info = identity, info
            logger.info("%s: %s registered", self._wire.title, peer)
            self._changed.set()
            resends = peer.link.restart(time.monotonic())
        else:
            resends = []
        for frames in ([REGISTERED, self._session, *encode(self._registered)], *resends):
            await self._send(peer, frames)

    def _refusal_reason(self, info: Register) -> str | None:
        if info.run_id != self._run_id:
            runs = f"of run {info.run_id!r}, the {self._wire.server} of run {self._run_id!r}"
            return f"it is {runs}; see {self._wire.section}.port."
        return self._refusal(info, self._peers.get(info.rank))

    async def _refuse(self, identity: bytes, reason: str) -> None:
        self._limited_logger.warning("refused a trainer: %s", reason)
        await self._socket.send_multipart([identity, REFUSED, b"", reason.encode()])

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._wire.heartbeat_s)
            now = time.monotonic()
            for peer in list(self._peers.values()):
                if peer.identity is not None and not peer.is_gone:
                    for frames in peer.link.heartbeat(now, self._wire, peer):
                        await self._send(peer, frames)


class LinkClient(Generic[T]):
    """A trainer rank's end of a wire; any thread may call it, an IO thread has the socket.

    Once the wire has failed (the server died, ended or refused this rank), every call raises that error.
    """

    outlives_server = False
    """Whether the wire continues with the next server when one ends, instead of failing."""
    max_unread: int | None = None
    """Messages that are received ahead of the caller; None: any number."""

    def __init__(self, wire: Wire, secret: Secret) -> None:
        self._wire, self._secret = wire, secret
        self._link = wire.link()
        self._state = threading.Condition()  # guards the link and all attributes below
        self._outbox: deque[Frames] = deque()
        self._inbox: deque[T] = deque()
        self._registered: Registered | None = None
        self._session = b""  # the server's
        self._is_registered = False
        self._next_heartbeat_at = 0.0
        self._error: StrettoError | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)

    def _decode_message(self, body: Sequence[BytesLike]) -> T | None:
        """Decode the server's message, None to drop it; called in the IO thread.

        Raises: StrettoError, which ends the wire.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop the IO thread."""
        with self._state:
            self._is_closing = True
            self._wake()
        if self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        os.close(self._wake_write)
        os.close(self._wake_read)

    # -- for subclasses --

    @property
    def _peer(self) -> str:
        """The server, as error messages name it."""
        if self._registered is None:
            return f"{self._wire.server} at {self._wire.address}"
        return f"{self._wire.server} (pid {self._registered.pid} on {self._registered.host})"

    def _start(self, info: Register) -> None:
        """Start the IO thread, which registers this rank, repeatedly until the server answers."""
        assert self._thread is None, "register twice"
        info = msgspec.structs.replace(info, pid=info.pid or os.getpid(), host=info.host or socket.gethostname())
        self._thread = threading.Thread(target=self._run, args=(info,), name=self._wire.name, daemon=True)
        self._thread.start()

    def _wait_registered(self, timeout_s: float) -> Registered | None:
        with self._state:
            self._state.wait_for(lambda: self._registered or self._error, timeout_s)
            self._check()
            return self._registered

    def _post(self, body: Iterable[BytesLike], timeout_s: float) -> bool:
        """Send a message; returns whether the server acknowledged it in time."""
        number = self._enqueue(body)
        with self._state:
            self._state.wait_for(lambda: number not in self._link.unacked or self._error, timeout_s)
            if number in self._link.unacked:
                self._check()
            return number not in self._link.unacked

    def _post_later(self, body: Iterable[BytesLike], max_unacked: int, timeout_s: float) -> bool:
        """Send a message without waiting for its acknowledgement.

        Waits only while max_unacked messages are unacknowledged; False if that lasts for timeout_s.
        """
        with self._state:
            self._state.wait_for(lambda: len(self._link.unacked) < max_unacked or self._error, timeout_s)
            if len(self._link.unacked) >= max_unacked:
                self._check()
                return False
        self._enqueue(body)
        return True

    def _enqueue(self, body: Iterable[BytesLike]) -> int:
        """Give a message to the IO thread; returns its number."""
        with self._state:
            self._check()
            number, frames = self._link.add_message(body, time.monotonic())
            self._outbox.append(frames)
        self._wake()  # outside of the lock, because the thread needs the lock as soon as it wakes up
        return number

    def _pop_messages(self, timeout_s: float, at_most: int | None = None) -> list[T]:
        """Remove and return received messages; waits for the first, [] if none came in time."""
        with self._state:
            if not self._inbox:
                self._state.wait_for(lambda: self._inbox or self._error, timeout_s)
            if not self._inbox:
                self._check()
            was_full = self.max_unread is not None and len(self._inbox) >= self.max_unread
            messages = list(self._inbox)[:at_most]
            for _ in messages:
                self._inbox.popleft()
            if was_full:
                self._wake()  # there is room again
            return messages

    # -- inside --

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _fail(self, error: StrettoError) -> None:
        with self._state:
            self._error = self._error or error
            self._state.notify_all()

    def _wake(self) -> None:
        """Wake up the IO thread."""
        os.write(self._wake_write, b"\0")

    def _run(self, info: Register) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.ipv6 = is_ipv6(self._wire.host)
        dealer.set(zmq.LINGER, 1000)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.IDENTITY, f"rank-{info.rank}-{secrets.token_hex(16)}".encode())
        rejections = RejectionMonitor(dealer, f"the {self._wire.server} at {self._wire.address}")
        try:
            guard_client(dealer, self._secret, self._wire.name)
            dealer.connect(self._wire.address)
            self._loop(dealer, rejections, [REGISTER, b"", *encode(info)])
        except StrettoError as error:
            self._fail(error)
        except Exception as error:  # the thread ends, and its owner must learn why
            what = f"{self._wire.title} of rank {info.rank}"
            logger.exception("%s failed", what)
            self._fail(EngineError(f"{what}: {type(error).__name__}: {error}"))
        finally:
            rejections.close()
            dealer.close()
            context.term()

    def _loop(self, dealer: zmq.Socket[bytes], rejections: RejectionMonitor, registration: Frames) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            is_full = self.max_unread is not None and len(self._inbox) >= self.max_unread
            poller.register(dealer, 0 if is_full else zmq.POLLIN)
            poller.poll(int(max(self._next_heartbeat_at - time.monotonic(), 0) * 1000) + 1)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            kind, number, body = (b"", b"", []) if is_full else self._read(dealer)
            replies: list[Frames] = []
            message = None
            if kind == MESSAGE:
                # Without the lock, so that a large message delays no caller; only this thread receives.
                message, ack = self._receive(number, body)
                replies = [[ACK, number]] if ack else []
            with self._state:
                now = time.monotonic()
                if kind:
                    self._handle(kind, number, body, message, now)
                if now >= self._next_heartbeat_at:
                    self._next_heartbeat_at = now + self._wire.heartbeat_s
                    rejections.check()
                    replies += (
                        self._link.heartbeat(now, self._wire, self._peer) if self._is_registered else [registration]
                    )
                replies += self._outbox
                self._outbox.clear()
                is_done = self._is_closing or self._error
            for frames in replies:
                dealer.send_multipart(frames)
            if is_done:
                return

    def _read(self, dealer: zmq.Socket[bytes]) -> tuple[bytes, bytes, Sequence[BytesLike]]:
        """Kind, number and body of the next received message; the kind is empty if there is none."""
        got = dealer.recv_multipart(0, self._wire.copies) if dealer.poll(0) else []
        frames = [frame if isinstance(frame, bytes) else frame.buffer for frame in got]
        return (bytes(frames[0]), bytes(frames[1]), frames[2:]) if len(frames) > 1 else (b"", b"", [])

    def _receive(self, number: bytes, body: Sequence[BytesLike]) -> tuple[T | None, bool]:
        """The message to deliver, None if none, and whether to acknowledge it."""
        deliver, ack = self._link.accept(int.from_bytes(number, "little"))
        try:
            return self._decode_message(body) if deliver else None, ack
        except WireError as error:
            raise WireError(f"from {self._peer}: {error}") from error

    def _handle(self, kind: bytes, number: bytes, body: Sequence[BytesLike], message: T | None, now: float) -> None:
        """Update the state by what was received; message: the decoded one, if it is to be delivered."""
        self._link.last_received_at = now
        self._state.notify_all()
        if kind == MESSAGE:
            if message is not None:
                self._inbox.append(message)
        elif kind in (ACK, HEARTBEAT):
            self._link.mark_acknowledged(int.from_bytes(number, "little"))
        elif kind == REGISTERED:
            if number != self._session:
                self._registered, self._session = decode(body, Registered), number
                self._outbox.extend(self._link.restart(now))
            self._is_registered = True
        elif kind == REFUSED:
            self._fail(self._refused(bytes(body[0]).decode()))
        elif kind in (UNKNOWN, END) and self.outlives_server:  # register with the next server
            self._is_registered, self._next_heartbeat_at = False, 0.0
        elif kind == UNKNOWN:
            self._fail(self._refused(f"this rank is not registered here; the {self._wire.server} was restarted."))
        elif kind == END:
            self._fail(EngineError(f"{self._peer} {ENDED_FIRST}; see its log."))

    def _refused(self, reason: str) -> WireError:
        return WireError(f"the {self._wire.server} at {self._wire.address} refused: {reason}")
