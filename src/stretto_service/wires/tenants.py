"""The wire between the hub of a training service and the trainer's ranks: operations, and the ranks' answers.

link.py delivers the messages of wires/operations.py once and in order, with authentication and heartbeats. The hub may
submit any number of operations ahead. Ranks execute them in order, and the future of an operation gets the answers of
all ranks. A rank that dies, fails or hangs ends the wire: every future and every call then raises the error that names
it. Ranks end when the hub ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from stretto.base.errors import EngineError
from stretto.base.secret import Secret
from stretto.config.sections.transport import ControlSection
from stretto.records.codec import BytesLike, decode, encode
from stretto.transports.control import RankClient, RankServer, rank_wire
from stretto.transports.link import Peer
from stretto.transports.stream import Wire
from stretto_service.wires.operations import Answer, Done, Operation, RankFailed, Shutdown

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


def _wire(cfg: ControlSection) -> Wire:
    # Messages are sent again late, because a pass may have many micro batches.
    return rank_wire(WIRE, cfg, server="hub", resend_after_s=5.0, resend_factor=2.0, max_bytes=MAX_BYTES)


class TenantServer(RankServer[RankAnswer]):
    """The hub's end: `open`, `wait_registered`, then `submit`; `close` tells the ranks that the hub ends."""

    _build_wire = staticmethod(_wire)

    def __init__(self, cfg: ControlSection, run_id: str, secret: Secret, *, world_size: int = 1) -> None:
        super().__init__(cfg, run_id, secret, world_size=world_size)
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
        """End the wire: waiting futures get an error, and the ranks end."""
        await super().close()
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
        self._end_all(EngineError("the hub has closed the wire to its trainer."))

    def check(self) -> None:
        """Raises: EngineError once the wire has failed."""
        self._check()

    def fail(self, reason: str) -> None:
        """End the wire and all waits on it with this reason."""
        self._fail(EngineError(reason))

    async def submit(self, operation: Operation | Sequence[Operation]) -> asyncio.Future[list[Done]]:
        """Send every rank the same operation, or each its own; the future gets their answers, in rank order.

        Raises: EngineError once the wire has failed; the future raises it too.
        """
        by_rank = operation if isinstance(operation, Sequence) else [operation] * self._world_size
        assert len(by_rank) == self._world_size, f"{len(by_rank)} operations for {self._world_size} ranks"
        async with self._order:  # all ranks get the operations of several tasks in the same order
            self._check()
            self._number += 1
            number = self._number
            if isinstance(by_rank[0], Shutdown):
                self._shutdown = number
            future: asyncio.Future[list[Done]] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieve_error)
            self._pending[number] = _Pending(future)
            for rank, each in enumerate(by_rank):
                await self._post(self._peer(rank), encode(msgspec.structs.replace(each, number=number)))
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
        except Exception as error:  # those who wait would wait for ever
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


def _retrieve_error(future: asyncio.Future[list[Done]]) -> None:
    """Keep asyncio from warning about an error that no caller read, because it was cancelled."""
    if not future.cancelled():
        future.exception()


class TenantClient(RankClient[Operation]):
    """A rank's end. Every call raises once the hub has ended or died."""

    _build_wire = staticmethod(_wire)

    def receive(self, timeout_s: float) -> Operation | None:
        """The next operation; None if none came in time."""
        return next(iter(self._pop_messages(timeout_s, at_most=1)), None)

    def answer(self, done: Done) -> None:
        """Answer an operation; returns at once, and the order of answers is kept."""
        self._enqueue(encode(done))

    def flush(self, answer: Answer, timeout_s: float = 5.0) -> bool:
        """Send this rank's last answer; returns whether the hub has received it."""
        return self._post(encode(answer), timeout_s)

    def _decode_message(self, body: Sequence[BytesLike]) -> Operation:
        operation: Operation = decode(body, Operation)
        return operation
