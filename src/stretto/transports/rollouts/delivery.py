"""The interface of the rollout transports, and the rule that makes delivery exactly once.

A batch is sent again whenever its acknowledgement may have been lost; a receiver acknowledges a step that it
already has without delivering it again. A new receiver (in a resumed run) begins with the first step that comes.
"""

from __future__ import annotations

from typing import Protocol

from stretto.base.errors import WireError
from stretto.records.sample import TrainBatch


class Sender(Protocol):
    """The orchestrator's end."""

    async def open(self) -> None:
        """Start to accept ranks; they may connect later."""
        ...

    async def send(self, batches: list[TrainBatch]) -> None:
        """Send one step's batches, one per rank in rank order; returns when every rank has its own.

        Raises: EngineError naming the ranks that did not receive theirs within timeout_s.
        """
        ...

    async def close(self) -> None: ...


class Receiver(Protocol):
    """The end of one trainer rank; received arrays are read-only."""

    def receive(self, timeout_s: float) -> TrainBatch | None:
        """The next step's batch, None if none came in time.

        Raises: WireError if the orchestrator is of another run or version.
        """
        ...

    def close(self) -> None: ...


class StepGate:
    """Admits every step once, in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last_step: int | None = None

    def admits(self, batch: TrainBatch) -> bool:
        """Whether to deliver the batch; False if it was delivered before.

        Raises: WireError if the batch is of another rank, or skips a step.
        """
        if batch.rank != self.rank:
            raise WireError(f"trainer rank {self.rank} received the batch of rank {batch.rank}.")
        if self.last_step is not None:
            if batch.step <= self.last_step:
                return False
            if batch.step != self.last_step + 1:
                raise WireError(
                    f"trainer rank {self.rank} received step {batch.step}; expected step {self.last_step + 1}."
                )
        self.last_step = batch.step
        return True


def check_batches(batches: list[TrainBatch], world_size: int) -> int:
    """Check that these are the batches of one step, one per rank, and return the step."""
    assert [batch.rank for batch in batches] == list(range(world_size)), "one batch per rank, in rank order"
    assert len({batch.step for batch in batches}) == 1, "all ranks train the same step"
    return batches[0].step
