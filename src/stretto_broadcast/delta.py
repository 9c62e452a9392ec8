"""Delta updates: send only changed elements, through another weight transport, for wires slower than memory.

Between two steps about 99 % of bfloat16 weights keep their bits. The publisher remembers what it published last and
sends either all tensors (a snapshot) or only changes: for each changed tensor its changed elements, or the whole
tensor if that is smaller, and the checksum of the result. A manifest contains a chain of links, which are a snapshot
and the changes since then. An engine receives the links that it needs:

    it holds the previous version                               the last link
    it missed some versions                                     the links since its version
    it holds nothing or another chain, or a checksum differs    all links, from the snapshot on

A new snapshot is published if a change, or all changes since the last snapshot together, exceed `max_ratio` of its
size, or after `max_links`. Engines apply changes to one copy per host (host_copy.py) and load from there.

A link of changes has three byte tensors from each trainer rank: `table` (a ChangeTable in msgpack), `gaps` and
`values`. The ranks decide together whether a link is a snapshot. A gap is the number of unchanged elements before a
changed one: one byte 255 for each full 255, then one byte below 255.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from stretto.base.errors import WireError
from stretto.config.sections.transport import DeltaSection
from stretto.records.weight_manifest import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights.checksum import KIND, check_kind, checksum_of_bytes
from stretto.transports.weights.layout import (
    HEAD_BYTES,
    ONE_RANK,
    NamedTensor,
    Publisher,
    Ranks,
    Receiver,
    dtype_name,
    padded,
    tensor_bytes,
    tensor_over,
)
from stretto_broadcast.collective import min_over_receivers
from stretto_broadcast.host_copy import CopyReader, CopyWriter, HostCopy, open_copy

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped, UInt, UInt8

logger = logging.getLogger(__name__)

BLOCK = 1 << 20  # elements compared at a time, which fit into the cache
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NO_VERSION = -1  # exchanged by receivers that hold no version

Receive = Callable[[WeightManifest, WeightGroup | None], Receiver]
"""Receives one link's tensors: `receive` of this package."""


class TensorChange(msgspec.Struct, frozen=True, array_like=True):
    """The change of one tensor in a link."""

    index: int  # index of the tensor in the manifest
    gap_bytes: int | None  # bytes of its gaps; None if the whole tensor is sent
    value_bytes: int
    checksum: int  # checksum of the whole tensor after the change


class ChangeTable(msgspec.Struct, frozen=True):
    """The changes in a link, and the version to which they apply."""

    base: int
    changes: tuple[TensorChange, ...]


class Chain(msgspec.Struct, frozen=True):
    """`location` of a manifest: links of which the first is a snapshot.

    The snapshot's tensors are those of the manifest and are not repeated.
    """

    run: str
    id: str
    directory: str  # directory of the copy on each engine host
    links: tuple[WeightManifest, ...]


# -- the trainer's end --


class DeltaPublisher:
    """Publishes links through another publisher; releases a link when no chain needs it."""

    def __init__(self, inner: Publisher, run_id: str, cfg: DeltaSection, ranks: Ranks = ONE_RANK) -> None:
        self._inner, self._run_id, self._cfg, self._ranks = inner, run_id, cfg, ranks
        self._chain_id = ""  # new for each set of tensors, because a host's copy is laid out for one set
        self._published: dict[str, np.ndarray] = {}  # this rank's last published tensors, as words
        self._rank_entries: tuple[TensorEntry, ...] = ()  # this rank's tensors, without a place in a shard
        self._entries: tuple[TensorEntry, ...] = ()  # all ranks' tensors, in the snapshot
        self._index: dict[str, int] = {}  # tensor name -> its index in _entries
        self._links: list[WeightManifest] = []
        self._snapshots: dict[int, int] = {}  # version -> version of the snapshot at the start of its chain
        self._changed_bytes = 0  # of all links since the snapshot

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        started = time.perf_counter()
        changes = self._find_changes(tensors)
        if changes is None:
            snapshot = ((e.name, tensor_over(self._published[e.name].data, e)) for e in self._rank_entries)
            link = self._inner.publish(version, snapshot)
            self._entries, self._changed_bytes = link.tensors, 0
            self._index = {entry.name: index for index, entry in enumerate(link.tensors)}
            self._links = [link]
        else:
            link = self._inner.publish(version, changes)
            self._links.append(link)
        num_bytes = sum(entry.num_bytes for entry in link.tensors)
        self._changed_bytes += num_bytes if changes is not None else 0
        self._snapshots[version] = self._links[0].version
        logger.debug(
            "published version=%d as %s bytes=%d in %.4fs",
            version,
            "a snapshot" if changes is None else "changes",
            num_bytes,
            time.perf_counter() - started,
        )
        first = msgspec.structs.replace(self._links[0], tensors=())
        chain = Chain(self._run_id, self._chain_id, str(self._cfg.directory), (first, *self._links[1:]))
        return WeightManifest(
            version=version,
            transport="delta",
            location=msgspec.json.encode(chain).decode(),
            shards=(),
            tensors=self._entries,
            checksum=link.checksum,
            checksum_kind=KIND,
            changed_bytes=num_bytes,
            needs_group=link.needs_group,
        )

    def release(self, version: int) -> None:
        """Release a version; its links stay while a newer chain begins with the same snapshot."""
        self._snapshots = {v: snapshot for v, snapshot in self._snapshots.items() if v > version}
        first = min(self._snapshots.values(), default=version + 1)
        self._inner.release(min(version, first - 1))

    def close(self) -> None:
        self._inner.close()
        self._published.clear()

    def _find_changes(self, tensors: Iterable[NamedTensor]) -> list[NamedTensor] | None:
        """Remember the new values; returns the changes as tensors, None if a snapshot is needed."""
        limit = self._max_change_bytes()
        before, self._published = self._published, {}
        changes: list[TensorChange] = []
        gaps: list[np.ndarray] = []
        values: list[np.ndarray] = []
        size = 0
        entries: list[TensorEntry] = []
        for name, tensor in tensors:
            shape, dtype = tuple(tensor.shape), dtype_name(name, tensor)
            words = _words_of(tensor)
            entries.append(TensorEntry(name, dtype, shape, 0, 0, words.nbytes))
            old = before.pop(name, None)
            if old is None or old.dtype != words.dtype or len(old) != len(words):
                self._published[name], limit = words.copy(), None
                continue
            self._published[name] = old
            if limit is not None and size <= limit and (found := find_changes(old, words)) is not None:
                gap, value = found
                gap_bytes = None if gap is None else len(gap)
                checksum = checksum_of_bytes(words.data)
                changes.append(TensorChange(self._index[name], gap_bytes, value.nbytes, checksum))
                gaps += [] if gap is None else [gap]
                values.append(value.view(np.uint8))
                size += value.nbytes + (gap_bytes or 0)
            np.copyto(old, words)
        is_new_set, self._rank_entries = tuple(entries) != self._rank_entries, tuple(entries)
        gathered = self._ranks.gather((secrets.token_hex(4), is_new_set, size), tuple[str, bool, int])
        if any(is_new_set for _, is_new_set, _ in gathered):
            self._chain_id, limit = gathered[0][0], None
        if limit is None or sum(size for _, _, size in gathered) > limit:
            return None
        if not entries:
            return []
        table = msgspec.msgpack.encode(ChangeTable(self._links[-1].version, tuple(changes)))
        rank = self._ranks.rank
        return [
            (f"table {rank}", torch.frombuffer(bytearray(table), dtype=torch.uint8)),
            (f"gaps {rank}", _bytes_tensor(gaps)),
            (f"values {rank}", _bytes_tensor(values)),
        ]

    def _max_change_bytes(self) -> int | None:
        """Size in bytes above which a snapshot is published; None if one is needed anyway."""
        if not self._links or len(self._links) > self._cfg.max_links:
            return None
        full = sum(entry.num_bytes for entry in self._entries)
        return int(full * self._cfg.max_ratio) - self._changed_bytes


def find_changes(
    before: UInt[np.ndarray, " words"], after: UInt[np.ndarray, " words"]
) -> tuple[UInt8[np.ndarray, " gaps"] | None, UInt[np.ndarray, " changed"]] | None:
    """Gaps and changed words between two arrays; None if they are equal.

    Returns (None, all words) if that is smaller.
    """
    max_changed = after.nbytes // (after.itemsize + 1)
    positions: list[np.ndarray] = []
    count = 0
    for start in range(0, len(after), BLOCK):
        block = np.flatnonzero(before[start : start + BLOCK] != after[start : start + BLOCK])
        count += len(block)
        if count > max_changed:
            return None, after.copy()
        positions.append(block + start)
    if not count:
        return None
    found = np.concatenate(positions)
    gaps = encode_gaps(found)
    if len(gaps) + count * after.itemsize >= after.nbytes:
        return None, after.copy()
    return gaps, after[found]


def encode_gaps(positions: Int64[np.ndarray, " changed"]) -> UInt8[np.ndarray, " gaps"]:
    """Encode ascending positions as gaps: about one byte per position."""
    gaps = np.diff(positions, prepend=-1) - 1
    more, rest = np.divmod(gaps, 255)
    ends = np.cumsum(more + 1) - 1
    encoded = np.full(ends[-1] + 1 if len(ends) else 0, 255, np.uint8)
    encoded[ends] = rest
    return encoded


def decode_gaps(encoded: UInt8[np.ndarray, " gaps"]) -> Int64[np.ndarray, " changed"]:
    """Decode gaps into positions, int64."""
    sums: np.ndarray = np.cumsum(encoded, dtype=np.int64)[encoded != 255]
    positions: np.ndarray = sums + np.arange(len(sums))
    return positions


def _bytes_tensor(parts: list[Shaped[np.ndarray, " _"]]) -> Shaped[torch.Tensor, " bytes"]:
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.uint8))


# -- an engine's end --


class DeltaReceiver(Receiver):
    """Updates this host's copy to a version; its tensors are views of the copy, and writers wait until it is closed.

    Raises: WireError if a link cannot be received, or the copy is wrong even after it was written from the snapshot.
    """

    def __init__(self, manifest: WeightManifest, group: WeightGroup | None, worker: int, receive: Receive) -> None:
        check_kind(manifest)
        self.manifest = manifest
        chain = msgspec.json.decode(manifest.location, type=Chain)
        first = msgspec.structs.replace(chain.links[0], tensors=manifest.tensors)
        self._links = (first, *chain.links[1:])
        sizes = (padded(entry.num_bytes) for entry in manifest.tensors)
        *self._offsets, num_bytes = accumulate(sizes, initial=0)
        self._group = group if manifest.needs_group else None
        self._worker, self._receive = worker, receive
        self._copy: HostCopy = open_copy(Path(chain.directory), chain.run, chain.id, num_bytes)
        self._reader: CopyReader = self._update_copy()

    def __iter__(self) -> Iterator[NamedTensor]:
        for entry, offset in zip(self.manifest.tensors, self._offsets):
            yield entry.name, tensor_over(self._reader.map, entry, HEAD_BYTES + offset)

    def close(self) -> None:
        self._reader.close()

    def _update_copy(self) -> CopyReader:
        """Apply the missing links to the copy, or, if that fails, all links from the snapshot on."""
        version = self.manifest.version
        problem: WireError | None = None
        for attempt in range(2):
            current = self._copy.version if attempt == 0 else None
            start = self._min_over_receivers(f"start {attempt}", NO_VERSION if current is None else current)
            reader = None
            try:
                self._apply_since(start, attempt)
                reader = self._copy.read(version)
            except Mismatch as error:
                problem = error
            except WireError as error:
                if self._group is not None:
                    raise  # the broadcast has failed for all receivers
                problem = error
            if self._min_over_receivers(f"is updated {attempt}", 0 if reader is None else 1):
                assert reader is not None
                return reader
            if reader is not None:
                reader.close()
            if attempt == 0 and start != NO_VERSION:
                logger.warning("version %d from %d: %s Starting from the snapshot.", version, start, problem)
        raise problem or WireError(f"another receiver could not update its copy to version {version}")

    def _min_over_receivers(self, topic: str, value: int) -> int:
        """The smallest value of all that receive together; the value itself without a group."""
        if self._group is None:
            return value
        return min_over_receivers(self._links[-1], self._group, self._worker, topic, value)

    def _apply_since(self, start: int, attempt: int) -> None:
        """Receive the links after version `start`, and apply those that the copy lacks.

        In a broadcast all receivers receive all links, even if another process writes the copy or it is damaged.
        """
        has_start = any(link.version == start for link in self._links)
        problem: Mismatch | None = None
        with self._copy.writing() as writer:
            if self._group is None and writer is None:
                return  # another process of this host updates the copy
            for link in self._links:
                if has_start and link.version <= start:
                    continue
                group = self._group
                if group is not None:
                    request = f"{group.request}-{attempt}-{link.version}"
                    group = msgspec.structs.replace(group, request=request)
                with self._receive(link, group) as tensors:
                    current = NO_VERSION if writer is None or writer.version is None else writer.version
                    is_missing = current < link.version or (attempt == 1 and link is self._links[0])
                    if writer is not None and problem is None and is_missing:
                        try:
                            self._apply(link, tensors, writer)
                        except Mismatch as error:
                            problem = error
                    else:
                        for _ in tensors:
                            pass
        if problem is not None:
            raise problem

    def _apply(self, link: WeightManifest, tensors: Receiver, writer: CopyWriter) -> None:
        """Apply one link to the copy."""
        base = writer.version
        writer.begin()
        if link is self._links[0]:
            index = {entry.name: i for i, entry in enumerate(self.manifest.tensors)}
            for name, tensor in tensors:
                self._words(writer, index[name])[:] = _words_of(tensor)
        else:
            parts = {name: np.frombuffer(tensor_bytes(tensor), np.uint8) for name, tensor in tensors}
            for rank in sorted(name.removeprefix("table ") for name in parts if name.startswith("table ")):
                table = msgspec.msgpack.decode(parts[f"table {rank}"].data, type=ChangeTable)
                self._apply_changes(link, base, table, parts[f"gaps {rank}"], parts[f"values {rank}"], writer)
        tensors.check_unchanged()  # other engines of this host load what is committed
        writer.commit(link.version)

    def _apply_changes(
        self,
        link: WeightManifest,
        base: int | None,
        table: ChangeTable,
        gaps: np.ndarray,
        values: np.ndarray,
        writer: CopyWriter,
    ) -> None:
        """Apply one trainer rank's changes to the copy, which held version `base` before the link."""
        if base != table.base:
            raise Mismatch(f"version {link.version} changes version {table.base}, but this host holds {base}.")
        gap_start = value_start = 0
        for change in table.changes:
            words = self._words(writer, change.index)
            value = values[value_start : value_start + change.value_bytes].view(words.dtype)
            value_start += change.value_bytes
            if change.gap_bytes is None:
                words[:] = value
            else:
                words[decode_gaps(gaps[gap_start : gap_start + change.gap_bytes])] = value
                gap_start += change.gap_bytes
            if (checksum := checksum_of_bytes(words.data)) != change.checksum:
                name = self.manifest.tensors[change.index].name
                raise Mismatch(
                    f"{name} has the checksum {checksum:#010x} after the changes of version {link.version}, but "
                    f"{change.checksum:#010x} at the trainer."
                )

    def _words(self, writer: CopyWriter, index: int) -> np.ndarray:
        """A tensor in the copy as writable words."""
        entry, start = self.manifest.tensors[index], self._offsets[index]
        count = max(1, int(np.prod(entry.shape)))
        return writer.tensors[start : start + entry.num_bytes].view(WORDS[max(1, entry.num_bytes // count)])


class Mismatch(WireError):
    """The copy on this host does not have the version or the content that the changes expect."""


def _words_of(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(tensor_bytes(tensor), WORDS[tensor.element_size()])


def build_receiver(
    manifest: WeightManifest,
    group: WeightGroup | None,
    worker: int,
    device: torch.device | None,
    receive: Callable[..., Receiver],
) -> DeltaReceiver:
    """The receiver of a version; its links are received by the transport within."""
    return DeltaReceiver(manifest, group, worker, lambda link, group: receive(link, group, worker, device))
