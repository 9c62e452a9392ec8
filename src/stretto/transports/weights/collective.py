"""Weights by broadcast: every trainer rank sends what it owns to all engines at once; no file system is shared.

The trainer's first rank holds a TCP store. Publishing copies the tensors into buckets (whole tensors, up to
bucket_bytes) and returns; a thread sends them when engines ask, while the next step is trained. Engines ask with
a WeightGroup, which the orchestrator made: who receives together, and as which rank. For each trainer rank t that has
something to send

    first receiver  store: request/<t>/<n> = {version, epoch, request, world_size}
    sender t        store: answer/<t>/<request> = "go", or why not
    all             one process group of sender (rank 0) and receivers (1 ...), kept for the epoch;
                    one broadcast a bucket, then one of the buckets' checksums (on CPUs)

Receivers take one bucket of each sender in turn, and have asked for those that come next, so that several senders are
at work. gloo on CPUs, NCCL on GPUs. Receivers wait for each other at the store (join/<request>/<rank>) before they
enter a group. A member that dies fails the update for everybody within timeout_s; the orchestrator then makes
another group without it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore

from stretto.base.errors import WireError
from stretto.records.weights import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights.layout import (
    ONE_RANK,
    Bucket,
    Named,
    Part,
    Ranks,
    buckets_of,
    dtype_name,
    joined,
    padded,
    tensors_of,
)

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=365)
CLOSE = "close"
RETRY_S = 0.2
AHEAD = 4
"""Buckets that a receiver has asked for beside the one that it loads; they come from as many senders, if there are."""


class Request(msgspec.Struct, frozen=True):
    """What the first receiver of a group asks a sender for."""

    version: int
    epoch: str
    request: str
    world_size: int


class Location(msgspec.Struct, frozen=True):
    """`location` of a manifest: where the store is, and how buckets are cut."""

    host: str
    port: int
    bucket_bytes: int
    timeout_s: float


# -- the trainer's end --


class CollectivePublisher:
    """One trainer rank's sender. The first rank's also holds the store, for as long as it is open."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        bucket_bytes: int,
        timeout_s: float,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._ranks, self._rank = ranks, ranks.rank
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._store = _open_store(host, port, timeout_s, is_master=self._rank == 0)
        self._location = Location(host, self._store.port, bucket_bytes, timeout_s)
        self._held: dict[int, list[torch.Tensor]] = {}
        self._spare: list[list[torch.Tensor]] = []
        self._lock = threading.Lock()
        self._groups = Groups()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Iterable[Named]) -> WeightManifest:
        """Copy a version into buckets; the tensors may be changed afterwards."""
        spare = self._take_spare()
        entries: list[TensorEntry] = []
        buffers: list[torch.Tensor] = []
        end = 0
        for some in _split(tensors, self._bucket_bytes):
            begin = end
            for name, tensor in some:
                shape, dtype = tuple(tensor.shape), dtype_name(name, tensor)
                entries.append(TensorEntry(name, dtype, shape, 0, end, tensor.nbytes))
                end += padded(tensor.nbytes)
            buffers.append(_space(spare, end - begin, some[0][1].device))
            _fill(buffers[-1], some)
        with self._lock:
            self._held[version] = buffers
        found = joined(self._ranks.gather(Part((f"rank {self._rank}",), (), tuple(entries))))
        return WeightManifest(
            version=version,
            transport="collective",
            location=msgspec.json.encode(self._location).decode(),
            shards=found.shards,
            tensors=found.tensors,
            checksum=0,
            needs_group=True,
        )

    def release(self, version: int) -> None:
        """Older versions are not asked for again; this one's successor may be, by an engine that comes back."""
        with self._lock:
            for old in [held for held in self._held if held <= version]:
                self._spare.append(self._held.pop(old))
            del self._spare[:-1]

    def close(self) -> None:
        self._is_closed.set()
        # The thread waits in its own connection, which nobody else can use meanwhile.
        with contextlib.suppress(WireError, RuntimeError):
            location = self._location
            store = _open_store(location.host, location.port, RETRY_S, is_master=False)
            _ask_for(store, self._rank, CLOSE)
        self._thread.join(timeout=5.0)
        self._groups.close()
        self._held.clear()

    def _take_spare(self) -> list[torch.Tensor]:
        """The buckets of a released version."""
        with self._lock:
            return self._spare.pop() if self._spare else []

    def _serve(self) -> None:
        count = 0
        while not self._is_closed.is_set():
            key = f"request/{self._rank}/{count}"
            try:
                self._store.wait([key], FOREVER)
                asked = self._store.get(key)
            except Exception as error:  # the store is gone, and with it the first rank
                if not self._is_closed.is_set():
                    logger.info("the weight store is gone: %s", str(error).splitlines()[0])
                return
            if asked.decode() == CLOSE:
                return
            count += 1
            wanted = msgspec.json.decode(asked, type=Request)
            try:
                self._send(wanted)
            except Exception as error:
                # Engines see the same failure at their end, and the orchestrator decides who asks again.
                logger.warning("version %d did not reach group %s: %s", wanted.version, wanted.epoch, error)
                self._groups.drop(wanted.epoch)

    def _send(self, wanted: Request) -> None:
        answer = f"answer/{self._rank}/{wanted.request}"
        with self._lock:
            buffers = self._held.get(wanted.version)
        if buffers is None:
            held = ", ".join(map(str, self._held)) or "none"
            self._store.set(answer, f"version {wanted.version} is no longer held, only {held}")
            return
        self._store.set(answer, "go")
        device = buffers[0].device if buffers else torch.device("cpu")
        group = self._groups.get(
            self._store, wanted.epoch, self._rank, 0, wanted.world_size + 1, device, self._timeout_s
        )
        started = time.perf_counter()
        for buffer in buffers:
            _broadcast(group, buffer).wait()
        if device.type == "cpu":
            _broadcast(group, _checksums(buffers)).wait()
        size = sum(map(len, buffers))
        logger.debug(
            "sent version=%d bytes=%d to %d in %.3fs",
            wanted.version,
            size,
            wanted.world_size,
            time.perf_counter() - started,
        )


def _split(tensors: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """The tensors of each bucket, cut as layout.buckets_of cuts them."""
    some: list[Named] = []
    size = 0
    for name, tensor in tensors:
        needed = padded(tensor.nbytes)
        if some and size + needed > bucket_bytes:
            yield some
            some, size = [], 0
        some.append((name, tensor))
        size += needed
    if some:
        yield some


def _space(spare: list[torch.Tensor], size: int, device: torch.device) -> torch.Tensor:
    """A bucket of a version that was released where there is one like it, else a new one."""
    for index, buffer in enumerate(spare):
        if len(buffer) == size and buffer.device == device:
            return spare.pop(index)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _fill(buffer: torch.Tensor, tensors: Iterable[Named]) -> None:
    at = 0
    for _, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            buffer[at : at + flat.nbytes].copy_(flat.view(torch.uint8))
        at += padded(flat.nbytes)


def _checksums(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([zlib.crc32(buffer.numpy().data) for buffer in buffers], dtype=torch.int64)


# -- an engine's end --

_LOCAL_GROUPS_LOCK = threading.Lock()


class CollectiveReceived:
    """Iterable of (name, tensor) of one version, in the order they arrive; each pass may be made once.

    Tensors are views of a bucket, which lives as long as one of them. Raises: WireError when a sender refuses,
    dies, or sends damaged bytes.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        group: WeightGroup,
        worker: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.manifest = manifest
        self._group, self._device = group, device or torch.device("cpu")
        self._rank = group.rank + worker
        self._location = msgspec.json.decode(manifest.location.encode(), type=Location)

    def __iter__(self) -> Iterator[Named]:
        store = _store_of(self._location)
        self._join(store)
        senders = sorted({entry.shard for entry in self.manifest.tensors})
        if self._rank == 0:
            for sender in senders:
                wanted = Request(
                    self.manifest.version, self._group.epoch, self._group.request, self._group.world_size
                )
                _ask_for(store, sender, msgspec.json.encode(wanted).decode())
        streams = {sender: self._stream(sender, store) for sender in senders}
        ahead: deque[tuple[_Stream, Bucket, torch.Tensor, Any]] = deque()
        for stream, bucket in _in_turn(streams):
            # The next buckets travel while one is loaded.
            with self._failing(stream.sender):
                ahead.append((stream, bucket, *stream.ask(bucket)))
            if len(ahead) > AHEAD:
                yield from self._take(*ahead.popleft())
        while ahead:
            yield from self._take(*ahead.popleft())

    def _join(self, store: TCPStore) -> None:
        """Return when all receivers of the group are here."""
        group = self._group
        store.set(f"join/{group.request}/{self._rank}", "here")
        for rank in range(group.world_size):
            what = f"weights of version {self.manifest.version}: receiver {rank} of {group.world_size}"
            _wait(store, f"join/{group.request}/{rank}", self._location.timeout_s, what)

    def _stream(self, sender: int, store: TCPStore) -> _Stream:
        """What a sender that is ready will send."""
        timeout_s, asked = self._location.timeout_s, self._group
        with self._failing(sender) as what:
            answer = _wait(store, f"answer/{sender}/{asked.request}", timeout_s, what)
            if answer != "go":
                raise WireError(f"{what}: {answer}.")
            group = _groups_of(self._location).get(
                store, asked.epoch, sender, self._rank + 1, asked.world_size + 1, self._device, timeout_s
            )
        buckets = buckets_of(self.manifest.tensors, sender, self._location.bucket_bytes)
        return _Stream(sender, group, self._device, buckets)

    def _take(self, stream: _Stream, bucket: Bucket, buffer: torch.Tensor, work: Any) -> Iterator[Named]:
        """The tensors of a bucket, when it is there."""
        with self._failing(stream.sender) as what:
            work.wait()
            if not stream.is_whole_with(buffer):
                raise WireError(f"{what}: checksums differ; they were damaged on the way.")
        yield from tensors_of(bucket, buffer)

    @contextlib.contextmanager
    def _failing(self, sender: int) -> Iterator[str]:
        """Names the sender in errors of its wire, after which nobody of this epoch can be received from."""
        what = f"weights of version {self.manifest.version} from trainer rank {sender}"
        try:
            yield what
        except (WireError, RuntimeError, ValueError) as error:
            _groups_of(self._location).drop(self._group.epoch)
            if isinstance(error, WireError):
                raise
            raise WireError(f"{what}: {str(error).splitlines()[0]}") from error

    def __enter__(self) -> CollectiveReceived:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def check_unchanged(self) -> None:
        """Buckets are copies of one version; their checksums were compared while they came."""


class _Stream:
    """One sender's buckets, from first to last, and their checksums (on CPUs)."""

    def __init__(self, sender: int, group: object, device: torch.device, buckets: list[Bucket]) -> None:
        self.sender, self.buckets = sender, buckets
        self._group, self._device = group, device
        self._crcs: list[int] = []

    def ask(self, bucket: Bucket) -> tuple[torch.Tensor, Any]:
        """Where the next bucket will be, and what to wait for."""
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, _broadcast(self._group, buffer)

    def is_whole_with(self, buffer: torch.Tensor) -> bool:
        """False when this was the last bucket, and they are not what was sent."""
        if self._device.type != "cpu":
            return True
        self._crcs.append(zlib.crc32(buffer.numpy().data))
        if len(self._crcs) < len(self.buckets):
            return True
        sent = torch.zeros(len(self.buckets), dtype=torch.int64)
        _broadcast(self._group, sent).wait()
        return sent.tolist() == self._crcs


def _in_turn(streams: Mapping[int, _Stream]) -> Iterator[tuple[_Stream, Bucket]]:
    """One bucket of each sender, then the next of each; the same order at all receivers."""
    for row in itertools.zip_longest(*(stream.buckets for stream in streams.values())):
        yield from (pair for pair in zip(streams.values(), row) if pair[1] is not None)


def agree(manifest: WeightManifest, group: WeightGroup, worker: int, word: str, value: int) -> int:
    """The least value that any receiver of a group says to `word`; all must call it.

    Raises: WireError when one says nothing in time.
    """
    location = msgspec.json.decode(manifest.location.encode(), type=Location)
    store = _store_of(location)
    key = f"agree/{group.request}/{word}"
    store.set(f"{key}/{group.rank + worker}", str(value))
    what = f"weights of version {manifest.version}: receiver"
    return min(
        int(_wait(store, f"{key}/{rank}", location.timeout_s, f"{what} {rank} of {group.world_size}"))
        for rank in range(group.world_size)
    )


# -- what both ends share --


class Groups:
    """Process groups of one end, by epoch and sender; an older epoch ends when a newer one begins."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], object] = {}

    def get(
        self,
        store: TCPStore,
        epoch: str,
        sender: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
    ) -> object:
        key = (epoch, sender)
        if key not in self._groups:
            for old in [k for k in self._groups if k[0] != epoch and k[1] == sender]:
                del self._groups[old]
            prefix = PrefixStore(f"group/{sender}/{epoch}", store)
            self._groups[key] = _new_group(prefix, rank, size, device, timeout_s)
        return self._groups[key]

    def drop(self, epoch: str) -> None:
        for key in [k for k in self._groups if k[0] == epoch]:
            del self._groups[key]

    def close(self) -> None:
        self._groups.clear()


def _new_group(store: PrefixStore, rank: int, size: int, device: torch.device, timeout_s: float) -> object:
    """A process group outside of torch's world of groups, so that the one an engine has is not touched."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout)


def _broadcast(group: object, tensor: torch.Tensor):
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)  # type: ignore[attr-defined]


def _open_store(host: str, port: int, timeout_s: float, *, is_master: bool) -> TCPStore:
    try:
        return TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except Exception as error:
        what = "hold" if is_master else "reach"
        raise WireError(
            f"weight_broadcast: cannot {what} the store at {host}:{port}: {str(error).splitlines()[0]}; the port must "
            f"be free on the trainer's host and reachable from the engines."
        ) from error


def _ask_for(store: TCPStore, sender: int, what: str) -> None:
    count = store.add(f"count/{sender}", 1) - 1
    store.set(f"request/{sender}/{count}", what)


def _wait(store: TCPStore, key: str, timeout_s: float, what: str) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except Exception as error:
        raise WireError(f"{what}: no sign of life in {timeout_s:g} s.") from error
    return store.get(key).decode()


_stores: dict[tuple[str, int], TCPStore] = {}
_groups: dict[tuple[str, int], Groups] = {}


def _store_of(location: Location) -> TCPStore:
    """This process's connection to a trainer's store."""
    key = (location.host, location.port)
    with _LOCAL_GROUPS_LOCK:
        if key not in _stores:
            _stores[key] = _open_store(*key, location.timeout_s, is_master=False)
        return _stores[key]


def _groups_of(location: Location) -> Groups:
    with _LOCAL_GROUPS_LOCK:
        return _groups.setdefault((location.host, location.port), Groups())


def forget() -> None:
    """Leave all groups and stores: at the end of a process, and in tests."""
    with _LOCAL_GROUPS_LOCK, contextlib.suppress(RuntimeError):
        _groups.clear()
        _stores.clear()
