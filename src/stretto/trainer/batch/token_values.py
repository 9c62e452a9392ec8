"""Keeps log-ratio, entropy and advantage of every trained token, for who reads the run afterwards.

After a pass the values stay on the device, as float16; after the step a thread brings them into columns and writes the
step's file (records/trained_tokens.py), while the next step waits for its batch. Files have a budget of bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.records.sample import MicroBatch
from stretto.records.trained_tokens import TrainedTokens, step_file, step_sizes, write_step
from stretto.trainer.batch.pass_inputs import PassInputs

if TYPE_CHECKING:
    from jaxtyping import Float, Float16, Int

logger = logging.getLogger(__name__)


class PassValues(NamedTuple):
    """What a pass computed for its trained tokens."""

    mb: MicroBatch
    sources: Int[np.ndarray, " trained"]
    documents: Int[np.ndarray, " trained"]
    values: Float16[Tensor, "2 trained"]  # log-ratio, entropy


class TokenValues:
    """The values of one rank's steps. `add` is an observer of the learner."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """max_bytes: what the files of this rank may have together."""
        self._directory, self._max_bytes = directory, max_bytes
        self._passes: list[PassValues] = []
        self._sizes: dict[int, int] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-values")
        self._writing: Future[None] | None = None
        self._has_failed = False

    def add(
        self,
        step: int,
        mb: MicroBatch,
        inputs: PassInputs,
        logprobs: Float[Tensor, " trained"],
        entropy: Float[Tensor, " trained"],
    ) -> None:
        """Take the values of a pass; `end_step` writes them."""
        self._passes.append(values_of(mb, inputs, logprobs, entropy))

    def end_step(self, step: int) -> None:
        """Write the values of the step's passes in the thread, which has written those of the step before."""
        passes, self._passes = self._passes, []
        self.wait()
        if passes and not self._has_failed:
            passes = [each._replace(values=each.values.cpu()) for each in passes]
            self._writing = self._thread.submit(self._write, step, passes)

    def wait(self) -> None:
        """Wait until what `end_step` was called for is written."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Wait until the last step is written."""
        self._thread.shutdown()

    def _write(self, step: int, passes: Sequence[PassValues]) -> None:
        try:
            if self._sizes is None:
                self._sizes = step_sizes(self._directory)
            self._sizes[step] = write_step(self._directory, step, in_columns(passes))
            for old in excess_steps(self._sizes, self._max_bytes):
                step_file(self._directory, old).unlink(missing_ok=True)
                del self._sizes[old]
        except OSError as cause:
            self._has_failed = True
            text = "%s: %s; entropy and mismatch of tokens are not written from step %d on, and training goes on"
            logger.warning(text, self._directory, cause.strerror, step)


def values_of(
    mb: MicroBatch, inputs: PassInputs, logprobs: Float[Tensor, " trained"], entropy: Float[Tensor, " trained"]
) -> PassValues:
    """The values of a pass, on its device."""
    log_ratio = logprobs.detach() - inputs.streams.behavior_logprobs
    return PassValues(mb, inputs.sources, inputs.documents, torch.stack((log_ratio, entropy)).half())


def in_columns(passes: Iterable[PassValues]) -> TrainedTokens:
    """The values of a step in columns. A sample that several passes trained has those of the first one."""
    names: dict[str, int] = {}
    parts = []
    for mb, sources, documents, values in passes:
        numbers = np.full(len(mb.sample_ids), -1)
        for document in np.flatnonzero(np.bincount(documents)):
            if (name := mb.sample_ids[document]) not in names:
                numbers[document] = names[name] = len(names)
        log_ratio, entropy = values.cpu().numpy()
        log_ratio = np.where(np.isnan(mb.logprobs[sources]), np.float16(np.nan), log_ratio)
        position = sources - np.asarray(mb.cu_seqlens)[documents]
        columns = (numbers[documents], position, log_ratio, entropy, mb.advantages[sources])
        is_first = columns[0] >= 0
        parts.append([column[is_first] for column in columns])
    sample, position, log_ratio, entropy, advantages = map(np.concatenate, zip(*parts))
    order = np.argsort((sample.astype(np.int64) << 32) | position, kind="stable")  # runs that are merged
    sample, position, log_ratio, entropy, advantages = (
        column[order] for column in (sample, position, log_ratio, entropy, advantages)
    )
    begins_sample = np.diff(sample, prepend=-1) != 0
    begins_run = np.flatnonzero(begins_sample | (np.diff(position, prepend=-2) != 1))
    starts = np.flatnonzero(begins_sample)
    is_same = np.array_equal(advantages[starts][sample], advantages)
    return TrainedTokens(
        sample_ids=tuple(names),
        ends=np.append(starts[1:], len(sample)).astype(np.int32),
        run_starts=position[begins_run].astype(np.int32),
        run_ends=np.append(begins_run[1:], len(sample)).astype(np.int32),
        log_ratio=log_ratio,
        entropy=entropy,
        advantages=advantages[starts].astype(np.float32) if is_same else advantages.astype(np.float16),
    )


def excess_steps(sizes: dict[int, int], max_bytes: int) -> list[int]:
    """Steps whose files must go so that the others fit into max_bytes.

    The newest steps stay, as many as fit into half of it. Of the older ones those that are no tenth step go first, then
    those that are no hundredth, and so on, the oldest first.
    """
    excess = sum(sizes.values()) - max_bytes
    if excess <= 0:
        return []
    newest, older = 0, []
    for step in sorted(sizes, reverse=True):
        newest += sizes[step]
        if newest > max_bytes / 2:
            older.append(step)
    found = []
    for step in sorted(older, key=lambda step: (_trailing_zeros(step), step)):
        if excess <= 0:
            break
        found.append(step)
        excess -= sizes[step]
    return found


def _trailing_zeros(step: int) -> int:
    text = str(step)
    return len(text) - len(text.rstrip("0"))
