"""What the trainer computed per token that it trained: written per step and rank, read by those who look at a run.

A file is a list of samples, and has about four bytes per token: numbers are float16, positions are stretches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stretto.base.errors import DataError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_FLOAT = np.dtype("<f2")


class TrainedSample(msgspec.Struct, frozen=True, array_like=True):
    """The trained tokens of one sample, in order; columns are float16."""

    sample_id: str  # "<rollout id>/<branch>"
    spans: tuple[tuple[int, int], ...]  # stretches of trained tokens in the sample: first, end
    log_ratio: bytes  # log-probability under the trainer minus the sampler's, nats; nan where that is unknown
    entropy: bytes  # nats
    advantage: bytes = b""  # reward units; empty if all tokens of the sample have the same

    def __post_init__(self) -> None:
        num_bytes = _FLOAT.itemsize * sum(end - first for first, end in self.spans)
        if not num_bytes == len(self.log_ratio) == len(self.entropy) or len(self.advantage) not in (0, num_bytes):
            raise ValueError(f"columns of {self.sample_id} have different lengths")

    def streams(self, num_tokens: int) -> dict[str, np.ndarray]:
        """Float32 [tokens], nan where not trained: `ratio` (trainer over sampler), `entropy`, perhaps `advantage`."""
        columns = {"entropy": _floats(self.entropy), "ratio": np.exp(_floats(self.log_ratio))}
        if self.advantage:
            columns["advantage"] = _floats(self.advantage)
        is_trained = np.zeros(num_tokens, bool)
        for first, end in self.spans:
            is_trained[first:end] = True
        streams = {}
        for name, values in columns.items():
            streams[name] = np.full(num_tokens, np.nan, np.float32)
            streams[name][is_trained] = values[: is_trained.sum()]
        return streams


def trained_sample(
    sample_id: str,
    positions: Int[np.ndarray, " trained"],
    log_ratio: Float[np.ndarray, " trained"],
    entropy: Float[np.ndarray, " trained"],
    advantage: Float[np.ndarray, " trained"],
) -> TrainedSample:
    """The record of a sample; positions ascend."""
    bounds = [0, *((positions[1:] - positions[:-1] != 1).nonzero()[0] + 1).tolist(), len(positions)]
    has_several = bool((advantage != advantage[0]).any())
    return TrainedSample(
        sample_id=sample_id,
        spans=tuple((int(positions[first]), int(positions[end - 1]) + 1) for first, end in pairwise(bounds)),
        log_ratio=_bytes(log_ratio),
        entropy=_bytes(entropy),
        advantage=_bytes(advantage) if has_several else b"",
    )


def encode_trained(samples: Iterable[TrainedSample]) -> bytes:
    """The content of a file."""
    return msgspec.msgpack.encode(list(samples))


def find_trained(directory: Path, step: int) -> Iterator[TrainedSample]:
    """All samples of a step, of all ranks.

    Raises: DataError for a file that is no such record.
    """
    for path in sorted(directory.glob(f"**/step_{step}.bin")):
        try:
            yield from msgspec.msgpack.decode(path.read_bytes(), type=list[TrainedSample])
        except FileNotFoundError:  # it went with the limit
            continue
        except msgspec.DecodeError as cause:
            raise DataError(f"{path}: it is no record of trained tokens ({cause}); delete it.") from cause


def _bytes(values: np.ndarray) -> bytes:
    return values.astype(_FLOAT).tobytes()


def _floats(content: bytes) -> np.ndarray:
    return np.frombuffer(content, _FLOAT).astype(np.float32)
