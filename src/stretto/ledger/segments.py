"""Token payloads beside the database: append-only files of checksummed records.

The branches of a rollout (tokens, logprobs, versions), and what its agents were paid, are one blob
(`records.codec`, with its own crc32) in the segment that was open when its group finished. The row that names
the place is written after the bytes, so a row always has its payload; bytes after the last row of a segment
are what a killed process left, and are cut off.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from stretto.base.errors import DataError, EngineError
from stretto.base.paths import RunDir
from stretto.records.codec import decode_blob, encode_blob
from stretto.records.partial import Turn
from stretto.records.rollout import Branch, Rollout


class Payload(msgspec.Struct, frozen=True):
    """What of a rollout is not in its row."""

    branches: tuple[Branch, ...]
    agent_rewards: dict[str, float] = {}


class Link(msgspec.Struct, frozen=True):
    """A turn of a rollout that is not done, and where the one before it lies."""

    turn: Turn
    before: tuple[int, int, int, int] | None


class Place(NamedTuple):
    """Where a payload lies."""

    segment: int
    offset: int
    length: int
    crc: int


class SegmentWriter:
    """The open segment. One writer."""

    def __init__(self, run_dir: RunDir, segment: int, end: int) -> None:
        """Go on in `segment` after byte `end`, cutting off what lies beyond."""
        self._run_dir = run_dir
        self.segment = segment
        self.end = end
        run_dir.tokens.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()

    def append(self, rollouts: Sequence[Rollout]) -> list[Place]:
        """Write the payloads of these rollouts, in one call.

        Raises: EngineError when the disk does not take them.
        """
        return self._write([Payload(rollout.branches, rollout.agent_rewards) for rollout in rollouts])

    def append_turn(self, turn: Turn, before: Place | None) -> Place:
        """Write a turn of a rollout that goes on; `before` is where its last one lies.

        Raises: EngineError when the disk does not take it.
        """
        [place] = self._write([Link(turn, before)])
        return place

    def _write(self, records: Sequence[Payload | Link]) -> list[Place]:
        blobs = list(map(encode_blob, records))
        places, end = [], self.end
        for blob in blobs:
            places.append(Place(self.segment, end, len(blob), zlib.crc32(blob)))
            end += len(blob)
        data = memoryview(b"".join(blobs))
        try:
            while data:
                written = os.pwrite(self._fd, data, end - len(data))
                data = data[written:]
        except OSError as cause:
            raise EngineError(f"{self._run_dir.segment(self.segment)}: {cause}; free some space.") from cause
        self.end = end
        return places

    def rotate(self) -> None:
        """Begin the next segment."""
        os.close(self._fd)
        self.segment, self.end = self.segment + 1, 0
        self._fd = self._open()

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> int:
        fd = os.open(self._run_dir.segment(self.segment), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(fd, self.end)
        return fd


def load_payload(run_dir: RunDir, place: Place, who: str) -> Payload:
    """The payload of rollout `who`, verified.

    Raises: DataError when it is no longer kept, or damaged.
    """
    return _load(run_dir, place, who, Payload)


def load_turns(run_dir: RunDir, place: Place, who: str) -> list[Turn]:
    """All turns that were written down of rollout `who`, in order; `place` is the last one's.

    Raises: DataError when one is no longer kept, or damaged.
    """
    turns = []
    at: Place | None = place
    while at is not None:
        link = _load(run_dir, at, who, Link)
        turns.append(link.turn)
        at = None if link.before is None else Place(*link.before)
    return turns[::-1]


T = TypeVar("T", Payload, Link)


def _load(run_dir: RunDir, place: Place, who: str, kind: type[T]) -> T:
    path = run_dir.segment(place.segment)
    blob = _read(path, place, who)
    if len(blob) != place.length or zlib.crc32(blob) != place.crc:
        raise DataError(f"{path} at {place.offset}: the payload of rollout {who} is damaged or cut off.")
    return decode_blob(blob, kind, where=f"{path} at {place.offset}")


def _read(path: Path, place: Place, who: str) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), place.length, place.offset)
    except FileNotFoundError:
        raise DataError(
            f"{path} is gone: the payload of rollout {who} is no longer kept (ledger.keep_steps)."
        ) from None
