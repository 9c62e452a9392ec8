"""Checksums of published bytes: sums of 64-bit words over blocks of 4 KiB, then crc32 over the list of sums.

Adding words is as fast as reading them, six times faster than crc32 over all bytes. A single changed byte changes its
block's sum; blocks that are missing, exchanged, or of another version change the list. Not detected are words of one
block that changed places, or changes of several words that cancel out: transports lose or mix up whole pages instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from stretto.base.errors import WireError
from stretto.records.weight_manifest import WeightManifest

BLOCK = 4096
WORD = 8

Bytes = bytes | bytearray | memoryview


class Checksum:
    """The checksum of bytes that are added in parts; where they are split makes no difference."""

    def __init__(self) -> None:
        self._crc, self._num_bytes = 0, 0
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
            self._crc = zlib.crc32(_sums(memoryview(self._rest)), self._crc)
            self._rest = bytearray()
        end = len(view) - len(view) % BLOCK
        if end:
            self._crc = zlib.crc32(_sums(view[:end]), self._crc)
        self._rest += view[end:]

    @property
    def value(self) -> int:
        """The checksum of all bytes so far and of their number, 32 bits."""
        tail = self._rest + bytes(-len(self._rest) % WORD)
        words = np.frombuffer(tail, np.int64).sum().tobytes()
        return zlib.crc32(words + self._num_bytes.to_bytes(8, "little"), self._crc)


def checksum_of_bytes(data: Bytes) -> int:
    """The checksum of these bytes."""
    checksum = Checksum()
    checksum.add(data)
    return checksum.value


def _sums(view: memoryview) -> bytes:
    """Sums of whole blocks, modulo 2 ** 64."""
    sums: np.ndarray = np.frombuffer(view, np.int64).reshape(-1, BLOCK // WORD).sum(1)
    return sums.tobytes()


KIND = "sum64"
"""Name of this checksum in manifests."""
KINDS: dict[str, Callable[[Bytes], int]] = {KIND: checksum_of_bytes, "crc32": zlib.crc32}
"""The kinds of checksums that can be verified, by their names in manifests."""


def checksum_function(manifest: WeightManifest) -> Callable[[Bytes], int]:
    """The function that computes the checksums of a version's shards.

    Raises: WireError if the kind is unknown.
    """
    if (found := KINDS.get(manifest.checksum_kind)) is None:
        raise _unknown(manifest, " or ".join(map(repr, KINDS)))
    return found


def check_kind(manifest: WeightManifest) -> None:
    """Raises: WireError if the manifest has another kind of checksum than KIND."""
    if manifest.checksum_kind != KIND:
        raise _unknown(manifest, repr(KIND))


def _unknown(manifest: WeightManifest, known: str) -> WireError:
    return WireError(
        f"weights of version {manifest.version} have a checksum of the kind {manifest.checksum_kind!r}, but this "
        f"reader knows {known}; start trainer and engines from one version of stretto."
    )
