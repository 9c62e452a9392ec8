"""The learner's half of a checkpoint: RUN/checkpoints/step_N/trainer, whole or not there.

Written into a directory of another name, flushed to the disk, then renamed. The COMPLETE marker beside it
is written by the orchestrator in `rl` and by the trainer in `sft`; a checkpoint without it does not count.
Everything is tensors (safetensors) and plain values (JSON): nothing is unpickled. Sizes are recorded, so
that a file which was cut off later is named instead of being half read.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.base.errors import DataError
from stretto.base.paths import RunDir
from stretto.trainer.learner import Learner
from stretto.trainer.mesh import is_lead_process

logger = logging.getLogger(__name__)

SCHEMA = 1
_TENSORS, _VALUES = "state.safetensors", "state.json"


def save(run: RunDir, learner: Learner, cursor: dict[str, Any] | None = None) -> None:
    """Write the learner's state after `learner.step`; `cursor` is the caller's own place in its data.

    Every rank must call it; the lead writes.
    """
    start, step = time.perf_counter(), learner.step
    tensors, values = learner.state()
    if not is_lead_process():
        return
    directory = _directory(run, step)
    part = directory.with_name("trainer.part")
    # A run resumed from an earlier step writes this step again: the old one must not look complete meanwhile.
    run.complete_marker(step).unlink(missing_ok=True)
    for leftover in (part, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / _TENSORS)
    values |= {"schema": SCHEMA, "cursor": cursor or {}, "num_bytes": (part / _TENSORS).stat().st_size}
    (part / _VALUES).write_text(json.dumps(values, indent=2) + "\n")
    for path in (part / _TENSORS, part / _VALUES, part):
        flush_to_disk(path)
    part.rename(directory)
    flush_to_disk(directory.parent)
    logger.info("saved checkpoint step=%d in %.2fs", step, time.perf_counter() - start)


def load(run: RunDir, learner: Learner, step: int) -> dict[str, Any]:
    """Put the learner where it was after `step`; returns the cursor.

    Raises: DataError when the checkpoint is missing, damaged, or of another model.
    """
    directory = _directory(run, step)
    values = _read_values(directory)
    path = directory / _TENSORS
    try:
        size = path.stat().st_size
        if size != values["num_bytes"]:
            raise DataError(f"{path}: has {size} of {values['num_bytes']} bytes, it was cut off; {_WAY_OUT}")
        tensors = load_file(path)
    except (OSError, SafetensorError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); {_WAY_OUT}") from cause
    try:
        learner.load_state(tensors, values)
    except DataError as cause:
        raise DataError(f"{directory}: {cause}; resume with the run's own [model] and [optim]") from cause
    return values["cursor"]


def prune(run: RunDir, keep_last: int | None) -> list[int]:
    """Delete all but the newest complete checkpoints, marker first; the steps that went."""
    complete = run.complete_checkpoints()
    gone = [] if keep_last is None else complete[:-keep_last]
    for step in gone:
        run.complete_marker(step).unlink(missing_ok=True)
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
    return gone


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
