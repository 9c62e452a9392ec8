"""`--profile N`: traces of torch's operations at chosen steps, for Perfetto.

Trainer and embedded engine write them. The steps come from an environment variable, so that all processes of a run
trace the same ones. A step's file is RUN/profiles/<process>_step_<N>.json.gz; https://ui.perfetto.dev opens it. Shapes
and Python stacks are left out, which keeps a file small and the step near its usual speed. Without the variable
nothing costs time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.base.paths import RunDir
from stretto.config.traced import VARIABLE, parse_steps

logger = logging.getLogger(__name__)

MOST_PASSES = 50
"""Most passes of an engine in one file: a step of a small model has thousands."""


class Tracer:
    """Traces one process; all calls that may begin or end a trace must come from one thread.

    torch's profiler crashes the process if another thread stops it than the one that started it.
    """

    def __init__(self, run: RunDir | None, process: str, steps: frozenset[int] | None = None) -> None:
        """steps: those to trace; None: the steps that the environment variable lists.

        Raises: ConfigError if the variable holds no steps.
        """
        text = os.environ.get(VARIABLE, "")
        chosen = parse_steps(text) if text else frozenset()
        self._steps = chosen if steps is None else steps
        self._directory = None if run is None else run.profiles
        self._process = process
        self._profile: Any = None
        self._number = self._num_passes = self._thread = 0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block if this step was chosen; no file is written if the block raises."""
        if number not in self._steps:
            yield
            return
        self._begin(number)
        try:
            yield
        except BaseException:
            self._profile.stop()
            self._profile = None
            raise
        self._end()

    def before_pass(self, version: int) -> None:
        """Begin or end a trace before a pass of an engine with this version.

        The trace of a chosen step N begins at the first pass with version N-1, the last version that its rollouts can
        have, or with a later one.
        """
        if not self._steps and self._profile is None:
            return
        self._num_passes += 1
        if self._profile is not None:
            if self._num_passes > MOST_PASSES:
                self._end()
            return
        due = {step for step in self._steps if step <= version + 1}
        if due:
            self._steps -= due
            self._num_passes = 1
            self._begin(max(due))

    @property
    def is_tracing(self) -> bool:
        """Is a trace going on? Any thread may read this."""
        return self._profile is not None

    def close(self) -> None:
        """End a trace that is still going on."""
        if self._profile is not None:
            self._end()

    def _begin(self, number: int) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._number, self._thread = number, threading.get_ident()
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _end(self) -> None:
        """Write the file; a trace that cannot be written is a warning."""
        assert threading.get_ident() == self._thread, "a trace must end in the thread in which it began"
        profile, self._profile = self._profile, None
        profile.stop()
        if self._directory is None:
            return
        path: Path = self._directory / f"{self._process}_step_{self._number}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}")  # torch compresses by the last part of the name
            profile.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:
            logger.warning("no trace of step %d: %s", self._number, error)
            return
        logger.info("trace of step %d: %s, %d bytes", self._number, path, path.stat().st_size)
