"""The control wire between trainer ranks and orchestrator: registration, steps, versions, checkpoints, stops.

link.py delivers the messages, once and in order, with heartbeats. A peer that is silent for `dead_after_s` is dead;
every wait on the other side then ends with an error that names it.

A rank is refused if it is of another run or record schema, is not part of the plan, or has a number that is taken; its
`register` raises the reason. Messages of a refused process have no effect.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from stretto.base.errors import EngineError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.codec import BytesLike, decode, encode
from stretto.records.control import Bye, Failed, Message, Register, Registered
from stretto.transports.link import LinkClient, LinkServer, Peer
from stretto.transports.stream import Wire

T = TypeVar("T")

WIRE = "control"
MAX_BYTES = 1 << 28
"""Largest frame; the manifest of 20,000 tensors has 3 MB."""
MAX_POSTED = 8
"""Unacknowledged messages of a rank before `post` waits."""
MAX_NAMED = 16
"""Missing ranks that an error message names."""


@dataclass(frozen=True)
class Event:
    """A message and the rank that sent it."""

    rank: int
    message: Message


def rank_wire(name: str, cfg: ControlSection, **settings: Any) -> Wire:
    """A wire to all trainer ranks with the settings of `[control]`; settings: further ones of `Wire`."""
    return Wire(
        name=name,
        title=f"{name} wire",
        section="control",
        host=cfg.host,
        port=cfg.port,
        heartbeat_s=cfg.heartbeat_s,
        dead_after_s=cfg.dead_after_s,
        **settings,
    )


class RankServer(LinkServer[T]):
    """The end of a wire to which a fixed number of ranks register."""

    _build_wire: Callable[[ControlSection], Wire]

    def __init__(
        self, cfg: ControlSection, run_id: str, secret: Secret, *, world_size: int = 1, resume_step: int | None = None
    ) -> None:
        super().__init__(self._build_wire(cfg), run_id, secret, resume_step)
        self._cfg = cfg
        self._world_size = world_size

    @property
    def ranks(self) -> dict[int, Register]:
        """The registrations of all registered ranks, by rank."""
        return {rank: peer.info for rank, peer in sorted(self._peers.items()) if peer.info}

    async def wait_registered(self, timeout_s: float | None = None) -> list[Register]:
        """Wait until every rank has registered; returns their registrations in rank order.

        Raises: EngineError naming the missing ranks.
        """
        timeout_s = self._cfg.register_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._peers) < self._world_size:
                    self._check()
                    self._changed.clear()
                    await self._changed.wait()
                self._check()
        except TimeoutError:
            where = f"{self._wire.address} within {timeout_s:g} s"
            raise EngineError(f"{self._missing()} at {where}; see its log.") from None
        return list(self.ranks.values())

    # -- inside --

    def _missing(self) -> str:
        """Text that names the ranks that did not register."""
        if not self._peers:
            return "no trainer rank registered"
        missing = [rank for rank in range(self._world_size) if rank not in self._peers]
        more = len(missing) - MAX_NAMED
        return f"trainer ranks {missing[:MAX_NAMED]}{f' and {more} more' * (more > 0)} did not register"

    def _refusal(self, info: Register, known: Peer | None) -> str | None:
        if known:
            return f"rank {info.rank} is taken by {known}; is an older trainer still running?"
        if info.world_size != self._world_size:
            expected = f"the {self._wire.server} expects {self._world_size} ranks (num_train_workers)"
            return f"it says world_size {info.world_size}, {expected}; make them equal."
        if not 0 <= info.rank < info.world_size:
            return f"its rank {info.rank} is not below its world_size {info.world_size}."
        return None


class RankClient(LinkClient[T]):
    """The end of one of these ranks."""

    _build_wire: Callable[[ControlSection], Wire]

    def __init__(self, cfg: ControlSection, run_id: str, secret: Secret) -> None:
        super().__init__(self._build_wire(cfg), secret)
        self._cfg, self._run_id = cfg, run_id
        self.session = secrets.token_hex(16)
        """Identifies this process, on other wires too."""

    def register(self, info: Register) -> Registered:
        """Register this rank and start the heartbeats; waits for the server to appear.

        Raises: WireError if the server refuses, with its reason; EngineError if none answers in time.
        """
        self._start(msgspec.structs.replace(info, run_id=self._run_id, session=self.session))
        registered = self._wait_registered(timeout_s := self._cfg.register_timeout_s)
        if registered is None:
            raise EngineError(
                f"no {self._wire.server} answered at {self._wire.address} within {timeout_s:g} s; see its log."
            )
        return registered


# -- the control wire --


def _wire(cfg: ControlSection) -> Wire:
    return rank_wire(WIRE, cfg, max_bytes=MAX_BYTES)


class ControlServer(RankServer[Event]):
    """The orchestrator's end of the control wire."""

    _build_wire = staticmethod(_wire)

    async def events(self) -> AsyncIterator[Event]:
        """All messages, until every rank has sent Bye or Failed, which is then the last event."""
        while True:
            yield await self.next_event()
            if self._events.empty() and all(peer.is_gone for peer in self._peers.values()):
                return

    async def send(self, message: Message, *, rank: int | None = None, timeout_s: float | None = None) -> None:
        """Send to one rank, or to all; returns when each has acknowledged the message or is gone.

        Raises: EngineError naming a rank that did not acknowledge it in time (default: dead_after_s).
        """
        self._check()
        timeout_s = self._cfg.dead_after_s if timeout_s is None else timeout_s
        peers = list(self._peers.values()) if rank is None else [self._peers[rank]]
        body = encode(message)
        posted = {peer: await self._post(peer, body) for peer in peers if not peer.is_gone}
        if late := await self._wait_acknowledged(posted, timeout_s):
            what = type(message).__name__
            raise EngineError(f"{late[0]} did not acknowledge {what} within {timeout_s:g} s.")

    # -- inside --

    def _decode_event(self, peer: Peer, body: list[bytes]) -> Event:
        message = decode(body, Message)
        if isinstance(message, (Bye, Failed)):
            self._mark_gone(peer)
        return Event(peer.rank, message)


class ControlClient(RankClient[Message]):
    """A trainer rank's end of the control wire.

    Send Bye before `close`, otherwise this rank counts as dead.
    """

    _build_wire = staticmethod(_wire)

    def send(self, message: Message, *, timeout_s: float | None = None) -> None:
        """Send a message; returns when the orchestrator has acknowledged it.

        Raises: EngineError if it did not in time (default: dead_after_s).
        """
        timeout_s = self._cfg.dead_after_s if timeout_s is None else timeout_s
        if not self._post(encode(message), timeout_s):
            what = type(message).__name__
            raise EngineError(f"{self._peer} did not acknowledge {what} within {timeout_s:g} s.")

    def post(self, message: Message) -> None:
        """Send a message without waiting for its acknowledgement; the order of messages is kept.

        Raises: EngineError if MAX_POSTED messages are unacknowledged and none is acknowledged in dead_after_s.
        """
        timeout_s = self._cfg.dead_after_s
        if not self._post_later(encode(message), MAX_POSTED, timeout_s):
            raise EngineError(f"{self._peer} acknowledged none of {MAX_POSTED} messages within {timeout_s:g} s.")

    def poll(self) -> list[Message]:
        """Messages that arrived since the last call, without waiting."""
        return self._pop_messages(0.0)

    def wait(self, timeout_s: float) -> list[Message]:
        """Wait for at least one message; [] if none came in time."""
        return self._pop_messages(timeout_s)

    def _decode_message(self, body: Sequence[BytesLike]) -> Message:
        message: Message = decode(body, Message)
        return message
