"""`memory_profiler_path`: which code allocated which of a GPU's memory, step by step.

A file per step and rank, `step_<N>_<process>.pickle`, has the stacks of all allocations of that step;
https://pytorch.org/memory_viz draws it. A step that fails writes its file too: it is the one that ran out of memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from stretto.base.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_EVENTS = 100_000
"""Allocations and releases that are kept of one step, the latest ones: a file of about 40 MB."""


class MemorySnapshots:
    """Records the memory of this process's GPU, if there is a directory for it."""

    def __init__(self, directory: Path | None, process: str) -> None:
        """directory: None: nothing is recorded. process: its name in the names of files.

        Raises: ConfigError on a machine without a GPU.
        """
        if directory is not None and not torch.cuda.is_available():
            raise ConfigError(
                f'memory_profiler_path = "{directory}": torch records the memory of GPUs only, and this process has '
                "none; leave it out (`stretto plan` says what a run needs)"
            )
        self._directory, self._process = directory, process

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block, and write its file whether it raises or not."""
        if self._directory is None:
            yield
            return
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        try:
            yield
        finally:
            self._write(self._directory / f"step_{number}_{self._process}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, path: Path) -> None:
        """Write what was recorded; log a warning if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("no snapshot of the memory at %s: %s", path, error)
            return
        logger.info("snapshot of the memory: %s, %d bytes", path, path.stat().st_size)
