"""The wire between the hub of a training service and the trainer's ranks: operations there, answers back.

link.py delivers messages, once and in order, with authentication and heartbeats; records/tenants.py has them. The hub
may submit any number of operations ahead: ranks execute them in order, and each future ends with the answers of all
ranks. A rank that dies, fails or hangs ends the wire: every future and every call then raises the error that names it.
Ranks end when the hub does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from stretto.base.errors import EngineError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.codec import BytesLike, decode, encode
from stretto.records.control import Register, Registered
from stretto.records.tenants import Answer, Done, Operation, RankFailed, Shutdown
from stretto.transports.control import RankServer
from stretto.transports.link import LinkClient, Peer
from stretto.transports.stream import Wire

logger = logging.getLogger(__name__)

WIRE = "tenants"
MAX_BYTES = 1 << 30
"""Largest frame of an answer: log-probabilities of a quarter of a billion tokens."""


@dataclass(frozen=True)
class RankAnswer:
    """An answer and the rank that gave it."""

    rank: int
    answer: Answer


@dataclass
class _Pending:
    future: asyncio.Future[list[Done]]
    answers: dict[int, Done] = field(default_factory=dict)


class TenantServer(RankServer[RankAnswer]):
    """The hub's end. `open`, `wait_registered`, then `submit`; `close` tells the ranks that the hub ends."""

    def __init__(self, cfg: ControlSection, run_id: str, secret: Secret, *, world_size: int = 1) -> None:
        super().__init__(_wire(cfg), cfg, run_id, secret, world_size=world_size)
        self._number = 0
        self._pending: dict[int, _Pending] = {}
        self._shutdown: int | None = None
        self._collector: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()

    async def open(self) -> None:
        """Bind the port and start to receive.

        Raises: EngineError if the port is taken.
        """
        await super().open()
        self._collector = asyncio.create_task(self._collect())

    async def close(self) -> None:
        """End the wire; futures that wait get an error, ranks end."""
        await super().close()
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
        self._end_all(EngineError("the hub has closed the wire to its trainer."))

    def check(self) -> None:
        """Raises: EngineError once the wire has failed."""
        self._check()

    def fail(self, reason: str) -> None:
        """End the wire, and all waits on it, for what the hub has found out about a rank."""
        self._fail(EngineError(reason))

    async def submit(self, operation: Operation | Sequence[Operation]) -> asyncio.Future[list[Done]]:
        """Give every rank the next operation, or each its own; the future has their answers, in rank order.

        Raises: EngineError once the wire has failed; the future raises it too.
        """
        ranks = range(self._world_size)
        of_rank = list(operation) if isinstance(operation, Sequence) else [operation] * len(ranks)
        assert len(of_rank) == len(ranks), f"{len(of_rank)} operations for {len(ranks)} ranks"
        async with self._order:  # all ranks get operations of several tasks in one order
            return await self._submit(of_rank)

    async def _submit(self, of_rank: Sequence[Operation]) -> asyncio.Future[list[Done]]:
        self._check()
        self._number += 1
        number, numbered = self._number, [msgspec.structs.replace(op, number=self._number) for op in of_rank]
        if isinstance(numbered[0], Shutdown):
            self._shutdown = number
        future: asyncio.Future[list[Done]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_mark_seen)
        self._pending[number] = _Pending(future)
        for rank, each in enumerate(numbered):
            await self._post(self._peer(rank), encode(each))
        return future

    async def execute(self, operation: Operation | Sequence[Operation]) -> list[Done]:
        """Submit an operation and wait for the answers of all ranks."""
        return await (await self.submit(operation))

    # -- inside --

    async def _collect(self) -> None:
        try:
            while True:
                event = await self.next_event()
                if isinstance(event.answer, RankFailed):
                    self._fail(EngineError(f"trainer rank {event.rank} failed: {event.answer.reason}"))
                    continue
                if (pending := self._pending.get(event.answer.number)) is None:
                    continue
                pending.answers[event.rank] = event.answer
                if len(pending.answers) == self._world_size:
                    del self._pending[event.answer.number]
                    if not pending.future.done():
                        pending.future.set_result([pending.answers[r] for r in range(self._world_size)])
        except EngineError as error:
            self._end_all(error)
        except Exception as error:
            logger.exception("%s failed", self._wire.title)
            self._end_all(EngineError(f"{self._wire.title}: {error}"))

    def _end_all(self, error: EngineError) -> None:
        for pending in self._pending.values():
            with contextlib.suppress(asyncio.InvalidStateError):
                pending.future.set_exception(error)
        self._pending.clear()

    def _decode_event(self, peer: Peer, body: list[bytes]) -> RankAnswer:
        answer = decode(body, Answer)
        if isinstance(answer, RankFailed) or answer.number == self._shutdown:
            self._mark_gone(peer)
        return RankAnswer(peer.rank, answer)


def _mark_seen(future: asyncio.Future[list[Done]]) -> None:
    """A caller that gave up must not leave a warning about an error that nobody read."""
    if not future.cancelled():
        future.exception()


class TenantClient(LinkClient[Operation]):
    """A rank's end. Once the hub is gone, every call raises."""

    def __init__(self, cfg: ControlSection, run_id: str, secret: Secret) -> None:
        super().__init__(_wire(cfg), secret)
        self._cfg, self._run_id = cfg, run_id

    def register(self, rank: int, world_size: int) -> Registered:
        """Register this rank and start the heartbeats; waits for the hub to appear.

        Raises: WireError if the hub refuses, with its reason; EngineError if none answers in time.
        """
        info = Register(rank=rank, world_size=world_size, run_id=self._run_id, session=secrets.token_hex(16))
        self._start(info)
        registered = self._wait_registered(timeout_s := self._cfg.register_timeout_s)
        if registered is None:
            raise EngineError(f"no hub answered at {self._wire.address} within {timeout_s:g} s; see its log.")
        return registered

    def receive(self, timeout_s: float) -> Operation | None:
        """The next operation; None if none came in time.

        Raises: EngineError once the hub has ended or died.
        """
        return next(iter(self._pop_messages(timeout_s, at_most=1)), None)

    def answer(self, done: Done) -> None:
        """Answer an operation; returns at once, order is kept.

        Raises: EngineError once the hub has ended or died.
        """
        self._enqueue(encode(done))

    def flush(self, answer: Answer, timeout_s: float = 5.0) -> bool:
        """Send this rank's last answer; returns whether the hub has received it."""
        return self._post(encode(answer), timeout_s)

    @property
    def _peer(self) -> str:
        """The hub, as error messages name it."""
        if self._registered is None:
            return f"hub at {self._wire.address}"
        return f"hub (pid {self._registered.pid} on {self._registered.host})"

    def _decode_message(self, body: Sequence[BytesLike]) -> Operation:
        return decode(body, Operation)


def _wire(cfg: ControlSection) -> Wire:
    return Wire(
        name=WIRE,
        title="tenants wire",
        section="control",
        host=cfg.host,
        port=cfg.port,
        heartbeat_s=cfg.heartbeat_s,
        dead_after_s=cfg.dead_after_s,
        resend_after_s=5.0,
        resend_factor=2.0,  # a pass may have many micro batches
        max_bytes=MAX_BYTES,
    )
