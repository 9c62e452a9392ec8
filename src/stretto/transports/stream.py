"""The state of one end of a link: settings, and messages that are numbered, acknowledged and sent again. No IO.

link.py moves the frames. A frame is [kind, number, ...], after the ROUTER's identity:

    R -, Register              rank: repeated with every heartbeat until D or X comes
    D session, Registered      server: registered
    X -, reason                server: refused
    M number, message ...      a message
    A number                   all messages up to this number were received
    H number                   heartbeat, acknowledges like A
    ? -                        server: this rank is not registered, because the server was restarted
    E -                        server: the server ends
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from stretto.base.errors import EngineError
from stretto.base.ports import in_url
from stretto.records.codec import BytesLike

Frames = list[BytesLike]

REGISTER, REGISTERED, REFUSED, UNKNOWN, END = b"R", b"D", b"X", b"?", b"E"
MESSAGE, ACK, HEARTBEAT = b"M", b"A", b"H"
RESEND_AFTER_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Settings of one wire, the same on both ends."""

    name: str
    title: str
    section: str  # config section of these settings, for messages
    server: str = "orchestrator"  # the process that binds, for messages
    host: str
    port: int
    heartbeat_s: float
    dead_after_s: float | None = None  # silence after which a peer is dead; None if another wire checks that
    resend_after_s: float = RESEND_AFTER_S
    resend_factor: float = 1.0  # multiplies resend_after_s with every repetition
    max_bytes: int = 1 << 16  # largest frame that the server accepts
    copies: bool = True  # whether ZMQ copies frames, which is faster for small ones

    @property
    def address(self) -> str:
        return f"tcp://{in_url(self.host)}:{self.port}"

    def link(self) -> Link:
        return Link(time.monotonic(), self.resend_after_s, self.resend_factor)


@dataclass
class _Sent:
    frames: Frames
    at: float
    wait_s: float
    done: asyncio.Future[None] | None


@dataclass
class Link:
    """One end of an ordered, acknowledged stream over a socket that may lose messages; no IO."""

    last_received_at: float
    resend_after_s: float = RESEND_AFTER_S
    resend_factor: float = 1.0
    sent: int = 0  # number of the last message sent
    received: int = 0  # number of the last message delivered
    unacked: OrderedDict[int, _Sent] = field(default_factory=OrderedDict)
    heartbeat_at: float | None = None  # when our last heartbeat was sent

    def add_message(
        self, body: Iterable[BytesLike], now: float, done: asyncio.Future[None] | None = None
    ) -> tuple[int, Frames]:
        """The number and the frames of the next message.

        done: gets its result when the message is acknowledged.
        """
        self.sent += 1
        frames = [MESSAGE, self.sent.to_bytes(8, "little"), *body]
        self.unacked[self.sent] = _Sent(frames, now, self.resend_after_s, done)
        return self.sent, frames

    def mark_acknowledged(self, number: int) -> None:
        """All messages up to this number have arrived at the other end."""
        for each in [n for n in self.unacked if n <= number]:
            if (done := self.unacked.pop(each).done) and not done.done():
                done.set_result(None)

    def accept(self, number: int) -> tuple[bool, bool]:
        """Whether to deliver, and whether to acknowledge, a received message.

        Each is delivered once and in order; one that arrives too early will be sent again.
        """
        if number == self.received + 1:
            self.received = number
            return True, True
        return False, number <= self.received

    def due_resends(self, now: float) -> list[Frames]:
        """The messages to send again now."""
        late = [sent for sent in self.unacked.values() if now - sent.at >= sent.wait_s]
        for sent in late:
            sent.at, sent.wait_s = now, self.resend_factor * sent.wait_s
        return [sent.frames for sent in late]

    def restart(self, now: float) -> list[Frames]:
        """Start again with a new process at the other end.

        Returns the unacknowledged messages, renumbered from 1.
        """
        unacked, self.unacked = list(self.unacked.values()), OrderedDict()
        self.last_received_at, self.sent, self.received = now, 0, 0
        return [self.add_message(sent.frames[2:], now, sent.done)[1] for sent in unacked]

    def heartbeat(self, now: float, wire: Wire, peer: object) -> list[Frames]:
        """The frames to send at a heartbeat: the heartbeat itself and the messages to send again.

        Raises: EngineError if nothing was received from the peer for too long.
        """
        late_s = now - (self.heartbeat_at or now) - 2 * wire.heartbeat_s
        self.heartbeat_at = now
        # While this process itself was stopped, swapped out or busy, it could not receive: that is no silence.
        self.last_received_at += max(late_s, 0.0)
        silence_s = now - self.last_received_at
        if wire.dead_after_s is not None and silence_s > wire.dead_after_s:
            raise EngineError(
                f"{peer} has been silent for {silence_s:.0f} s ({wire.section}.dead_after_s = "
                f"{wire.dead_after_s:g}): it died or hangs; see its log."
            )
        return [[HEARTBEAT, self.received.to_bytes(8, "little")], *self.due_resends(now)]
