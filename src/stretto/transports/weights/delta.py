"""Only what changed: a layer over another weight transport, for wires that are slower than memory.

Between two steps about 99 % of bfloat16 weights keep their bits. The publisher keeps what it published last and
sends, through any of the other transports, either all tensors (a snapshot) or one change: for each tensor that
changed its changed elements, or all of it where that is smaller, and the checksum of the result. A manifest names a
chain of links, a snapshot and the changes since, so that an engine gets what it lacks whatever it holds:

    holds the version before    the last link
    missed some                 the links since
    holds nothing, or another chain, or a checksum differs    all links, from the snapshot

A new snapshot begins a new run of links when a change is larger than `max_ratio` of it, when all changes since
together are, or after `max_links`. Engines apply changes to one copy on each host (host_copy.py) and load from there.

A link of changes is three tensors of bytes from each trainer rank: `table` (msgpack of Table), `gaps` and `values`. The
ranks decide together whether a link is a snapshot. Gaps are the numbers of
unchanged elements before each changed one: a byte below 255, after one byte 255 for each 255 more.
"""

from __future__ import annotations

import logging
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch

from stretto.base.errors import WireError
from stretto.config.transport import DeltaSection
from stretto.records.weights import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights.collective import agree
from stretto.transports.weights.host_copy import HostCopy, Snapshot, Writer, copy_of
from stretto.transports.weights.layout import (
    HEAD_BYTES,
    ONE_RANK,
    Named,
    Publisher,
    Ranks,
    dtype_name,
    tensor_bytes,
    tensor_over,
)

logger = logging.getLogger(__name__)

ALIGN = 64
BLOCK = 1 << 20  # elements that are compared at a time: they stay in the cache
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NOTHING = -1  # the version of an engine that holds none

Receive = Callable[[WeightManifest, WeightGroup | None], Any]
"""A link's tensors, as a context: what `receive` of this package gives."""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a link: `gap_bytes` of gaps, None where all of the tensor is sent."""

    index: int  # in the manifest's tensors
    gap_bytes: int | None
    value_bytes: int
    checksum: int  # crc32 of the whole tensor afterwards


class Table(msgspec.Struct, frozen=True):
    """What a link of changes changes, and from which version."""

    base: int
    changes: tuple[Change, ...]


class Chain(msgspec.Struct, frozen=True):
    """`location` of a manifest. The first link is a snapshot; its tensors are the manifest's, and not repeated."""

    run: str
    id: str
    directory: str  # of the copy on each engine host
    links: tuple[WeightManifest, ...]


# -- the trainer's end --


class DeltaPublisher:
    """Publishes through another publisher, whose versions are released when no chain begins with them any more."""

    def __init__(self, over: Publisher, run_id: str, cfg: DeltaSection, ranks: Ranks = ONE_RANK) -> None:
        self._over, self._run_id, self._cfg, self._ranks = over, run_id, cfg, ranks
        self._chain_id = ""  # of versions of the same tensors: the copies on engine hosts have their places
        self._held: dict[str, np.ndarray] = {}  # what this rank published last, as words
        self._own: tuple[TensorEntry, ...] = ()  # its tensors, in no shard
        self._entries: tuple[TensorEntry, ...] = ()  # all ranks' tensors, in the snapshot
        self._index: dict[str, int] = {}  # where they are there
        self._links: list[WeightManifest] = []
        self._starts: dict[int, int] = {}  # version -> the snapshot that its chain begins with
        self._changed_bytes = 0  # in links since the snapshot

    def publish(self, version: int, tensors: Iterable[Named]) -> WeightManifest:
        started = time.perf_counter()
        payload = self._compare(tensors)
        if payload is None:
            whole = ((e.name, tensor_over(self._held[e.name].data, e)) for e in self._own)
            link = self._over.publish(version, whole)
            self._entries, self._changed_bytes = link.tensors, 0
            self._index = {entry.name: index for index, entry in enumerate(link.tensors)}
            self._links = [link]
        else:
            link = self._over.publish(version, payload)
            self._links.append(link)
        num_bytes = sum(entry.num_bytes for entry in link.tensors)
        self._changed_bytes += num_bytes if payload is not None else 0
        self._starts[version] = self._links[0].version
        logger.debug(
            "published version=%d as %s bytes=%d in %.4fs",
            version,
            "a snapshot" if payload is None else "changes",
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
            changed_bytes=num_bytes,
            needs_group=link.needs_group,
        )

    def release(self, version: int) -> None:
        """Links stay as long as a version that is not released begins with their snapshot."""
        self._starts = {v: start for v, start in self._starts.items() if v > version}
        first = min(self._starts.values(), default=version + 1)
        self._over.release(min(version, first - 1))

    def close(self) -> None:
        self._over.close()
        self._held.clear()

    def _compare(self, tensors: Iterable[Named]) -> list[Named] | None:
        """Take over new values; what changed as the tensors of a link, None where a snapshot is due."""
        limit = self._limit()
        before, self._held = self._held, {}
        changes: list[Change] = []
        gaps: list[np.ndarray] = []
        values: list[np.ndarray] = []
        size = 0
        entries: list[TensorEntry] = []
        for name, tensor in tensors:
            shape, dtype = tuple(tensor.shape), dtype_name(name, tensor)
            words = np.frombuffer(tensor_bytes(tensor), WORDS[tensor.element_size()])
            entries.append(TensorEntry(name, dtype, shape, 0, 0, words.nbytes))
            held = before.pop(name, None)
            if held is None or held.dtype != words.dtype or len(held) != len(words):
                self._held[name], limit = words.copy(), None
                continue
            self._held[name] = held
            if limit is not None and size <= limit and (found := find_changes(held, words)) is not None:
                gap, value = found
                gap_bytes = None if gap is None else len(gap)
                changes.append(Change(self._index[name], gap_bytes, value.nbytes, zlib.crc32(words.data)))
                gaps += [] if gap is None else [gap]
                values.append(value.view(np.uint8))
                size += value.nbytes + (gap_bytes or 0)
            np.copyto(held, words)
        is_other, self._own = tuple(entries) != self._own, tuple(entries)
        told = self._ranks.gather((secrets.token_hex(4), is_other, size))
        if any(is_other for _, is_other, _ in told):
            self._chain_id, limit = told[0][0], None
        if limit is None or sum(size for _, _, size in told) > limit:
            return None
        if not entries:
            return []
        table = msgspec.msgpack.encode(Table(self._links[-1].version, tuple(changes)))
        rank = self._ranks.rank
        return [
            (f"table {rank}", torch.frombuffer(bytearray(table), dtype=torch.uint8)),
            (f"gaps {rank}", _bytes_tensor(gaps)),
            (f"values {rank}", _bytes_tensor(values)),
        ]

    def _limit(self) -> int | None:
        """Bytes from which on changes are not worth their while; None where only a snapshot will do."""
        if not self._links or len(self._links) > self._cfg.max_links:
            return None
        full = sum(entry.num_bytes for entry in self._entries)
        return int(full * self._cfg.max_ratio) - self._changed_bytes


def find_changes(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray | None, np.ndarray] | None:
    """(gaps, changed words) between two arrays of words; (None, all words) where that is smaller; None: equal."""
    most = after.nbytes // (after.itemsize + 1)
    positions: list[np.ndarray] = []
    count = 0
    for start in range(0, len(after), BLOCK):
        block = np.flatnonzero(before[start : start + BLOCK] != after[start : start + BLOCK])
        count += len(block)
        if count > most:
            return None, after.copy()
        positions.append(block + start)
    if not count:
        return None
    found = np.concatenate(positions)
    gaps = encode_gaps(found)
    if len(gaps) + count * after.itemsize >= after.nbytes:
        return None, after.copy()
    return gaps, after[found]


def encode_gaps(positions: np.ndarray) -> np.ndarray:
    """Rising positions as bytes, about one each."""
    gaps = np.diff(positions, prepend=-1) - 1
    more, rest = np.divmod(gaps, 255)
    ends = np.cumsum(more + 1) - 1
    encoded = np.full(ends[-1] + 1 if len(ends) else 0, 255, np.uint8)
    encoded[ends] = rest
    return encoded


def decode_gaps(encoded: np.ndarray) -> np.ndarray:
    """int64 positions."""
    at = np.cumsum(encoded, dtype=np.int64)[encoded != 255]
    return at + np.arange(len(at))


def _bytes_tensor(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.uint8))


# -- an engine's end --


class DeltaReceived:
    """Iterable of (name, tensor) of one version, over this host's copy, which is first brought to that version.

    The tensors are valid until the context is left: copy what shall stay. Raises: WireError when a link cannot be
    read, or the copy is not what it should be even when it is written anew.
    """

    def __init__(
        self, manifest: WeightManifest, group: WeightGroup | None, worker: int, receive: Receive
    ) -> None:
        self.manifest = manifest
        chain = msgspec.json.decode(manifest.location, type=Chain)
        first = msgspec.structs.replace(chain.links[0], tensors=manifest.tensors)
        self._links = (first, *chain.links[1:])
        sizes = (entry.num_bytes + -entry.num_bytes % ALIGN for entry in manifest.tensors)
        *self._offsets, num_bytes = accumulate(sizes, initial=0)
        self._group = group if manifest.needs_group else None
        self._worker, self._receive = worker, receive
        self._copy: HostCopy = copy_of(Path(chain.directory), chain.run, chain.id, num_bytes)
        self._snapshot: Snapshot = self._bring()

    def __iter__(self) -> Iterator[Named]:
        for entry, offset in zip(self.manifest.tensors, self._offsets):
            yield entry.name, tensor_over(self._snapshot.map, entry, HEAD_BYTES + offset)

    def __enter__(self) -> DeltaReceived:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._snapshot.close()

    def check_unchanged(self) -> None:
        """Writers wait until this is closed."""

    def _bring(self) -> Snapshot:
        """Bring the copy to the version: with what it lacks, and if that fails with all links from the snapshot."""
        version = self.manifest.version
        problem: WireError | None = None
        for attempt in range(2):
            held = self._copy.version if attempt == 0 else None
            start = self._agree(f"held {attempt}", NOTHING if held is None else held)
            snapshot = None
            try:
                self._apply_since(start, attempt)
                snapshot = self._copy.read(version)
            except Mismatch as error:
                problem = error
            except WireError as error:
                if self._group is not None:
                    raise  # a broadcast is broken for all who take part
                problem = error
            if self._agree(f"holds {attempt}", 0 if snapshot is None else 1):
                assert snapshot is not None
                return snapshot
            if snapshot is not None:
                snapshot.close()
            if attempt == 0 and start != NOTHING:
                logger.warning("version %d from %d: %s Starting from the snapshot.", version, start, problem)
        raise problem or WireError(f"another receiver of version {version} could not bring its copy to it")

    def _agree(self, word: str, value: int) -> int:
        """The least of all who receive together; alone: the value."""
        if self._group is None:
            return value
        return agree(self._links[-1], self._group, self._worker, word, value)

    def _apply_since(self, start: int, attempt: int) -> None:
        """Receive the links after a version, and apply those that the copy lacks.

        In a broadcast all receivers take all links, also those whose copy another process writes, or is spoilt.
        """
        is_link = any(link.version == start for link in self._links)
        problem: Mismatch | None = None
        with self._copy.writing() as writer:
            if self._group is None and writer is None:
                return  # another process of this host does it for both
            for link in self._links:
                if is_link and link.version <= start:
                    continue
                group = self._group
                if group is not None:
                    request = f"{group.request}-{attempt}-{link.version}"
                    group = msgspec.structs.replace(group, request=request)
                with self._receive(link, group) as tensors:
                    held = NOTHING if writer is None or writer.version is None else writer.version
                    is_lacked = held < link.version or (attempt == 1 and link is self._links[0])
                    if writer is not None and problem is None and is_lacked:
                        try:
                            self._apply(link, tensors, writer)
                        except Mismatch as error:
                            problem = error
                    else:
                        for _ in tensors:
                            pass
        if problem is not None:
            raise problem

    def _apply(self, link: WeightManifest, tensors: Iterable[Named], writer: Writer) -> None:
        held = writer.version
        writer.begin()
        if link is self._links[0]:
            index = {entry.name: i for i, entry in enumerate(self.manifest.tensors)}
            for name, tensor in tensors:
                self._words(writer, index[name])[:] = _words_of(tensor)
        else:
            found = {name: np.frombuffer(tensor_bytes(tensor), np.uint8) for name, tensor in tensors}
            for rank in sorted(name.removeprefix("table ") for name in found if name.startswith("table ")):
                table = msgspec.msgpack.decode(found[f"table {rank}"].data, type=Table)
                self._change(link, held, table, found[f"gaps {rank}"], found[f"values {rank}"], writer)
        writer.finish(link.version)

    def _change(
        self,
        link: WeightManifest,
        held: int | None,
        table: Table,
        gaps: np.ndarray,
        values: np.ndarray,
        writer: Writer,
    ) -> None:
        if held != table.base:
            raise Mismatch(
                f"version {link.version} changes version {table.base}, and this host holds {held}."
            )
        gap_at = value_at = 0
        for change in table.changes:
            words = self._words(writer, change.index)
            value = values[value_at : value_at + change.value_bytes].view(words.dtype)
            value_at += change.value_bytes
            if change.gap_bytes is None:
                words[:] = value
            else:
                words[decode_gaps(gaps[gap_at : gap_at + change.gap_bytes])] = value
                gap_at += change.gap_bytes
            if (found := zlib.crc32(words.data)) != change.checksum:
                name = self.manifest.tensors[change.index].name
                raise Mismatch(
                    f"{name} has the checksum {found:#010x} with the changes of version {link.version}, and "
                    f"{change.checksum:#010x} at the trainer."
                )

    def _words(self, writer: Writer, index: int) -> np.ndarray:
        """The bytes of a tensor in the copy, to be written."""
        entry, at = self.manifest.tensors[index], self._offsets[index]
        count = max(1, int(np.prod(entry.shape)))
        return writer.tensors[at : at + entry.num_bytes].view(WORDS[max(1, entry.num_bytes // count)])


class Mismatch(WireError):
    """The copy on this host is not what the trainer took it for."""


def _words_of(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(tensor_bytes(tensor), WORDS[tensor.element_size()])
