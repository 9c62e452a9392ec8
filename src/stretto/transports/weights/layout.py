"""What the weight transports share: tensors as bytes, and a manifest's files mapped back into tensors.

A shard is a file of raw little-endian tensors at the offsets that the manifest names. Where there are several trainer
ranks, each publishes some of the tensors as shards of its own, and `Part` says what; the parts of all are one manifest.
The checksum is the crc32 over the crc32 of every shard, in order; it is verified before the first tensor is handed out.
"""

from __future__ import annotations

import heapq
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import msgspec
import torch

from stretto.base.errors import WireError
from stretto.records.weights import TensorEntry, WeightManifest

T = TypeVar("T")
Named = tuple[str, torch.Tensor]
Buffer = mmap.mmap | memoryview

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Publisher(Protocol):
    """The trainer's end; every trainer rank has one. Versions are published in rising order."""

    def publish(self, version: int, tensors: Iterable[Named]) -> WeightManifest:
        """Write a version completely, then say where it lies; the tensors may be changed afterwards.

        Every rank must call it, with the tensors that it owns, and gets the manifest of all.
        """
        ...

    def release(self, version: int) -> None:
        """Nobody reads `version` or an older one any more: their space may be used again."""
        ...

    def close(self) -> None:
        """Remove what nobody can read after the trainer has gone."""
        ...


# -- several trainer ranks --


class Ranks(Protocol):
    """The trainer ranks that publish together, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        ...


@dataclass(frozen=True)
class OneRank:
    """A trainer of one rank."""

    rank: int = 0
    world_size: int = 1

    def gather(self, value: T) -> list[T]:
        return [value]


ONE_RANK = OneRank()


class Part(msgspec.Struct, frozen=True):
    """What one rank wrote of a version: its shards, their crc32, and its tensors, whose shards are counted from 0."""

    shards: tuple[str, ...]
    checksums: tuple[int, ...]
    tensors: tuple[TensorEntry, ...]


def joined(parts: Iterable[Part]) -> Part:
    """One part of those of all ranks, its tensors in the order in which they lie in their shards."""
    shards: list[str] = []
    checksums: list[int] = []
    tensors: list[list[TensorEntry]] = []
    for part in parts:
        first = len(shards)
        tensors.append([msgspec.structs.replace(e, shard=first + e.shard) for e in part.tensors])
        shards += part.shards
        checksums += part.checksums
    return Part(tuple(shards), tuple(checksums), tuple(heapq.merge(*tensors, key=lambda e: e.offset)))


def checksum_of(shards: Iterable[int]) -> int:
    """A manifest's checksum, of the crc32 of each shard."""
    return zlib.crc32(b"".join(crc.to_bytes(4, "little") for crc in shards))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The manifest's word for a tensor's dtype."""
    word = str(tensor.dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise WireError(f"tensor {name} has dtype {word}, which weight transports do not carry.")
    return word


class Received:
    """Iterable of (name, tensor), once mapped and verified; the tensors are valid until the context is left.

    They are views of the published bytes (private copy-on-write mappings): copy what shall stay. Leaving the
    context checks that the publisher did not write over them meanwhile, and raises WireError if it did.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._maps: list[mmap.mmap] = []
        self._paths = [Path(manifest.location, shard) for shard in manifest.shards]
        try:
            for path in self._paths:
                self._maps.append(_map(path, manifest))
        except BaseException:
            self.close()
            raise
        crc = checksum_of(map(zlib.crc32, self._maps))
        if crc != manifest.checksum:
            self.close()
            raise WireError(
                f"weights of version {manifest.version} in {manifest.location}: checksum {crc:#010x}, the "
                f"manifest says {manifest.checksum:#010x}; they were overwritten or damaged."
            )

    def __iter__(self) -> Iterator[Named]:
        for entry in self.manifest.tensors:
            yield entry.name, tensor_over(self._maps[entry.shard], entry, entry.offset)

    def __enter__(self) -> Received:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check_unchanged()
        finally:
            self.close()

    def check_unchanged(self) -> None:
        """Raise WireError if the publisher reused the space while it was read."""
        if self.manifest.transport != "shm":
            return
        for path, mapped in zip(self._paths, self._maps):
            if mapped[:HEAD_BYTES] != shard_head(self.manifest.version):
                raise WireError(
                    f"weights of version {self.manifest.version} in {path} were overwritten while they were "
                    "read; the publisher released them too early."
                )

    def close(self) -> None:
        """Let the mappings go; each ends with the last tensor that refers to it.

        They are never closed by hand: torch keeps the mapping object alive but does not lock its buffer, so
        that closing it would leave tensors over unmapped memory.
        """
        self._maps = []


def tensor_over(buffer: Buffer, entry: TensorEntry, offset: int = 0) -> torch.Tensor:
    """The tensor whose bytes begin at `offset` of a buffer, as a view of them.

    Raises: WireError when the entry contradicts itself or ends beyond the buffer.
    """
    dtype = DTYPES.get(entry.dtype)
    count = math.prod(entry.shape)
    if dtype is None or count * dtype.itemsize != entry.num_bytes:
        what = f"{entry.dtype}{list(entry.shape)}"
        raise WireError(f"tensor {entry.name}: {what} is not {entry.num_bytes} bytes.")
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    if offset + entry.num_bytes > (size := memoryview(buffer).nbytes):
        raise WireError(f"tensor {entry.name} ends beyond its shard of {size} bytes.")
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(entry.shape)


# A shard of shared memory is used again and again; the version in its head warns a reader that comes late.
HEAD_BYTES = 64
ALIGN = 64
HEAD_MAGIC = b"strettoW"


def shard_head(version: int) -> bytes:
    """The first bytes of a shared memory shard, written last and cleared first."""
    return (HEAD_MAGIC + version.to_bytes(8, "little")).ljust(HEAD_BYTES, b"\0")


def _map(path: Path, manifest: WeightManifest) -> mmap.mmap:
    what = f"weights of version {manifest.version}: {path}"
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
        # Private: writable, as torch wants its memory, while the publisher's bytes stay as they are.
        mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    if manifest.transport == "shm" and mapped[:HEAD_BYTES] != shard_head(manifest.version):
        held = int.from_bytes(mapped[8:16], "little") if mapped[:8] == HEAD_MAGIC else None
        mapped.close()
        raise WireError(f"{what} holds " + ("an unfinished version." if held is None else f"version {held}."))
    return mapped


# -- buckets: bytes of several tensors in one piece of memory --


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of one sender that travel together."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int


def buckets_of(entries: Iterable[TensorEntry], sender: int, bucket_bytes: int) -> list[Bucket]:
    """The buckets of one sender, in order; a tensor bigger than a bucket has one of its own."""
    buckets: list[Bucket] = []
    held: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if entry.shard != sender:
            continue
        needed = padded(entry.num_bytes)
        if held and size + needed > bucket_bytes:
            buckets.append(Bucket(tuple(held), size))
            held, size = [], 0
        held.append(entry)
        size += needed
    if held:
        buckets.append(Bucket(tuple(held), size))
    return buckets


def padded(num_bytes: int) -> int:
    """Bytes of a tensor in a bucket."""
    return num_bytes + -num_bytes % ALIGN


def tensors_of(bucket: Bucket, buffer: torch.Tensor) -> Iterator[Named]:
    """The tensors of a bucket, as views of its bytes."""
    at = 0
    for entry in bucket.entries:
        dtype = DTYPES[entry.dtype]
        part = buffer[at : at + entry.num_bytes]
        yield (
            entry.name,
            part.view(dtype).view(entry.shape)
            if entry.num_bytes
            else torch.empty(entry.shape, dtype=dtype, device=buffer.device),
        )
        at += padded(entry.num_bytes)
