"""Keeps what was computed for every trained token in RUN/tokens_trained/step_N.bin, for the page's colours.

Passes leave their numbers on the device; at the end of the step one copy fetches them, and a thread writes the file
while the next step runs. A run keeps trainer.keep_token_bytes of such files. A disk that fails or cannot follow costs
records and a warning, never a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.base.files import write_atomic
from stretto.records.sample import MicroBatch
from stretto.records.trained_tokens import TrainedSample, encode_trained, trained_sample
from stretto.trainer.batch.pass_inputs import PassInputs

if TYPE_CHECKING:
    from jaxtyping import Float

logger = logging.getLogger(__name__)

_MOST_WAITING = 8  # steps that the thread has not written

_Pass = tuple[MicroBatch, np.ndarray, np.ndarray, Tensor]


class TokenRecorder:
    """Writes one file per step into `directory`; `add` is an observer of the learner.

    With several epochs in a step a token keeps the numbers of its first pass. keep_bytes: of this directory's files;
    None: no limit.
    """

    def __init__(self, directory: Path, keep_bytes: int | None = None) -> None:
        self._directory, self._keep_bytes = directory, keep_bytes
        self._passes: list[_Pass] = []
        self._sizes: dict[int, int] | None = None  # bytes by step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-record")
        self._writing: list[Future[None]] = []
        self._has_warned = False

    def add(
        self,
        step: int,
        mb: MicroBatch,
        inputs: PassInputs,
        logprobs: Float[Tensor, " trained"],
        entropy: Float[Tensor, " trained"],
    ) -> None:
        """Remember a pass of the step under way."""
        known = torch.where(inputs.streams.is_sampled.bool(), logprobs.detach().float(), torch.nan)
        self._passes.append((mb, inputs.sources, inputs.documents, torch.stack([known, entropy.float()])))

    def write(self, step: int) -> None:
        """Let the thread write the passes of the step; a step without any has no file."""
        passes, self._passes = self._passes, []
        if not passes:
            return
        self._writing = [each for each in self._writing if not each.done()]
        if len(self._writing) >= _MOST_WAITING:
            self._warn(f"the tokens of step {step} are not written down: {self._directory} is too slow")
            return
        columns = torch.cat([values for *_, values in passes], dim=1).cpu().numpy()
        ends = np.cumsum([values.shape[1] for *_, values in passes])[:-1]
        parts = [(*each[:3], values) for each, values in zip(passes, np.split(columns, ends, axis=1))]
        self._writing.append(self._thread.submit(self._write, step, parts))

    def close(self) -> None:
        """Wait until the last step is written."""
        self._thread.shutdown()

    def _write(self, step: int, parts: Sequence[tuple[MicroBatch, np.ndarray, np.ndarray, np.ndarray]]) -> None:
        content = encode_trained(_samples(parts))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._sizes is None:
                self._sizes = {
                    int(number): path.stat().st_size
                    for path in self._directory.glob("step_*.bin")
                    if (number := path.stem.removeprefix("step_")).isdecimal()
                }
            write_atomic(self._path(step), content)
            self._sizes[step] = len(content)
            for each in beyond(self._sizes, self._keep_bytes) if self._keep_bytes is not None else ():
                self._path(each).unlink(missing_ok=True)
                del self._sizes[each]
        except OSError as cause:
            self._warn(f"the tokens of step {step} are not written down: {self._directory}: {cause.strerror}")

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.bin"

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s; the page has no entropy and no mismatch of it, nor of others that are left out", text)


def beyond(sizes: dict[int, int], keep_bytes: int) -> list[int]:
    """Steps whose files go: the oldest, every 10th after the others, every 100th last; the newest half stays."""
    excess, newest, protected = sum(sizes.values()) - keep_bytes, 0, set[int]()
    for step in sorted(sizes, reverse=True):
        newest += sizes[step]
        if newest > keep_bytes / 2:
            break
        protected.add(step)
    found = []
    for step in sorted(sizes.keys() - protected, key=lambda step: (step % 10 == 0, step % 100 == 0, step)):
        if excess <= 0:
            break
        found.append(step)
        excess -= sizes[step]
    return found


def _samples(parts: Sequence[tuple[MicroBatch, np.ndarray, np.ndarray, np.ndarray]]) -> list[TrainedSample]:
    found: dict[str, TrainedSample] = {}
    for mb, sources, documents, (logprobs, entropy) in parts:
        order = np.argsort(sources, kind="stable")
        tokens, documents = sources[order], documents[order]
        columns = [tokens - mb.cu_seqlens[documents], logprobs[order] - mb.logprobs[tokens], entropy[order]]
        columns.append(mb.advantages[tokens])
        bounds = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(tokens)]
        for first, end in pairwise(bounds):
            name = mb.sample_ids[documents[first]]
            if name not in found:
                found[name] = trained_sample(name, *(each[first:end] for each in columns))
    return list(found.values())
