"""The learner's half of a checkpoint: RUN/checkpoints/step_N/trainer, whole or not there.

    save: wait for the checkpoint before -> copy this rank's parts to CPU memory -> training goes on
    in a thread: write them (shard_files.py) -> all ranks have written -> the lead renames the directory

Written into a directory of another name, flushed to the disk, then renamed. The COMPLETE marker beside it
is written by the orchestrator in `rl` and by the trainer in `sft`; a checkpoint without it does not count.
Sizes of files are recorded, so that one which was cut off later is named instead of being half read. Any number
of ranks and any mesh can continue from it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.paths import RunDir
from stretto.trainer.learner import Learner
from stretto.trainer.mesh import is_lead_process, num_ranks
from stretto.trainer.shard_files import PartFiles, write
from stretto.trainer.state import Described, Part

logger = logging.getLogger(__name__)

SCHEMA = 2
_VALUES = "state.json"

OnWritten = Callable[[int], None]


class Saver:
    """Writes checkpoints of a run, one at a time; every rank has one, and all call the same methods alike.

    Between `save` and the end of the writing there is one more copy of the state in CPU memory, whose buffers
    stay for the next one. With is_async = False, `save` returns when all is written, and there is no copy.
    """

    def __init__(self, run: RunDir, *, is_async: bool, on_written: OnWritten) -> None:
        """on_written: told on the lead that a step's directory is there; from another thread if is_async."""
        self._run, self._is_async, self._on_written = run, is_async, on_written
        # A group of its own: training's collectives go on meanwhile.
        self._group = dist.new_group(backend="gloo") if num_ranks() > 1 else None
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.staged_s = 0.0
        """How long the last `save` kept training waiting."""

    def save(self, learner: Learner, cursor: dict[str, Any] | None = None) -> None:
        """Write the learner's state after `learner.step`; `cursor` is the caller's own place in its data."""
        self.wait()
        start, step, state = time.perf_counter(), learner.step, learner.state()
        # A run resumed from an earlier step writes this step again: the old one must not look complete meanwhile.
        if is_lead_process():
            self._run.complete_marker(step).unlink(missing_ok=True)
            shutil.rmtree(_directory(self._run, step), ignore_errors=True)
        values = state.values | {"schema": SCHEMA, "cursor": cursor or {}}
        if not self._is_async:
            self._write(step, state.parts, values, start)
            return
        parts = {name: self._staged(name, part) for name, part in state.parts.items()}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.staged_s = time.perf_counter() - start
        self._thread = threading.Thread(
            target=self._run_write, args=(step, parts, values, start), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is on the disk.

        Raises: whatever stopped it; its directory then does not exist.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises: what stopped a write in the meantime."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _staged(self, name: str, part: Part) -> Part:
        source, buffer = part.tensor, self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
            self._buffers[name] = buffer
        return Part(buffer.copy_(source, non_blocking=True), part.start, part.shape)

    def _run_write(self, *job: Any) -> None:
        try:
            self._write(*job)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, parts: dict[str, Part], values: dict[str, Any], start: float) -> None:
        directory = _directory(self._run, step)
        part = directory.with_name("trainer.part")
        if is_lead_process():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        if self._group is not None:
            dist.barrier(self._group)
        write(parts, part, self._group)
        if not is_lead_process():
            return
        files = sorted(path for path in part.iterdir())
        values = values | {"num_bytes": {path.name: path.stat().st_size for path in files}}
        (part / _VALUES).write_text(json.dumps(values, indent=2) + "\n")
        for path in (part / _VALUES, part):
            flush_to_disk(path)
        part.rename(directory)
        flush_to_disk(directory.parent)
        logger.info(
            "saved checkpoint step=%d in %.2fs (%.2fs before training went on)",
            step,
            time.perf_counter() - start,
            self.staged_s if self._is_async else time.perf_counter() - start,
        )
        self._on_written(step)


class _Saved:
    """A checkpoint as a source of state."""

    def __init__(self, directory: Path) -> None:
        self.values = _read_values(directory)
        for name, size in self.values["num_bytes"].items():
            path = directory / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise DataError(f"{path}: has {found} of {size} bytes, it was cut off; {_WAY_OUT}")
        try:
            self._files = PartFiles(directory)
        except DataError as cause:
            raise DataError(f"{cause}; {_WAY_OUT}") from cause

    @property
    def tensors(self) -> dict[str, Described]:
        return self._files.tensors

    def read(self, targets: dict[str, Part]) -> None:
        self._files.read(targets)


def load(run: RunDir, learner: Learner, step: int) -> dict[str, Any]:
    """Put the learner where it was after `step`; returns the cursor. Every rank reads what it needs.

    Raises: DataError when the checkpoint is missing, damaged, or of another model.
    """
    directory = _directory(run, step)
    source = _Saved(directory)
    try:
        learner.load_state(source)
    except DataError as cause:
        raise DataError(f"{directory}: {cause}; resume with the run's own [model] and [optim]") from cause
    return source.values["cursor"]


def read_cursor(run: RunDir, step: int) -> dict[str, Any]:
    """What `save` was given as the caller's own place in its data.

    Raises: DataError when it cannot be read.
    """
    return _read_values(_directory(run, step))["cursor"]


def prune(run: RunDir, keep_last: int | None, keep_interval: int | None = None) -> list[int]:
    """Delete complete checkpoints, marker first; the steps that went.

    The newest `keep_last` stay, and those of every `keep_interval`-th step.
    """
    complete = run.complete_checkpoints()
    gone = [] if keep_last is None else complete[:-keep_last]
    gone = [step for step in gone if keep_interval is None or step % keep_interval]
    for step in gone:
        run.complete_marker(step).unlink(missing_ok=True)
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
    return gone


def save(run: RunDir, learner: Learner, cursor: dict[str, Any] | None = None) -> None:
    """Write one checkpoint and wait for it; every rank must call it."""
    Saver(run, is_async=False, on_written=lambda step: None).save(learner, cursor)


def flush_to_disk(path: Path) -> None:
    """fsync of a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_WAY_OUT = "resume from another step with --resume.step"


def _directory(run: RunDir, step: int) -> Path:
    return run.checkpoint(step) / "trainer"


def _read_values(directory: Path) -> dict[str, Any]:
    path = directory / _VALUES
    try:
        values = json.loads(path.read_text())
        schema = values["schema"]
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(f"{path}: cannot be read ({type(cause).__name__}: {cause}); {_WAY_OUT}") from cause
    if schema != SCHEMA:
        raise DataError(f"{path}: schema {schema}, this version of stretto reads {SCHEMA}; {_WAY_OUT}")
    return values
