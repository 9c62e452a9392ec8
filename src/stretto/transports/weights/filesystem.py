"""Weights as safetensors files under RUN/broadcasts/version_N, both ends; manifest.json is written last.

A version is written into a hidden directory and renamed when it is complete, so that a reader of `version_N` sees all
of it. Trainer and engines must share the file system. Any safetensors reader can load the shards. With several trainer
ranks, each writes its own files, and the first rank moves them into one directory.

A file is written past the page cache (O_DIRECT), as fast as the disk is: a few pieces are on their way while the next
one is copied and summed. Its header is as long as HEADER_BYTES and written last; a full header begins a new file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import torch

from stretto.base.errors import EngineError, WireError
from stretto.base.files import put_in_place
from stretto.records.weight_manifest import MANIFEST, TensorEntry, WeightManifest
from stretto.transports.weights.checksum import BLOCK, Checksum, new_checksum
from stretto.transports.weights.layout import (
    ONE_RANK,
    NamedTensor,
    Ranks,
    RankShards,
    Receiver,
    build_manifest,
    byte_pieces,
    combine_checksums,
    dtype_name,
    tensor_over,
)

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt8

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
PIECE_BYTES = 8 << 20
"""Bytes of one write, and of one read."""
NUM_WRITERS = NUM_READERS = 2
HEADER_BYTES = 1 << 16
_ENTRY_BYTES = 128
"""Bytes of a tensor's entry in the header, at most, without its name and the digits of its shape."""
_VERSION = re.compile(r"version_(\d+)$")
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""By the name that a file's header has: that of a manifest."""
_HEADER_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}
_POPULATE_READ = 22
"""MADV_POPULATE_READ, since Linux 5.14."""


class FilesystemPublisher:
    """Keeps the newest `keep_versions` versions and all that are not released."""

    def __init__(
        self, directory: Path, *, keep_versions: int, shard_bytes: int = SHARD_BYTES, ranks: Ranks = ONE_RANK
    ) -> None:
        self._directory = directory
        self._keep_versions = keep_versions
        self._shard_bytes, self._ranks = shard_bytes, ranks
        self._in_use: set[int] = set()  # published by this process and not yet released
        # One is filled while the others are written. They are kept, because new memory costs more than a copy.
        self._buffers = deque(_pages(PIECE_BYTES) for _ in range(NUM_WRITERS + 1))
        directory.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            for path in directory.glob(".version_*"):  # left incomplete by a process that died
                shutil.rmtree(path, ignore_errors=True)
        ranks.gather(None, None)  # a barrier: no rank writes before that

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        started = time.perf_counter()
        ranks, final = self._ranks, self._directory / f"version_{version}"
        partial = self._directory / f".version_{version}.{ranks.rank}.{os.getpid()}"
        try:
            gathered = ranks.gather((partial.name, self._write(partial, tensors)), tuple[str, RankShards])
            parts = (shards for _, shards in gathered)
            location = str(final.resolve())
            manifest = build_manifest(parts, version=version, transport="filesystem", location=location)
            if ranks.rank == 0:
                for name, shards in gathered[1:]:
                    self._move_shards(self._directory / name, shards, partial)
                (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
                put_in_place(partial, final)
        except OSError as cause:
            raise EngineError(
                f"cannot write weights of version {version} to {final}: {cause}; free some space."
            ) from cause
        if ranks.rank == 0:
            self._in_use.add(version)
            self._prune(newest=version)
        logger.debug("published version=%d in %.3fs", version, time.perf_counter() - started)
        return manifest

    def _write(self, partial: Path, tensors: Iterable[NamedTensor]) -> RankShards:
        """Write this rank's files into a directory of its own."""
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        prefix = "" if self._ranks.world_size == 1 else f"rank_{self._ranks.rank}_"
        shards: list[str] = []
        checksums: list[int] = []
        entries: list[TensorEntry] = []
        rest = iter(tensors)
        named = next(rest, None)
        with ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="weights") as writers:
            while named is not None:
                path = partial / f"{prefix}shard_{len(shards):05d}.safetensors"
                with ShardFile(path, len(shards), self._buffers, writers) as file:
                    file.add(*named)
                    while (named := next(rest, None)) is not None and file.has_room(*named, self._shard_bytes):
                        file.add(*named)
                    checksums.append(file.finish())
                entries += file.entries
                shards.append(path.name)
        return RankShards(tuple(shards), tuple(checksums), tuple(entries))

    @staticmethod
    def _move_shards(directory: Path, shards: RankShards, target: Path) -> None:
        """Move another rank's files into the directory of the version."""
        for shard in shards.shards:
            (directory / shard).rename(target / shard)
        directory.rmdir()

    def keep(self, versions: Iterable[int]) -> None:
        """Keep these versions of an earlier start until they are released; delete all others."""
        self._in_use.update(versions)
        self._prune(newest=-1)

    def release(self, version: int) -> None:
        self._in_use = {each for each in self._in_use if each > version}

    def close(self) -> None:
        """The newest versions stay on disk: an engine may be started from them."""
        self._in_use.clear()

    def _prune(self, newest: int) -> None:
        """Remove old versions, and those beyond `newest`, which are left from undone steps."""
        found = {int(match[1]): path for path in self._directory.iterdir() if (match := _VERSION.match(path.name))}
        kept = set(sorted(v for v in found if v <= newest)[-self._keep_versions :]) | self._in_use
        for version, path in found.items():
            if version not in kept:
                shutil.rmtree(path, ignore_errors=True)


class ShardFile:
    """A safetensors file while it is written."""

    def __init__(
        self, path: Path, shard: int, buffers: deque[UInt8[torch.Tensor, " bytes"]], writers: ThreadPoolExecutor
    ) -> None:
        self._fd = _open_direct(path)
        self._shard, self._buffers, self._writers = shard, buffers, writers
        self._writing: deque[Future[None]] = deque()
        self._checksum = Checksum()
        self._used = 0  # bytes of the first buffer
        self._written = HEADER_BYTES
        self._header_bytes = _ENTRY_BYTES
        self.entries: list[TensorEntry] = []

    def has_room(self, name: str, tensor: Shaped[torch.Tensor, " ..."], shard_bytes: int) -> bool:
        """Whether this tensor belongs into the file: within its size and header, at a multiple of its items' size."""
        size = self._end - HEADER_BYTES + tensor.nbytes
        header = self._header_bytes + _header_bytes(name, tensor)
        return size <= shard_bytes and header <= HEADER_BYTES and self._end % tensor.element_size() == 0

    def add(self, name: str, tensor: Shaped[torch.Tensor, " ..."]) -> None:
        """Append a tensor; a copy of it is written."""
        dtype, shape = dtype_name(name, tensor), tuple(tensor.shape)
        self.entries.append(TensorEntry(name, dtype, shape, self._shard, self._end, tensor.nbytes))
        self._header_bytes += _header_bytes(name, tensor)
        for piece in byte_pieces(tensor, PIECE_BYTES):
            start, size = 0, piece.numel()
            while start < size:
                begin, used = self._used, min(PIECE_BYTES, self._used + size - start)
                self._buffers[0][begin:used].copy_(piece[start : start + used - begin])
                self._used, start = used, start + used - begin
                if used == PIECE_BYTES:
                    self._write_buffer()

    def finish(self) -> int:
        """Write the rest and the header; returns the file's checksum."""
        end = self._end
        if self._used:
            self._write_buffer()
        header = _header_of(self.entries)
        self._checksum.put_before(header)
        first = self._next_buffer()
        first[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
        while self._writing:
            self._writing.popleft().result()
        _write_at(self._fd, first.numpy().data[:HEADER_BYTES], 0)
        os.ftruncate(self._fd, end)
        return self._checksum.value

    @property
    def _end(self) -> int:
        return self._written + self._used

    def _write_buffer(self) -> None:
        """Sum what the first buffer has and let a thread write it; the next one is filled then."""
        view = self._buffers[0].numpy().data
        self._checksum.add(view[: self._used])
        # Past the page cache whole blocks are written; the file is cut afterwards.
        size = self._used + -self._used % BLOCK
        self._writing.append(self._writers.submit(_write_at, self._fd, view[:size], self._written))
        self._written, self._used = self._written + self._used, 0
        self._buffers.rotate(-1)
        self._next_buffer()

    def _next_buffer(self) -> UInt8[torch.Tensor, " bytes"]:
        """The first buffer, once it is written."""
        while len(self._writing) >= len(self._buffers):
            self._writing.popleft().result()
        return self._buffers[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writing in self._writing:
            writing.exception()  # waits: no thread writes to a file that is closed
        os.close(self._fd)


def _header_bytes(name: str, tensor: Shaped[torch.Tensor, " ..."]) -> int:
    """At most so many bytes has a tensor's entry in a header."""
    return _ENTRY_BYTES + len(msgspec.json.encode((name, tuple(tensor.shape))))


def _header_of(entries: list[TensorEntry]) -> bytearray:
    """The header of a safetensors file, padded with spaces, as its format allows, to HEADER_BYTES."""
    found = {
        entry.name: {
            "dtype": _HEADER_DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (entry.offset - HEADER_BYTES, entry.offset + entry.num_bytes - HEADER_BYTES),
        }
        for entry in entries
    }
    header = bytearray((HEADER_BYTES - 8).to_bytes(8, "little"))
    return header + msgspec.json.encode(found).ljust(HEADER_BYTES - 8)


def _open_direct(path: Path) -> int:
    """Create a file that is written past the page cache, if the file system can do that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write whole blocks; through the page cache where the file system refuses to write past it."""
    while len(view):
        # Read before the write: another thread may be refused at the same time, and clear it meanwhile.
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            written = os.pwrite(fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        view, offset = view[written:], offset + written


def _pages(num_bytes: int) -> UInt8[torch.Tensor, " bytes"]:
    """New bytes that begin at a page, as writing past the page cache requires."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def read_pages(view: memoryview | mmap.mmap) -> None:
    """Read a part of a mapped file into memory at once: page by page it takes longer. Other threads run meanwhile."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), _POPULATE_READ)


_libc = ctypes.CDLL(None)


class MappedReceiver(Receiver):
    """Maps the files of a version and verifies them; the tensors are views (private copy-on-write mappings)."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._paths = [Path(manifest.location, shard) for shard in manifest.shards]
        self._maps: list[mmap.mmap | memoryview] = []
        try:
            for shard in range(len(self._paths)):
                self._maps.append(self._map(shard))
            crc = combine_checksums(map(self._checksum, self._maps))
            if crc != manifest.checksum:
                raise WireError(
                    f"weights of version {manifest.version} in {manifest.location} have the checksum {crc:#010x}, but "
                    f"the manifest says {manifest.checksum:#010x}; they were overwritten or damaged."
                )
        except BaseException:
            self.close()
            raise

    def _checksum(self, mapped: mmap.mmap | memoryview) -> int:
        checksum, view = new_checksum(self.manifest), memoryview(mapped)
        for part in self._read([view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]):
            checksum.add(part)
        return checksum.value

    def _read(self, parts: list[memoryview]) -> Iterator[memoryview]:
        """Parts of a mapping, each once it is in memory: the next ones are read meanwhile."""
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as readers:
            for part, _ in zip(parts, readers.map(read_pages, parts)):
                yield part

    def __iter__(self) -> Iterator[NamedTensor]:
        for entry in self.manifest.tensors:
            yield entry.name, tensor_over(self._maps[entry.shard], entry, entry.offset)

    def close(self) -> None:
        """Drop the mappings; each ends with the last tensor that refers to it.

        They are not closed explicitly: torch keeps a mapping object alive but does not lock its buffer, so closing
        it would leave tensors over unmapped memory.
        """
        self._maps = []

    def _map(self, shard: int) -> mmap.mmap | memoryview:
        return self._open(self._paths[shard])

    def _open(self, path: Path) -> mmap.mmap:
        what = f"weights of version {self.manifest.version}: {path}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WireError(
                f"{what} does not exist; the publisher removed it or runs on another host "
                '(across hosts use weight_broadcast.type = "filesystem").'
            ) from None
        except OSError as cause:
            raise WireError(f"{what}: {cause.strerror}.") from cause
        try:
            if os.fstat(fd).st_size == 0:
                raise WireError(f"{what} is empty.")
            # Private: writable, as torch requires, without changing the publisher's bytes.
            return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)


def describe_files(directory: Path, *, version: int, location: Path) -> WeightManifest:
    """The manifest of the safetensors files of a model directory, which is going to be at `location`.

    Raises: WireError for a dtype that no transport has.
    """
    entries: list[TensorEntry] = []
    paths = sorted(directory.glob("*.safetensors"))
    for shard, path in enumerate(paths):
        length, header = _header(path)
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise WireError(f"{path}: {name} is {entry['dtype']}, which weights for engines cannot be")
            start, end = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            found.append(TensorEntry(name, dtype, shape, shard, 8 + length + start, end - start))
        entries += sorted(found, key=lambda entry: entry.offset)
    names, checksums = tuple(path.name for path in paths), tuple(map(_checksum_of_file, paths))
    part = RankShards(names, checksums, tuple(entries))
    return build_manifest([part], version=version, transport="filesystem", location=str(location.resolve()))


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Length and content of a file's header (length, then JSON)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length, msgspec.json.decode(file.read(length))


def _checksum_of_file(path: Path) -> int:
    checksum = Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.add(block)
    return checksum.value
