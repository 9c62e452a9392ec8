"""Token payloads beside the database: append-only files of checksummed records.

The branches of a rollout (tokens, logprobs, versions; images by name, see stored_images.py) and the rewards of its
agents are one blob (`records.codec`) in the segment that was open when its group finished. The row that names the place
is written after the bytes, so every row has its payload. Bytes after the last row of a segment were left by a killed
process, and are cut off.
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
from stretto.records.images import Image
from stretto.records.partial import Turn
from stretto.records.rollout import Branch, Rollout


class Payload(msgspec.Struct, frozen=True):
    """The part of a rollout that is not in its row."""

    branches: tuple[Branch, ...]
    agent_rewards: dict[str, float] = {}


class TurnRecord(msgspec.Struct, frozen=True):
    """A turn of an unfinished rollout, and the place of the turn before it."""

    turn: Turn
    before: tuple[int, int, int, int] | None


class Place(NamedTuple):
    """Where a payload is stored."""

    segment: int
    offset: int
    length: int
    crc: int


class SegmentWriter:
    """Appends to the open segment. There is one writer."""

    def __init__(self, run_dir: RunDir, segment: int, end: int) -> None:
        """Continue in `segment` after byte `end`; what follows it is cut off."""
        self._run_dir = run_dir
        self.segment = segment
        self.end = end
        self._fd = self._open()

    def append(self, rollouts: Sequence[Rollout]) -> list[Place]:
        """Write the payloads of these rollouts in one system call.

        Raises: EngineError if the disk refuses them.
        """
        return self._write([Payload(_by_name(rollout.branches), rollout.agent_rewards) for rollout in rollouts])

    def append_payload(self, payload: Payload) -> Place:
        """Write a payload that was loaded from another segment.

        Raises: EngineError if the disk refuses it.
        """
        [place] = self._write([payload])
        return place

    def append_images(self, images: Sequence[Image]) -> list[Place]:
        """Write these images with their pixels.

        Raises: EngineError if the disk refuses them.
        """
        return self._write(images) if images else []

    def append_turns(self, turns: Sequence[tuple[Turn, Place | None]]) -> list[Place]:
        """Write turns of unfinished rollouts in one system call, each with the place of the turn before it.

        Raises: EngineError if the disk refuses them.
        """
        return self._write([TurnRecord(turn, before) for turn, before in turns])

    def _write(self, records: Sequence[Payload | TurnRecord | Image]) -> list[Place]:
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
        path = self._run_dir.segment(self.segment)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(fd, self.end)
        except OSError as cause:
            raise EngineError(f"{path}: {cause.strerror}; the run cannot write its tokens there.") from cause
        return fd


def _by_name(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """The branches without the pixels of their images."""
    return tuple(
        msgspec.structs.replace(branch, images=tuple(image.without_patches() for image in branch.images))
        if branch.images
        else branch
        for branch in branches
    )


def load_payload(run_dir: RunDir, place: Place, rollout_id: str) -> Payload:
    """Load and verify the payload of a rollout.

    Raises: DataError if it is damaged or was deleted.
    """
    return _load(run_dir, place, f"the payload of rollout {rollout_id}", Payload)


def load_image(run_dir: RunDir, place: Place, name: str) -> Image:
    """Load an image with its pixels.

    Raises: DataError if it is damaged or was deleted.
    """
    return _load(run_dir, place, f"the image {name}", Image)


def load_turns(run_dir: RunDir, place: Place, rollout_id: str) -> list[Turn]:
    """Load all stored turns of a rollout, in order; `place` is that of the last one.

    Raises: DataError if one is damaged or was deleted.
    """
    turns = []
    at: Place | None = place
    while at is not None:
        record = _load(run_dir, at, f"the payload of rollout {rollout_id}", TurnRecord)
        turns.append(record.turn)
        at = None if record.before is None else Place(*record.before)
    return turns[::-1]


T = TypeVar("T", Payload, TurnRecord, Image)


def _load(run_dir: RunDir, place: Place, what: str, kind: type[T]) -> T:
    path = run_dir.segment(place.segment)
    blob = _read(path, place, what)
    if len(blob) != place.length or zlib.crc32(blob) != place.crc:
        raise DataError(f"{path} at {place.offset}: {what} is damaged or cut off.")
    return decode_blob(blob, kind, where=f"{path} at {place.offset}")


def _read(path: Path, place: Place, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), place.length, place.offset)
    except FileNotFoundError:
        raise DataError(f"{path} is gone: {what} went with the limits of [ledger] (keep_bytes, keep_steps).") from None
