"""Checksums of published bytes: sums of 64-bit words over blocks of 4 KiB, then crc32 over the list of sums.

Adding words is as fast as reading them, six times faster than crc32 over all bytes. A single changed byte changes its
block's sum; blocks that are missing, exchanged, or of another version change the list. Not detected are words of one
block that changed places, or changes of several words that cancel out: transports lose or mix up whole pages instead.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import numpy as np

from stretto.base.errors import WireError
from stretto.records.weight_manifest import WeightManifest

BLOCK = 4096
WORD = 8

Bytes = bytes | bytearray | memoryview


class Sum(Protocol):
    """A checksum of bytes that are added in parts; where they are split makes no difference."""

    def add(self, data: Bytes) -> None: ...

    @property
    def value(self) -> int:
        """The checksum of all bytes so far, 32 bits."""
        ...


class Checksum:
    """The checksum of this module, as a Sum; adding many bytes at once lets other threads run meanwhile."""

    def __init__(self) -> None:
        self._sums = bytearray()  # of whole blocks, one part in 512 of what was added
        self._num_bytes = 0
        self._rest = bytearray()  # less than a block

    def add(self, data: Bytes) -> None:
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        self._num_bytes += len(view)
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < BLOCK:
                return
            self._sums += _sums(memoryview(self._rest))
            self._rest = bytearray()
        end = len(view) - len(view) % BLOCK
        if end:
            self._sums += _sums(view[:end])
        self._rest += view[end:]

    def put_before(self, data: Bytes) -> None:
        """Add whole blocks in front of all bytes so far: a header that is known last."""
        view = memoryview(data).cast("B")
        assert len(view) % BLOCK == 0, "not whole blocks"
        self._num_bytes += len(view)
        self._sums[:0] = _sums(view)

    @property
    def value(self) -> int:
        """The checksum of all bytes so far and of their number, 32 bits."""
        tail = self._rest + bytes(-len(self._rest) % WORD)
        words = np.frombuffer(tail, np.int64).sum().tobytes()
        return zlib.crc32(words + self._num_bytes.to_bytes(8, "little"), zlib.crc32(self._sums))


def checksum_of_bytes(data: Bytes) -> int:
    """The checksum of these bytes."""
    checksum = Checksum()
    checksum.add(data)
    return checksum.value


def _sums(view: memoryview) -> bytes:
    """Sums of whole blocks, modulo 2 ** 64."""
    sums: np.ndarray = np.frombuffer(view, np.int64).reshape(-1, BLOCK // WORD).sum(1)
    return sums.tobytes()


class Crc32:
    """The crc32 of all bytes, as a Sum: files of earlier versions have it."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, data: Bytes) -> None:
        self.value = zlib.crc32(data, self.value)


KIND = "sum64"
"""Name of this checksum in manifests."""
KINDS: dict[str, type[Checksum | Crc32]] = {KIND: Checksum, "crc32": Crc32}
"""The kinds of checksums that can be verified, by their names in manifests."""


def new_checksum(manifest: WeightManifest) -> Sum:
    """An empty checksum of the kind that a version's shards have.

    Raises: WireError if the kind is unknown.
    """
    if (kind := KINDS.get(manifest.checksum_kind)) is None:
        raise _unknown(manifest, " or ".join(map(repr, KINDS)))
    return kind()


def check_kind(manifest: WeightManifest) -> None:
    """Raises: WireError if the manifest has another kind of checksum than KIND."""
    if manifest.checksum_kind != KIND:
        raise _unknown(manifest, repr(KIND))


def _unknown(manifest: WeightManifest, known: str) -> WireError:
    return WireError(
        f"weights of version {manifest.version} have a checksum of the kind {manifest.checksum_kind!r}, but this "
        f"reader knows {known}; start trainer and engines from one version of stretto."
    )
