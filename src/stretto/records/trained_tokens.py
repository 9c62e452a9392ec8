"""What the trainer computed for the tokens of a step: log-ratio to the engine, entropy, advantage.

A file per step and data-parallel rank, about 4 bytes a token: the trainer writes it (trainer/batch/token_values.py),
the page colours tokens by it. Columns hold the trained tokens alone, sample after sample, in the order of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.base.errors import DataError, WireError
from stretto.base.files import write_atomic
from stretto.records.codec import decode_blob, encode_blob

_FILE = re.compile(r"step_(\d+)\.bin$")


class TrainedTokens(msgspec.Struct, frozen=True):
    """The columns of a file. Unknown values are nan: a log-ratio where the engine reported no log-probability."""

    sample_ids: tuple[str, ...]
    ends: np.ndarray
    """int32 [samples]: where each sample ends in the columns."""
    run_starts: np.ndarray
    """int32 [runs]: positions in the sample of the first tokens of neighbours."""
    run_ends: np.ndarray
    """int32 [runs]: where these neighbours end in the columns; none are of two samples."""
    log_ratio: np.ndarray
    """float16 [tokens]: log-probability under the trainer minus that under the engine."""
    entropy: np.ndarray
    """float16 [tokens]"""
    advantages: np.ndarray
    """float32 [samples] if all tokens of a sample have the same, else float16 [tokens]."""


class TokenColumns(NamedTuple):
    """The trained tokens of one sample."""

    position: np.ndarray
    log_ratio: np.ndarray
    entropy: np.ndarray
    advantage: np.ndarray


def step_file(directory: Path, step: int) -> Path:
    """Where the file of a step is; `directory` is that of a rank."""
    return directory / f"step_{step}.bin"


def step_sizes(directory: Path) -> dict[int, int]:
    """Bytes of the files of one rank, by step."""
    if not directory.is_dir():
        return {}
    return {int(found[1]): path.stat().st_size for path in directory.iterdir() if (found := _FILE.match(path.name))}


def write_step(directory: Path, step: int, tokens: TrainedTokens) -> int:
    """Write the file of a step, complete or not at all; its bytes."""
    content = encode_blob(tokens)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(step_file(directory, step), content)
    return len(content)


def read_rollout(directory: Path, step: int, rollout_id: str) -> dict[int, TokenColumns]:
    """The trained tokens of a rollout by branch, from the files of all ranks; {} if none of them is there.

    Raises: DataError if a file is damaged or of another version.
    """
    found: dict[int, TokenColumns] = {}
    for path in (step_file(directory, step), *sorted(directory.glob(f"rank_*/step_{step}.bin"))):
        try:
            tokens = decode_blob(path.read_bytes(), TrainedTokens, where=str(path))
        except FileNotFoundError:  # not written yet, or deleted just now
            continue
        except WireError as cause:
            raise DataError(f"{path}: {cause}") from cause
        for number, sample_id in enumerate(tokens.sample_ids):
            rollout, _, branch = sample_id.partition("/")
            if rollout == rollout_id:
                found[int(branch or 0)] = _columns(tokens, number)
    return found


def samples_of(tokens: TrainedTokens) -> Iterator[tuple[str, TokenColumns]]:
    """All samples of a file with their tokens."""
    for number, sample_id in enumerate(tokens.sample_ids):
        yield sample_id, _columns(tokens, number)


def _columns(tokens: TrainedTokens, number: int) -> TokenColumns:
    begin, end = int(tokens.ends[number - 1]) if number else 0, int(tokens.ends[number])
    first, last = np.searchsorted(tokens.run_ends, (begin, end), side="right")
    lengths = np.diff(tokens.run_ends[first:last], prepend=begin)
    inside = np.arange(end - begin) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return TokenColumns(
        np.repeat(tokens.run_starts[first:last], lengths) + inside,
        tokens.log_ratio[begin:end],
        tokens.entropy[begin:end],
        np.full(end - begin, tokens.advantages[number])
        if tokens.advantages.dtype == np.float32
        else tokens.advantages[begin:end],
    )
