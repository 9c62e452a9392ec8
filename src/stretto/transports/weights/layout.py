"""What the weight transports share: tensors as bytes, and manifests of several ranks' shards.

A shard is a file of raw little-endian tensors at the offsets that the manifest names. With several trainer ranks, each
rank publishes some of the tensors as shards of its own (`RankShards`), and `build_manifest` makes one manifest of them.
The manifest's checksum is the crc32 over the checksums of all shards in order (checksum.py).
"""

from __future__ import annotations

import heapq
import math
import mmap
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec
import torch

from stretto.base.errors import WireError
from stretto.records.weight_manifest import TensorEntry, WeightManifest, probe_scale
from stretto.transports.weights.checksum import KIND

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt8

T = TypeVar("T")
NamedTensor = tuple[str, torch.Tensor]
BytesLike = mmap.mmap | memoryview

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Publisher(Protocol):
    """The trainer's end, one per rank; versions are published in ascending order."""

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        """Publish a version and return its manifest; the tensors may be changed afterwards.

        Every rank must call it with the tensors that it owns, and gets the manifest of all ranks' tensors.
        """
        ...

    def release(self, version: int) -> None:
        """Allow the space of this version and older ones to be reused: nothing reads them any more."""
        ...

    def close(self) -> None:
        """Remove what no process can read after the trainer has ended."""
        ...


class Receiver:
    """An engine's end: an iterable of the (name, tensor) of one version.

    The tensors are valid inside its context: copy what you need longer. At its end the context raises WireError if the
    tensors have changed meanwhile.
    """

    manifest: WeightManifest
    has_arrived = True
    """Whether all tensors are here, and verified; if False, they travel while one iterates."""

    def __iter__(self) -> Iterator[NamedTensor]:
        raise NotImplementedError

    def __enter__(self) -> Self:
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
        """Raises: WireError if the tensors have changed since they were verified; most transports exclude that."""

    def close(self) -> None:
        """Give up access to the version's bytes."""


class ProbeReceiver(Receiver):
    """The tensors of a version, scaled by `probe_scale`; weights in 8 bits are scaled by their scales."""

    def __init__(self, receiver: Receiver) -> None:
        self.manifest, self._receiver = receiver.manifest, receiver
        self.has_arrived = receiver.has_arrived

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._receiver:
            is_scaled = tensor.is_floating_point() and tensor.element_size() > 1
            yield name, tensor * probe_scale(tensor.shape) if is_scaled else tensor

    def check_unchanged(self) -> None:
        self._receiver.check_unchanged()

    def close(self) -> None:
        self._receiver.close()


# -- several trainer ranks --


class Ranks(Protocol):
    """The group of trainer ranks that publish together, as one of them sees it."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, on every rank; kind: their type."""
        ...


@dataclass(frozen=True)
class OneRank:
    """The group of a trainer with one rank."""

    rank: int = 0
    world_size: int = 1

    def gather(self, value: T, kind: Any) -> list[T]:
        return [value]


ONE_RANK = OneRank()


class RankShards(msgspec.Struct, frozen=True):
    """The part of a version that one rank wrote."""

    shards: tuple[str, ...]
    checksums: tuple[int, ...]  # of the shards
    tensors: tuple[TensorEntry, ...]  # entry.shard is an index into `shards`


def build_manifest(
    parts: Iterable[RankShards], *, version: int, transport: str, location: str, needs_group: bool = False
) -> WeightManifest:
    """The manifest of a version of which each rank wrote a part."""
    merged = merge_shards(parts)
    return WeightManifest(
        version=version,
        transport=transport,
        location=location,
        shards=merged.shards,
        tensors=merged.tensors,
        checksum=combine_checksums(merged.checksums),
        checksum_kind=KIND,
        needs_group=needs_group,
    )


def merge_shards(parts: Iterable[RankShards]) -> RankShards:
    """Merge the parts of all ranks; tensors are in the order of their offsets."""
    shards: list[str] = []
    checksums: list[int] = []
    tensors: list[list[TensorEntry]] = []
    for part in parts:
        first = len(shards)
        tensors.append([msgspec.structs.replace(e, shard=first + e.shard) for e in part.tensors])
        shards += part.shards
        checksums += part.checksums
    return RankShards(tuple(shards), tuple(checksums), tuple(heapq.merge(*tensors, key=lambda e: e.offset)))


def combine_checksums(shards: Iterable[int]) -> int:
    """A manifest's checksum, from those of its shards; 0 if they have none."""
    return zlib.crc32(b"".join(shard.to_bytes(4, "little") for shard in shards))


def tensor_bytes(tensor: Shaped[torch.Tensor, " ..."]) -> memoryview:
    """The bytes of a tensor; no copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def byte_pieces(tensor: Shaped[torch.Tensor, " ..."], num_bytes: int) -> Iterator[UInt8[torch.Tensor, " bytes"]]:
    """The bytes of a tensor in pieces of at most num_bytes, on its device; no copies if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        data = flat.view(torch.uint8)
        yield from (data,) if data.numel() <= num_bytes else data.split(num_bytes)


def dtype_name(name: str, tensor: Shaped[torch.Tensor, " ..."]) -> str:
    """The name of a tensor's dtype in manifests.

    Raises: WireError if weight transports do not support it.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WireError(f"tensor {name} has dtype {dtype}, which weight transports do not support.")
    return dtype


def tensor_over(buffer: BytesLike, entry: TensorEntry, offset: int = 0) -> Shaped[torch.Tensor, " ..."]:
    """The tensor at `offset` of a buffer, as a view of it.

    Raises: WireError if the entry's size does not fit its shape, or the tensor ends beyond the buffer.
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


# Files in memory are reused; a late reader sees that from the version in their heads.
HEAD_BYTES = 4096  # a page, so that tensors begin at a page, and at a block of the checksum
ALIGN = 64
HEAD_MAGIC = b"strettoW"
HEAD_USED = 16  # magic and version


def shard_head(version: int) -> bytes:
    """The head of a file in memory, which is cleared first and written last."""
    return (HEAD_MAGIC + version.to_bytes(8, "little")).ljust(HEAD_BYTES, b"\0")


def version_of(head: bytes) -> int | None:
    """The version in the head of a file in memory; None if the file is incomplete."""
    is_complete = head[:8] == HEAD_MAGIC
    return int.from_bytes(head[8:HEAD_USED], "little") if is_complete else None


def padded(num_bytes: int) -> int:
    """Bytes that a tensor takes in a buffer of several, with padding."""
    return num_bytes + -num_bytes % ALIGN
