"""What both rollout transports promise, and the rule that makes delivery exactly once.

A batch is sent again whenever its acknowledgement may have been lost; the receiver acknowledges a step it
already has and delivers it no second time. A receiver that starts anew (a resumed run) begins with whatever
step comes first.
"""

from __future__ import annotations

from typing import Protocol

from stretto.base.errors import EngineError, WireError
from stretto.records.sample import TrainBatch


class Sender(Protocol):
    """The orchestrator's end."""

    async def open(self) -> None:
        """Make this end ready; ranks may come later."""
        ...

    async def send(self, batches: list[TrainBatch]) -> None:
        """One batch a rank, in rank order, all of one step; returns when every rank has received its own.

        Raises: EngineError naming the ranks that did not within timeout_s.
        """
        ...

    async def close(self) -> None: ...


class Receiver(Protocol):
    """The end of one trainer rank. Received arrays are read-only."""

    def receive(self, timeout_s: float | None = None) -> TrainBatch:
        """The next step's batch.

        Raises: EngineError when none came in time (default: timeout_s of the transport), WireError when the
        orchestrator is of another run or version.
        """
        ...

    def try_receive(self, timeout_s: float) -> TrainBatch | None:
        """The next step's batch, None when none came in time."""
        ...

    def close(self) -> None: ...


class StepGate:
    """Lets every step through once, in order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.last_step: int | None = None

    def admits(self, batch: TrainBatch) -> bool:
        """Whether to deliver the batch; False for one that was delivered before.

        Raises: WireError for a batch of another rank, or one that skips a step.
        """
        if batch.rank != self._rank:
            raise WireError(f"trainer rank {self._rank} received the batch of rank {batch.rank}.")
        if self.last_step is not None:
            if batch.step <= self.last_step:
                return False
            if batch.step != self.last_step + 1:
                raise WireError(
                    f"trainer rank {self._rank} got step {batch.step}; step {self.last_step + 1} was due."
                )
        self.last_step = batch.step
        return True


def check_batches(batches: list[TrainBatch], world_size: int) -> int:
    """The step that these batches, one a rank, belong to."""
    assert [batch.rank for batch in batches] == list(range(world_size)), "one batch a rank, in rank order"
    assert len({batch.step for batch in batches}) == 1, "all ranks train the same step"
    return batches[0].step


def no_batch(rank: int, last_step: int | None, source: str, timeout_s: float) -> EngineError:
    """The error of a rank that waited in vain."""
    which = "the first batch" if last_step is None else f"the batch of step {last_step + 1}"
    return EngineError(
        f"trainer rank {rank} waited {timeout_s:g} s for {which} from {source}; see the log there."
    )
