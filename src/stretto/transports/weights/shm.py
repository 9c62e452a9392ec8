"""Weights in shared memory, both ends: one tmpfs file per version, which is reused after the version is released.

A version is written into a free file, so that engines can still read the previous one (two files are enough if each
version is loaded before the second next is published). The head of a file contains its version: it is cleared before
writing and set afterwards. These are plain files in /dev/shm, not `multiprocessing.shared_memory`, whose resource
tracker would remove the memory as soon as one reader exits.

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
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import EngineError, WireError
from stretto.base.files import PUBLISHED, open_locked, remove_unowned
from stretto.records.weight_manifest import TensorEntry, WeightManifest
from stretto.transports.weights.checksum import Checksum
from stretto.transports.weights.filesystem import MappedReceiver
from stretto.transports.weights.layout import (
    HEAD_BYTES,
    HEAD_USED,
    ONE_RANK,
    NamedTensor,
    Ranks,
    RankShards,
    build_manifest,
    dtype_name,
    padded,
    shard_head,
    tensor_bytes,
    version_of,
)

logger = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")


@dataclass
class ShmFile:
    """One tmpfs file; version: what it holds, None if it is free."""

    path: Path
    fd: int
    version: int | None = None


class ShmPublisher:
    """Publishes into files `stretto-weights-<run>-<random>-<n>`."""

    def __init__(self, run_id: str, directory: Path = SHM_DIR, *, num_files: int = 2, ranks: Ranks = ONE_RANK) -> None:
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
        file = self._free_file()
        head = shard_head(version)
        entries: list[TensorEntry] = []
        checksum, end = Checksum(), HEAD_BYTES
        checksum.add(head)
        try:
            os.pwrite(file.fd, bytes(HEAD_BYTES), 0)
            for name, tensor in tensors:
                data = tensor_bytes(tensor)
                shape, dtype = tuple(tensor.shape), dtype_name(name, tensor)
                entries.append(TensorEntry(name, dtype, shape, shard=0, offset=end, num_bytes=len(data)))
                padding = bytes(padded(len(data)) - len(data))
                _write_at(file.fd, end, data)
                checksum.add(data)
                if padding:
                    _write_at(file.fd, end + len(data), padding)
                    checksum.add(padding)
                end += len(data) + len(padding)
            os.ftruncate(file.fd, end)
            os.pwrite(file.fd, head, 0)
        except OSError as cause:
            raise EngineError(
                f"cannot write version {version} to shared memory in {self._directory}: {cause.strerror} after {end} "
                'bytes; make it bigger (docker: --shm-size) or use weight_broadcast.type = "filesystem".'
            ) from cause
        file.version = version
        logger.debug("published version=%d bytes=%d in %.4fs", version, end, time.perf_counter() - started)
        return RankShards((file.path.name,), (checksum.value,), tuple(entries))

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
        file = ShmFile(path, open_locked(path, is_new=True))
        self._files.append(file)
        return file


def _write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data`, although one call writes at most 2 GiB.

    The file is not mapped for writing: in a full tmpfs that would end in a SIGBUS instead of an error.
    """
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


class ShmReceiver(MappedReceiver):
    """Maps the files of a version, and sees from their heads whether the publisher has reused them."""

    def _map(self, path: Path) -> mmap.mmap:
        mapped = super()._map(path)
        held = version_of(mapped[:HEAD_USED])
        if held != self.manifest.version:
            mapped.close()
            what = "an incomplete version" if held is None else f"version {held}"
            raise WireError(f"weights of version {self.manifest.version}: {path} holds {what}.")
        return mapped

    def check_unchanged(self) -> None:
        for path, mapped in zip(self._paths, self._maps):
            if version_of(mapped[:HEAD_USED]) != self.manifest.version:
                raise WireError(
                    f"weights of version {self.manifest.version} in {path} were overwritten while they were "
                    "read; the publisher released them too early."
                )
