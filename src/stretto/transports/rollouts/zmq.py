"""Batches over ZMQ: the orchestrator's ROUTER answers to one DEALER a rank.

Every second a rank says hello with the last step it has. A hello makes the rank known, stands in for a lost
acknowledgement, and makes the sender repeat a batch that was lost with a broken connection. The rank's socket
belongs to a thread, so that a batch is received and acknowledged while the rank still computes on the one
before.

Frames (after the ROUTER's identity): hello + record, batch + record without micro batches + their blobs (small ones
together in a frame), ack + step, refused + text. Blobs are made one by one: a large batch keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from stretto.base.aio import in_slices
from stretto.base.errors import EngineError, StrettoError, WireError
from stretto.config.transport import ZmqRollouts
from stretto.records.codec import Buffer, blobs_of, decode, decode_blob, encode, encode_blob
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.transports.rollouts.delivery import StepGate, check_batches, no_batch

logger = logging.getLogger(__name__)

HELLO, BATCH, ACK, REFUSED = b"hello", b"batch", b"ack", b"refused"
HELLO_S = 1.0
RESEND_AFTER_S = 5.0  # doubled with every repetition, for batches that take long to arrive
FRAME_BYTES = 1 << 20  # or more; a frame costs as much as copying some tens of KiB
UNREAD_BATCHES = 2  # a rank takes no more than so many ahead of its trainer


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is there. session is new with every process."""

    run: str
    rank: int
    session: str
    last_step: int | None


@dataclass(frozen=True)
class _Message:
    """A batch as it travels."""

    step: int
    frames: list[Buffer]


@dataclass
class _Rank:
    """What the sender knows of a rank, and the batch that it has not acknowledged."""

    rank: int
    identity: bytes | None = None
    session: str = ""
    last_step: int | None = None
    pending: _Message | None = None
    is_received: asyncio.Event = field(default_factory=asyncio.Event)
    sent_at: float = 0.0
    resend_after_s: float = RESEND_AFTER_S

    def __str__(self) -> str:
        if self.identity is None:
            return f"trainer rank {self.rank} (never connected)"
        return f"trainer rank {self.rank} (connected, last step {self.last_step})"


class ZmqSender:
    """The orchestrator's end."""

    def __init__(self, cfg: ZmqRollouts, run: str, world_size: int) -> None:
        self._cfg = cfg
        self._run = run
        self._ranks = [_Rank(rank) for rank in range(world_size)]
        self._replaced: set[str] = set()  # sessions whose rank another process has taken over
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Bind.

        Raises: EngineError when the port is taken.
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.SNDHWM, 0)
        address = f"tcp://{self._cfg.host}:{self._cfg.port}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as cause:
            self._context.destroy(linger=0)
            raise EngineError(
                f"rollout transport: cannot bind {address}: {cause}; end what uses it or set another "
                "rollout_transport.port."
            ) from cause
        self._reader = asyncio.create_task(self._read())

    async def send(self, batches: list[TrainBatch]) -> None:
        assert self._reader is not None, "send before open"
        step = check_batches(batches, len(self._ranks))
        for rank, batch in zip(self._ranks, batches):
            message = _Message(step, await in_slices(_frames(batch)))
            rank.pending, rank.is_received, rank.resend_after_s = message, asyncio.Event(), RESEND_AFTER_S
            await self._deliver(rank)
        received: asyncio.Future[list[bool]] = asyncio.gather(
            *(rank.is_received.wait() for rank in self._ranks)
        )
        done, _ = await asyncio.wait(
            (received, self._reader), timeout=self._cfg.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if received in done:
            return
        received.cancel()
        if self._reader in done:
            raise EngineError("rollout transport: its reader ended") from self._reader.exception()
        late = ", ".join(str(rank) for rank in self._ranks if rank.pending is not None)
        raise EngineError(
            f"the batch of step {step} was not received within {self._cfg.timeout_s:g} s by {late}."
        )

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
            self._socket.close()
            self._context.term()

    async def _read(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            if len(frames) < 2:
                continue  # not one of ours
            kind, *body = frames
            if kind == HELLO:
                await self._hello(identity, body)
            elif kind == ACK:
                for rank in self._ranks:
                    if rank.identity == identity:
                        self._received(rank, int.from_bytes(body[0], "little"))

    async def _hello(self, identity: bytes, body: list[bytes]) -> None:
        try:
            hello = decode(body, Hello)
            self._check(hello)
        except WireError as error:
            logger.warning("refused a trainer rank: %s", error)
            await self._socket.send_multipart([identity, REFUSED, str(error).encode()])
            return
        rank = self._ranks[hello.rank]
        is_new = rank.session != hello.session
        if is_new:
            self._replaced.add(rank.session)
            rank.identity, rank.session = identity, hello.session
        rank.last_step = hello.last_step
        if hello.last_step is not None:
            self._received(rank, hello.last_step)
        if rank.pending is None:
            return
        if is_new:
            await self._deliver(rank)
        elif time.monotonic() - rank.sent_at > rank.resend_after_s:
            logger.warning("step %d is sent again to %s", rank.pending.step, rank)
            rank.resend_after_s *= 2
            await self._deliver(rank)

    def _check(self, hello: Hello) -> None:
        if hello.run != self._run:
            raise WireError(
                f"trainer rank {hello.rank} is of run {hello.run!r}, the orchestrator of run {self._run!r}; "
                "see rollout_transport.port."
            )
        if not 0 <= hello.rank < len(self._ranks):
            raise WireError(
                f"trainer rank {hello.rank}: the orchestrator packs for {len(self._ranks)} ranks."
            )
        if hello.session in self._replaced:
            raise WireError(f"trainer rank {hello.rank}: another process has taken over this rank.")

    def _received(self, rank: _Rank, step: int) -> None:
        if rank.pending is not None and step >= rank.pending.step:
            rank.last_step, rank.pending = step, None
            rank.is_received.set()

    async def _deliver(self, rank: _Rank) -> None:
        if rank.identity is not None and rank.pending is not None:
            rank.sent_at = time.monotonic()
            await self._socket.send_multipart([rank.identity, BATCH, *rank.pending.frames], copy=False)


class ZmqReceiver:
    """The end of one rank: its thread fills a short queue of batches, or of the error that ended it."""

    def __init__(self, cfg: ZmqRollouts, run: str, rank: int) -> None:
        self._cfg = cfg
        self._run = run
        self._rank = rank
        self._gate = StepGate(rank)
        self._batches: queue.Queue[TrainBatch | StrettoError] = queue.Queue()
        self._is_closing = threading.Event()
        self._address = f"tcp://{cfg.host}:{cfg.port}"
        self._thread = threading.Thread(target=self._run_thread, name="rollouts", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None = None) -> TrainBatch:
        timeout_s = self._cfg.timeout_s if timeout_s is None else timeout_s
        batch = self.try_receive(timeout_s)
        if batch is None:
            raise no_batch(
                self._rank, self._gate.last_step, f"the orchestrator at {self._address}", timeout_s
            )
        return batch

    def try_receive(self, timeout_s: float) -> TrainBatch | None:
        try:
            item = self._batches.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, StrettoError):
            self._batches.put(item)
            raise item
        return item

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(5.0)

    def _run_thread(self) -> None:
        session = secrets.token_hex(8)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 1000)
        dealer.set(zmq.IDENTITY, f"rank-{self._rank}-{session}".encode())
        dealer.connect(self._address)
        try:
            self._loop(dealer, session)
        except StrettoError as error:
            self._batches.put(error)
        except Exception as error:
            self._batches.put(EngineError(f"rollouts of rank {self._rank}: {type(error).__name__}: {error}"))
        finally:
            dealer.close()
            context.term()

    def _loop(self, dealer: zmq.Socket[bytes], session: str) -> None:
        hello_at = 0.0
        while not self._is_closing.is_set():
            now = time.monotonic()
            if now >= hello_at:
                hello = Hello(run=self._run, rank=self._rank, session=session, last_step=self._gate.last_step)
                dealer.send_multipart([HELLO, *encode(hello)])
                hello_at = now + HELLO_S
            if self._batches.qsize() >= UNREAD_BATCHES:
                self._is_closing.wait(0.01)
            elif dealer.poll(int(min(hello_at - now, 0.1) * 1000) + 1):
                kind, *body = dealer.recv_multipart(copy=False)
                if kind.bytes == REFUSED:
                    raise WireError(f"the orchestrator at {self._address} refused: {body[0].bytes.decode()}")
                batch = _batch_of([frame.buffer for frame in body])
                is_new = self._gate.admits(batch)
                dealer.send_multipart([ACK, batch.step.to_bytes(8, "little")])
                if is_new:
                    self._batches.put(batch)


def _frames(batch: TrainBatch) -> Generator[None, None, list[Buffer]]:
    """The frames of a batch; yields between its micro batches."""
    frames = encode(msgspec.structs.replace(batch, micro_batches=()))
    blobs: list[bytes] = []
    size = 0
    for number, micro_batch in enumerate(batch.micro_batches, 1):
        blobs.append(encode_blob(micro_batch))
        size += len(blobs[-1])
        if size >= FRAME_BYTES or number == len(batch.micro_batches):
            frames.append(b"".join(blobs) if len(blobs) > 1 else blobs[0])
            blobs, size = [], 0
        yield
    return frames


def _batch_of(frames: Sequence[Buffer]) -> TrainBatch:
    """The batch of these frames.

    Raises: WireError, DataError when they are damaged or of another version.
    """
    head = decode(frames[:1], TrainBatch)
    where = f"micro batch of step {head.step}"
    micro_batches = [decode_blob(b, MicroBatch, where=where) for frame in frames[1:] for b in blobs_of(frame)]
    return msgspec.structs.replace(head, micro_batches=tuple(micro_batches))
