"""Writes the orchestrator's half of each checkpoint, as the trainer writes its own."""

from __future__ import annotations

import asyncio
import logging

from stretto.base.errors import WireError
from stretto.orchestrator.run.parts import RunParts
from stretto.orchestrator.state import checkpoint
from stretto.orchestrator.state.checkpoint import Progress
from stretto.records.control import CheckpointComplete

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """The checkpoints that the trainer has begun and not yet saved."""

    def __init__(self, run: RunParts) -> None:
        self._parts = run
        self._begun: dict[int, Progress] = {}  # by step

    def begin(self, step: int) -> None:
        """Remember the state at `step`; it is written once the trainer has saved its half."""
        run, progress = self._parts, self._parts.progress
        if step != progress.step:
            raise WireError(f"the trainer began a checkpoint of step {step} after step {progress.step}")
        progress.curriculum = run.curriculum.state_at(step)
        progress.baselines = run.baselines.state_at(step)
        progress.next_draw, progress.open_draws = run.ledger.next_draw(), run.ledger.open_draws()
        self._begun[step] = checkpoint.snapshot(progress)

    async def complete(self, step: int) -> None:
        """Write our half and the marker: the trainer's half is on disk."""
        if step not in self._begun:
            raise WireError(f"the trainer saved a checkpoint of step {step} that it had not begun")
        run = self._parts
        await run.ledger.flush()  # a checkpoint needs the rows of all that was trained up to it
        # The ledger deletes payloads that no checkpoint needs, so it records a checkpoint only once complete.
        await asyncio.to_thread(checkpoint.save, run.run_dir, self._begun.pop(step))
        run.ledger.checkpoint_saved(step)
        await run.control.send(CheckpointComplete(step=step))
        logger.info("checkpoint step=%d complete", step)
