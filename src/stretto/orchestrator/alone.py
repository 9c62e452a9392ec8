"""Stand-ins for the processes that are left out of a debug run (`orchestrator.debug`).

rollouts    AbsentTrainer is the trainer: it reports every step as trained as soon as its batch is shipped
training    AbsentEngines are the engines: batches come from saved rollouts, and loading a version does nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from stretto.records.control import Bye, Message, Register, StepDone, Stop, VersionReady
from stretto.records.sample import TrainBatch
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.control import Event
from stretto.transports.engine.updates import Updated


class AbsentTrainer:
    """Stands in for both wires to the trainer (ControlServer and Sender)."""

    def __init__(self, world_size: int, start: int, max_steps: int | None, *, shares_prefixes: bool = False) -> None:
        """start: the step after which the run continues. max_steps: None to run until stopped.

        shares_prefixes: the trainer that is left out would compute what samples begin with alike once.
        """
        self._world_size, self._start, self._max_steps = world_size, start, max_steps
        self._shares_prefixes = shares_prefixes
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._publish(start)

    async def wait_registered(self) -> list[Register]:
        """Registrations of all ranks, which continue where the orchestrator does."""
        resumed = self._start or None
        return [
            Register(
                rank=rank,
                world_size=self._world_size,
                resumed_step=resumed,
                version=self._start,
                shares_prefixes=self._shares_prefixes,
            )
            for rank in range(self._world_size)
        ]

    async def next_event(self) -> Event:
        """The next message of a rank."""
        return await self._events.get()

    async def send(self, message: Message | Sequence[TrainBatch], **_: object) -> None:
        """Answer a batch with a trained step and, if it is due, its version, and Stop with the trainer's end."""
        if isinstance(message, Stop):
            self._end()
        elif isinstance(message, Sequence):
            step = message[0].step
            self._emit(StepDone(step=step))
            if message[0].is_sent:
                self._publish(step)
            if step == self._max_steps:
                self._end()

    def _publish(self, version: int) -> None:
        """Announce a version without tensors."""
        manifest = WeightManifest(version=version, transport="none", location="", shards=(), tensors=(), checksum=0)
        self._emit(VersionReady(manifest=manifest))

    def _end(self) -> None:
        for rank in range(self._world_size):
            self._events.put_nowait(Event(rank, Bye()))

    def _emit(self, message: Message) -> None:
        self._events.put_nowait(Event(0, message))


class AbsentEngines:
    """Stands in for the client of the engines."""

    generation = 0
    num_ready = 0
    num_replies = 0
    paused_s = 0.0
    updated: Mapping[str, Updated] = MappingProxyType({})

    async def wait_ready(self, _: float) -> None:
        """Return at once."""

    async def watch(self) -> None:
        """Wait to be cancelled, as the watch of real engines does."""
        await asyncio.Event().wait()

    async def update_weights(self, _: WeightManifest) -> None:
        """Do nothing."""

    async def score_canary(self, *_: object) -> dict[str, object]:
        """No engine has scored the tokens."""
        return {}

    async def abort(self, _: Iterable[str] | None = None) -> None:
        """Do nothing: no request runs."""

    async def metrics(self) -> dict[str, float]:
        """Engines that do not exist have no metrics."""
        return {}

    async def metrics_by_engine(self) -> dict[str, dict[str, float]]:
        """Nor has any of them."""
        return {}
