"""Weights in shared memory, both ends: one tmpfs file per version, which is reused after the version is released.

A version is written into a free file, so that engines can still read the previous one (two files are enough if each
version is loaded before the second next is published). The head of a file contains its version: it is cleared before
writing and set afterwards. These are plain files in /dev/shm, not `multiprocessing.shared_memory`, whose resource
tracker would remove the memory as soon as one reader exits.

Files stay mapped at both ends, because memory that is new costs several times what a copy does: tensors are copied into
the publisher's mapping and summed while they are in the processor's cache, and an engine keeps its mappings as long as
the files exist.

The publisher holds an flock on its files as long as it lives; the kernel releases it even after kill -9. So a new
publisher can recognise the files of dead runs, in any PID namespace, and removes them.

Several trainer ranks, which are on one host here, have files of their own.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stretto.base.errors import EngineError, WireError
from stretto.base.files import PUBLISHED, SHARED_MEMORY, open_locked, remove_unowned
from stretto.records.weight_manifest import TensorEntry, WeightManifest
from stretto.transports.weights.checksum import BLOCK, Checksum
from stretto.transports.weights.filesystem import MappedReceiver, read_pages
from stretto.transports.weights.layout import (
    HEAD_BYTES,
    HEAD_USED,
    ONE_RANK,
    NamedTensor,
    Ranks,
    RankShards,
    build_manifest,
    byte_pieces,
    dtype_name,
    padded,
    shard_head,
    version_of,
)

if TYPE_CHECKING:
    from jaxtyping import UInt8

logger = logging.getLogger(__name__)

STEP_BYTES = 1 << 30
"""While a first version is written, its file grows by its own size, and by at most this."""
PIECE_BYTES = 1 << 20
"""Bytes that are copied at a time and then summed: they are still in the processor's cache."""
LOOK_S = 10.0
"""An engine looks so often whether the files that it has mapped still exist."""


class ShmFile:
    """A file in memory that holds one version; version: which one, None if it is free."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = fd, path
        self.version: int | None = None
        self._size = 0  # allocated, from the beginning
        self._is_new = True  # it has held no version
        self._map: mmap.mmap | None = None  # the whole file
        self._bytes = torch.empty(0, dtype=torch.uint8)  # of the mapping

    def write(self, version: int, tensors: Iterable[NamedTensor]) -> tuple[int, list[TensorEntry]]:
        """Write a version; returns its checksum and the tensors, which begin after the head.

        Raises: OSError if there is no memory.
        """
        entries: list[TensorEntry] = []
        checksum, summed, end = Checksum(), HEAD_BYTES, HEAD_BYTES
        head = shard_head(version)
        checksum.add(head)
        self._grow(end)
        os.pwrite(self.fd, bytes(HEAD_BYTES), 0)
        for name, tensor in tensors:
            size, at = tensor.nbytes, end
            entries.append(TensorEntry(name, dtype_name(name, tensor), tuple(tensor.shape), 0, at, size))
            end += padded(size)
            self._grow(end)
            for piece in byte_pieces(tensor, PIECE_BYTES):
                begin, at = at, at + piece.numel()
                self._bytes[begin:at].copy_(piece)
                if at - summed >= PIECE_BYTES:
                    summed = self._sum(checksum, summed, at - at % BLOCK)
            if at < end:
                self._bytes[at:end] = 0
        self._sum(checksum, summed, end)
        self._free(end)
        os.pwrite(self.fd, head, 0)
        self.version = version
        return checksum.value, entries

    def part(self, start: int, end: int) -> UInt8[torch.Tensor, " bytes"]:
        """Bytes of the file, as a view of them."""
        return self._bytes[start:end]

    def _sum(self, checksum: Checksum, start: int, end: int) -> int:
        checksum.add(self._bytes[start:end].numpy().data)
        return end

    def _grow(self, num_bytes: int) -> None:
        """Allocate at least num_bytes: in a full tmpfs writing to a page without memory would end in a SIGBUS.

        Raises: OSError if there is no memory for them.
        """
        if num_bytes <= self._size:
            return
        extra = min(self._size, STEP_BYTES)
        while True:
            try:
                os.posix_fallocate(self.fd, self._size, num_bytes + extra - self._size)
                break
            except OSError:
                if not extra:
                    raise
                extra = extra // 2 if extra > mmap.PAGESIZE else 0  # what is needed may have room without it
        size = num_bytes + extra
        if size > self._bytes.numel():
            self._map = mmap.mmap(self.fd, size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._size = size

    def _free(self, end: int) -> None:
        """Give back the memory behind a version.

        A file that engines have mapped keeps its length: whoever still reads an older version would die of a SIGBUS.
        """
        start = end + -end % mmap.PAGESIZE
        if self._is_new:
            os.ftruncate(self.fd, end)
            self._size, self._is_new = end, False
        elif self._map is not None and start < self._size:
            try:
                self._map.madvise(mmap.MADV_REMOVE, start, self._size - start)
            except OSError:  # the kernel, or what is in its place, cannot do that
                os.ftruncate(self.fd, start)
            self._size = start


class ShmPublisher:
    """Publishes into files `stretto-weights-<run>-<random>-<n>`."""

    def __init__(
        self, run_id: str, directory: Path = SHARED_MEMORY, *, num_files: int = 2, ranks: Ranks = ONE_RANK
    ) -> None:
        """num_files: number of versions that are expected to be held at once."""
        if not directory.is_dir():
            raise EngineError(f'{directory} does not exist here; use weight_broadcast.type = "filesystem".')
        self._directory = directory
        self._name = PUBLISHED + re.sub(r"[^A-Za-z0-9_.]+", "_", run_id)[:64] + "-" + secrets.token_hex(4)
        self._files: list[ShmFile] = []
        self._num_files, self._ranks = num_files, ranks
        self._is_closed = False
        if removed := remove_unowned(directory):
            logger.info("removed %d files of dead runs from shared memory", removed)

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        assert not self._is_closed, "publish after close"
        parts = self._ranks.gather(self._write(version, tensors), RankShards)
        return build_manifest(parts, version=version, transport="shm", location=str(self._directory))

    def _write(self, version: int, tensors: Iterable[NamedTensor]) -> RankShards:
        started = time.perf_counter()
        try:
            file = self._free_file()
            checksum, entries = file.write(version, tensors)
        except OSError as cause:
            raise EngineError(
                f"cannot write version {version} to shared memory in {self._directory}: {cause.strerror}; make it "
                'bigger (docker: --shm-size) or use weight_broadcast.type = "filesystem".'
            ) from cause
        logger.debug("published version=%d in %.4fs", version, time.perf_counter() - started)
        return RankShards((file.path.name,), (checksum,), tuple(entries))

    def release(self, version: int) -> None:
        for file in self._files:
            if file.version is not None and file.version <= version:
                file.version = None

    def close(self) -> None:
        self._is_closed = True
        files, self._files = self._files, []
        for file in files:
            file.path.unlink(missing_ok=True)
            os.close(file.fd)

    def _free_file(self) -> ShmFile:
        for file in self._files:
            if file.version is None:
                return file
        if len(self._files) >= self._num_files:
            versions = [file.version for file in self._files]
            logger.debug("the engines have not released versions %s; using one more file in shared memory", versions)
        path = self._directory / f"{self._name}-{len(self._files)}"
        file = ShmFile(open_locked(path, is_new=True), path)
        self._files.append(file)
        return file


class ShmReceiver(MappedReceiver):
    """Maps the files of a version, and sees from their heads whether the publisher has reused them."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._ends = [HEAD_BYTES] * len(manifest.shards)  # of the version in its files, which may be longer
        for entry in manifest.tensors:
            self._ends[entry.shard] = max(self._ends[entry.shard], entry.offset + padded(entry.num_bytes))
        try:
            super().__init__(manifest)
        except WireError:
            # Whoever wrote to a tensor made a page of the kept mapping its own.
            if not _kept.drop(Path(manifest.location, shard) for shard in manifest.shards):
                raise
            super().__init__(manifest)

    def _map(self, shard: int) -> memoryview:
        path, end = self._paths[shard], self._ends[shard]
        mapped = _kept.find(path, end)
        if mapped is None:
            mapped = self._open(path)
            read_pages(memoryview(mapped)[:end])
            _kept.keep(path, mapped)
        held = version_of(mapped[:HEAD_USED])
        if held != self.manifest.version:
            what = "an incomplete version" if held is None else f"version {held}"
            raise WireError(f"weights of version {self.manifest.version}: {path} holds {what}.")
        return memoryview(mapped)[:end]

    def _read(self, parts: list[memoryview]) -> Iterator[memoryview]:
        yield from parts  # a kept mapping has its pages

    def check_unchanged(self) -> None:
        for path, mapped in zip(self._paths, self._maps):
            if version_of(bytes(mapped[:HEAD_USED])) != self.manifest.version:
                raise WireError(
                    f"weights of version {self.manifest.version} in {path} were overwritten while they were "
                    "read; the publisher released them too early."
                )


class KeptMaps:
    """Mappings of this process by the files' paths, as long as the files exist.

    The publisher's end frees no memory that is mapped, so a thread looks for files that are gone.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, tuple[tuple[int, ...], mmap.mmap]] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def find(self, path: Path, num_bytes: int) -> mmap.mmap | None:
        """The mapping of this file's first num_bytes, at least; None if there is none."""
        with self._lock:
            identity, mapped = self._maps.get(path, ((), None))
        is_it = mapped is not None and len(mapped) >= num_bytes and identity == _identity(path)
        return mapped if is_it else None

    def keep(self, path: Path, mapped: mmap.mmap) -> None:
        with self._lock:
            self._maps[path] = _identity(path), mapped
            self._look_later()

    def drop(self, paths: Iterable[Path]) -> int:
        """Forget the mappings of these files; returns how many there were."""
        with self._lock:
            return sum(self._maps.pop(path, None) is not None for path in paths)

    def _look_later(self) -> None:
        if self._maps and self._timer is None:
            self._timer = threading.Timer(LOOK_S, self._look)
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._maps = {path: kept for path, kept in self._maps.items() if kept[0] == _identity(path)}
            self._timer = None
            self._look_later()


_kept = KeptMaps()


def _identity(path: Path) -> tuple[int, ...]:
    """Which file this is, and its size; empty if there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size
