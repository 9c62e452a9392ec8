"""Weights in shared memory: one tmpfs file a version, used again once the version was released.

A version is written into a free segment (two suffice when every version is loaded before the next but one),
so that engines can still read the one before. A segment's head carries its version: cleared before writing,
set after. Plain files in /dev/shm are mapped rather than `multiprocessing.shared_memory`, whose resource
tracker removes a segment as soon as any one reader exits.

The publisher holds an flock on each of its segments for life; the kernel drops it even at kill -9, so that a
publisher which starts can tell the segments of dead runs from those of live ones, in any PID namespace, and
removes them.

Of several trainer ranks, which are on one host here, each has segments of its own.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import EngineError
from stretto.records.weights import TensorEntry, WeightManifest
from stretto.transports.weights.layout import (
    HEAD_BYTES,
    ONE_RANK,
    Named,
    Part,
    Ranks,
    checksum_of,
    dtype_name,
    joined,
    shard_head,
    tensor_bytes,
)

logger = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
PREFIX = "stretto-weights-"
ALIGN = 64


@dataclass
class Segment:
    """One tmpfs file. `version` is what it holds, None when it is free."""

    path: Path
    fd: int
    version: int | None = None


class ShmPublisher:
    """Publishes into segments `stretto-weights-<run>-<random>-<n>`."""

    def __init__(
        self,
        run_id: str,
        directory: Path = SHM_DIR,
        *,
        num_segments: int = 2,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """num_segments: how many versions are expected to be held at once."""
        if not directory.is_dir():
            raise EngineError(f'{directory} does not exist here; use weight_broadcast.type = "filesystem".')
        self._directory = directory
        self._name = PREFIX + re.sub(r"[^A-Za-z0-9_.]+", "_", run_id)[:64] + "-" + secrets.token_hex(4)
        self._segments: list[Segment] = []
        self._num_segments, self._ranks = num_segments, ranks
        self._is_closed = False
        remove_stale_segments(directory)

    def publish(self, version: int, tensors: Iterable[Named]) -> WeightManifest:
        assert not self._is_closed, "publish after close"
        found = joined(self._ranks.gather(self._write(version, tensors)))
        return WeightManifest(
            version=version,
            transport="shm",
            location=str(self._directory),
            shards=found.shards,
            tensors=found.tensors,
            checksum=checksum_of(found.checksums),
        )

    def _write(self, version: int, tensors: Iterable[Named]) -> Part:
        started = time.perf_counter()
        segment = self._free_segment()
        head = shard_head(version)
        entries: list[TensorEntry] = []
        crc, end = zlib.crc32(head), HEAD_BYTES
        try:
            os.pwrite(segment.fd, bytes(HEAD_BYTES), 0)
            for name, tensor in tensors:
                data = tensor_bytes(tensor)
                shape, dtype = tuple(tensor.shape), dtype_name(name, tensor)
                entries.append(TensorEntry(name, dtype, shape, shard=0, offset=end, num_bytes=len(data)))
                padding = bytes(-len(data) % ALIGN)
                crc = zlib.crc32(padding, zlib.crc32(data, crc))
                _write_at(segment.fd, end, data)
                _write_at(segment.fd, end + len(data), padding)
                end += len(data) + len(padding)
            os.ftruncate(segment.fd, end)
            os.pwrite(segment.fd, head, 0)
        except OSError as cause:
            raise EngineError(
                f"shared memory for version {version} in {self._directory}: {cause.strerror} after {end} "
                'bytes; make it bigger (docker: --shm-size) or use weight_broadcast.type = "filesystem".'
            ) from cause
        segment.version = version
        logger.debug("published version=%d bytes=%d in %.4fs", version, end, time.perf_counter() - started)
        return Part((segment.path.name,), (crc,), tuple(entries))

    def release(self, version: int) -> None:
        for segment in self._segments:
            if segment.version is not None and segment.version <= version:
                segment.version = None

    def close(self) -> None:
        self._is_closed = True
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.path.unlink(missing_ok=True)
            os.close(segment.fd)

    def _free_segment(self) -> Segment:
        for segment in self._segments:
            if segment.version is None:
                return segment
        if len(self._segments) >= self._num_segments:
            held = [segment.version for segment in self._segments]
            logger.warning(
                "versions %s are not released by the engines; one more shared memory segment", held
            )
        path = self._directory / f"{self._name}-{len(self._segments)}"
        segment = Segment(path, _create_locked(path))
        self._segments.append(segment)
        return segment


def remove_stale_segments(directory: Path = SHM_DIR) -> int:
    """Remove segments whose publisher is dead; how many there were."""
    removed = 0
    for path in directory.glob(PREFIX + "*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except OSError:
            continue
        finally:
            os.close(fd)
    if removed:
        logger.info("removed %d shared memory segments of dead runs", removed)
    return removed


def _create_locked(path: Path) -> int:
    """A new file, locked. A cleaner may remove it between the two: then it is made again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of it (one call moves at most 2 GiB). Not mapped, so that a full tmpfs is no SIGBUS."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
