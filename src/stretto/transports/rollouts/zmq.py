"""Batches over ZMQ: each batch is a message of link.py, and a rank receives at most two ahead of its trainer.

A rank's batches go to the process that registered on the control wire with the same session. A restarted rank gets
what the old one did not acknowledge. A rank survives the end of its orchestrator and registers with the next one.

A message is the TrainBatch without its micro batches, then their blobs (several small ones per frame). The blobs are
encoded one at a time, so that a large batch does not block the event loop.
"""

from __future__ import annotations

import hmac
from collections.abc import Generator, Mapping, Sequence

import msgspec

from stretto.base.aio import run_in_slices
from stretto.base.errors import EngineError, WireError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ZmqRollouts
from stretto.records.codec import BytesLike, decode, decode_blob, encode, encode_blob, split_blobs
from stretto.records.control import Register
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.transports.link import LinkClient, LinkServer, Peer
from stretto.transports.rollouts.delivery import StepGate, check_batches
from stretto.transports.stream import Wire

WIRE = "rollouts"
FRAME_BYTES = 1 << 20  # smallest frame of blobs; each frame costs as much as copying some tens of KiB


class ZmqSender(LinkServer[None]):
    """The orchestrator's end."""

    def __init__(
        self, cfg: ZmqRollouts, run: str, secret: Secret, world_size: int, registered: Mapping[int, str]
    ) -> None:
        super().__init__(_wire(cfg), run, secret)
        self._cfg, self._world_size, self._sessions_on_control = cfg, world_size, registered

    async def send(self, batches: list[TrainBatch]) -> None:
        step, posted = check_batches(batches, self._world_size), {}
        for batch in batches:
            peer = self._peer(batch.rank)
            posted[peer] = await self._post(peer, await run_in_slices(_encode_batch(batch)))
        if late := await self._wait_acknowledged(posted, self._cfg.timeout_s):
            what = f"the batch of step {step} was not received within {self._cfg.timeout_s:g} s"
            raise EngineError(f"{what} by {', '.join(map(str, late))}.")

    def _refusal(self, info: Register, known: Peer | None) -> str | None:
        if not 0 <= info.rank < self._world_size:
            return f"the orchestrator expects {self._world_size} ranks."
        session = self._sessions_on_control.get(info.rank)
        if session is None:
            return "it has not registered on the control wire."
        if not hmac.compare_digest(session.encode(), info.session.encode()):
            return "another process is registered as this rank."
        return None

    def _decode_event(self, peer: Peer, body: list[bytes]) -> None:
        raise WireError("ranks send no messages on this wire.")


class ZmqReceiver(LinkClient[TrainBatch]):
    """The end of one rank; connects at once."""

    outlives_server = True
    max_unread = 2  # batches received ahead of the trainer

    def __init__(self, cfg: ZmqRollouts, run: str, secret: Secret, rank: int, session: str) -> None:
        super().__init__(_wire(cfg), secret)
        self._gate = StepGate(rank)
        self._start(Register(rank=rank, run_id=run, session=session))

    def receive(self, timeout_s: float) -> TrainBatch | None:
        return next(iter(self._pop_messages(timeout_s, at_most=1)), None)

    def _decode_message(self, body: Sequence[BytesLike]) -> TrainBatch | None:
        batch = _decode_batch(body)
        return batch if self._gate.admits(batch) else None


def _wire(cfg: ZmqRollouts) -> Wire:
    return Wire(
        name=WIRE,
        title="rollout transport",
        section="rollout_transport",
        host=cfg.host,
        port=cfg.port,
        heartbeat_s=1.0,
        resend_after_s=5.0,
        copies=False,
        resend_factor=2.0,  # batches may take long to arrive
    )


def _encode_batch(batch: TrainBatch) -> Generator[None, None, list[BytesLike]]:
    """Encode a batch as frames; a generator that yields after each micro batch."""
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


def _decode_batch(frames: Sequence[BytesLike]) -> TrainBatch:
    """Decode the batch in these frames.

    Raises: WireError or DataError if they are damaged or of another version.
    """
    head = decode(frames[:1], TrainBatch)
    where = f"micro batch of step {head.step}"
    micro_batches = [decode_blob(b, MicroBatch, where=where) for frame in frames[1:] for b in split_blobs(frame)]
    return msgspec.structs.replace(head, micro_batches=tuple(micro_batches))
