"""Weights by broadcast: every trainer rank sends the tensors it owns to all engines at once, without shared files.

The trainer's first rank runs a TCP store. Publishing copies the tensors into buckets (whole tensors, up to
bucket_bytes) and returns; a thread sends them when engines request them, while the next step is trained. Engines
receive as a WeightGroup, which the orchestrator makes: the processes that receive together, and their ranks. For each
trainer rank t that has something to send:

    all receivers   board: join/<request>/<rank> = names of the process groups that they hold, by sender
    first receiver  board: request/<t>/<n> = {version, request, world_size, held}
    sender t        board: answer/<t>/<request> = {group}, the process group to enter, or {error}
    all             broadcasts from the sender (rank 0) to the receivers (1 ...): one per bucket, then one of the
                    buckets' checksums (on CPUs)

A process group is named after the request for which it was made. It is used again if the sender and all receivers hold
it, with the same ranks; otherwise all make a new one. A process gives it up during an update, so that a group in which
one process failed is never used again. A restarted process holds none, so that no process waits in a group with a dead
one. Engines recognise a restarted trainer by its key, and drop the groups and the connection of the dead one.

Receivers take one bucket of each sender in turn and start to receive the next ones early, so that several senders work
at the same time. gloo on CPUs, NCCL on GPUs. Receivers wait for each other at the board before they enter a group. If
one process dies in an update, it fails for all within timeout_s, and the orchestrator tries again without that process.

The store listens at `host` only. It accepts any connection, so messages at the board are signed (board.py). The process
groups (gloo, NCCL) have no authentication: use them in private networks only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import DistNetworkError, PrefixStore, TCPStore

from stretto.base.errors import WireError
from stretto.config.sections.transport import CollectiveWeights
from stretto.records.weight_manifest import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights.checksum import check_kind, checksum_of_bytes
from stretto.transports.weights.layout import (
    ONE_RANK,
    Bucket,
    NamedTensor,
    Ranks,
    RankShards,
    Receiver,
    buckets_of,
    build_manifest,
    dtype_name,
    group_into_buckets,
    padded,
    tensors_of,
)
from stretto.transports.weights.store import connect_store, create_store, new_gloo_group, use_interface_to
from stretto_broadcast.board import Board

logger = logging.getLogger(__name__)

CLOSE = "close"
TITLE = "weight_broadcast"
RETRY_S = 0.2
FORGED_PAUSE_S = 0.1
"""Pause after a message with a wrong signature, which limits the work that an outsider can cause."""
NUM_AHEAD = 4
"""Buckets that a receiver receives while it loads one, from as many senders if there are that many."""


class SendRequest(msgspec.Struct, frozen=True):
    """Request of a group's first receiver to a sender."""

    version: int
    request: str
    world_size: int
    held: str | None  # name of the process group that all receivers hold; None if there is none


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer of a sender to all receivers."""

    group: str | None = None
    error: str | None = None


class Location(msgspec.Struct, frozen=True):
    """`location` of a manifest: where the store is, and how tensors are grouped into buckets."""

    host: str
    port: int
    bucket_bytes: int
    timeout_s: float
    key: str


# -- the trainer's end --


class CollectivePublisher:
    """Sender of one trainer rank; the first rank's also runs the store, until it is closed."""

    def __init__(self, host: str, port: int, *, bucket_bytes: int, timeout_s: float, ranks: Ranks = ONE_RANK) -> None:
        self._ranks, self._rank = ranks, ranks.rank
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        key = ranks.gather(secrets.token_hex(32), str)[0]
        open_store = create_store if self._rank == 0 else connect_store
        store = open_store(host, port, timeout_s, TITLE)
        self._board = Board(store, key)
        if self._rank == 0:
            self._board.mark_own()
        self._location = Location(host, store.port, bucket_bytes, timeout_s, key)
        self._buckets: dict[int, list[torch.Tensor]] = {}  # by version
        self._free_buckets: list[list[torch.Tensor]] = []  # of a released version, to be reused
        self._lock = threading.Lock()
        self._group: HeldGroup | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        """Copy a version into buckets; the tensors may be changed afterwards."""
        free = self._pop_free_buckets()
        entries: list[TensorEntry] = []
        buffers: list[torch.Tensor] = []
        end = 0
        for bucket in group_into_buckets(tensors, self._bucket_bytes, lambda named: named[1].nbytes):
            begin = end
            for name, tensor in bucket:
                shape, dtype = tuple(tensor.shape), dtype_name(name, tensor)
                entries.append(TensorEntry(name, dtype, shape, 0, end, tensor.nbytes))
                end += padded(tensor.nbytes)
            buffers.append(_reuse_or_allocate(free, end - begin, bucket[0][1].device))
            _fill(buffers[-1], bucket)
        with self._lock:
            self._buckets[version] = buffers
        part = RankShards((f"rank {self._rank}",), (), tuple(entries))
        return build_manifest(
            self._ranks.gather(part, RankShards),
            version=version,
            transport="collective",
            location=msgspec.json.encode(self._location).decode(),
            needs_group=True,
        )

    def release(self, version: int) -> None:
        """Drop this version and older ones; engines request only newer ones."""
        with self._lock:
            for old in [each for each in self._buckets if each <= version]:
                self._free_buckets.append(self._buckets.pop(old))
            del self._free_buckets[:-1]

    def close(self) -> None:
        self._is_closed.set()
        # The thread waits in a call on its connection, which is blocked meanwhile: use another connection.
        with contextlib.suppress(WireError, RuntimeError):
            location = self._location
            store = connect_store(location.host, location.port, RETRY_S, TITLE)
            Board(store, location.key).send_request(self._rank, CLOSE)
        self._thread.join(timeout=5.0)
        self._group = None
        self._buckets.clear()

    def _pop_free_buckets(self) -> list[torch.Tensor]:
        """The buckets of a released version, to be reused."""
        with self._lock:
            return self._free_buckets.pop() if self._free_buckets else []

    def _serve(self) -> None:
        """Answer requests for versions, until this publisher is closed."""
        count, forged = 0, ""
        while not self._is_closed.is_set():
            name = f"request/{self._rank}/{count}"
            try:
                message = self._board.pop(name)
            except WireError as error:
                if forged != name:
                    logger.warning("%s It is ignored.", error)
                forged = name
                self._is_closed.wait(FORGED_PAUSE_S)
                continue
            except RuntimeError as error:  # the store is gone, and with it the first rank
                if not self._is_closed.is_set():
                    logger.info("the weight store is gone: %s", str(error).splitlines()[0])
                return
            if message == CLOSE:
                return
            count += 1
            request = msgspec.json.decode(message, type=SendRequest)
            try:
                self._send(request)
            # The engines see the same failure, and the orchestrator decides which of them try again.
            except (WireError, RuntimeError) as error:
                logger.warning("version %d did not reach its receivers: %s", request.version, error)
            except Exception:
                logger.exception("version %d did not reach its receivers", request.version)

    def _send(self, request: SendRequest) -> None:
        held, self._group = self._group, None
        with self._lock:
            buffers = self._buckets.get(request.version)
        if buffers is None:
            versions = ", ".join(map(str, self._buckets)) or "none"
            why = f"version {request.version} is no longer held, only {versions}"
            self._answer(request, Answer(error=why))
            raise WireError(why)
        name = request.held if held is not None and held.name == request.held else request.request
        self._answer(request, Answer(group=name))
        device = buffers[0].device if buffers else torch.device("cpu")
        store, size = self._board.store, request.world_size + 1
        held = _enter_group(held, name, store, self._rank, 0, size, device, self._timeout_s)
        group = held.process_group
        started = time.perf_counter()
        for buffer in buffers:
            _broadcast(group, buffer).wait()
        if device.type == "cpu":
            _broadcast(group, _checksums(buffers)).wait()
        self._group = held
        logger.debug(
            "sent version=%d bytes=%d to %d in %.3fs",
            request.version,
            sum(map(len, buffers)),
            request.world_size,
            time.perf_counter() - started,
        )

    def _answer(self, request: SendRequest, answer: Answer) -> None:
        text = msgspec.json.encode(answer).decode()
        self._board.set(f"answer/{self._rank}/{request.request}", text)


def _reuse_or_allocate(free: list[torch.Tensor], size: int, device: torch.device) -> torch.Tensor:
    """A buffer of this size: a free one if there is one, else a new one."""
    for index, buffer in enumerate(free):
        if len(buffer) == size and buffer.device == device:
            return free.pop(index)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _fill(buffer: torch.Tensor, tensors: Iterable[NamedTensor]) -> None:
    """Copy tensors into a bucket's buffer."""
    start = 0
    for _, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            buffer[start : start + flat.nbytes].copy_(flat.view(torch.uint8))
        start += padded(flat.nbytes)


def _checksums(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([checksum_of_bytes(buffer.numpy().data) for buffer in buffers], dtype=torch.int64)


# -- an engine's end --


class CollectiveReceiver(Receiver):
    """Tensors in order of arrival; iterate over it once.

    They are views of a bucket, which lives as long as one of them. Iteration raises WireError if a sender refuses,
    dies, or sends damaged bytes.
    """

    def __init__(
        self, manifest: WeightManifest, group: WeightGroup, worker: int = 0, device: torch.device | None = None
    ) -> None:
        check_kind(manifest)
        self.manifest = manifest
        self._group, self._device = group, device or torch.device("cpu")
        self._rank = group.rank + worker
        self._location = msgspec.json.decode(manifest.location.encode(), type=Location)

    def __iter__(self) -> Iterator[NamedTensor]:
        with _connected(self._location) as trainer:
            board, held = trainer.board, trainer.groups
            trainer.groups = {}
            all_held = self._wait_for_receivers(board, held)
            senders = sorted({entry.shard for entry in self.manifest.tensors})
            if self._rank == 0:
                for sender in senders:
                    self._request(board, sender, all_held.get(sender))
            streams = {sender: self._stream(sender, board, held.get(sender)) for sender in senders}
            ahead: deque[tuple[_Stream, Bucket, torch.Tensor, Any]] = deque()
            for stream, bucket in _round_robin(streams):
                # The next buckets are received while one is loaded.
                with self._sender_errors(stream.sender):
                    ahead.append((stream, bucket, *stream.start_receive(bucket)))
                if len(ahead) > NUM_AHEAD:
                    yield from self._finish_receive(*ahead.popleft())
            while ahead:
                yield from self._finish_receive(*ahead.popleft())
            trainer.groups = held | {sender: stream.group for sender, stream in streams.items()}

    def _wait_for_receivers(self, board: Board, held: Mapping[int, HeldGroup]) -> dict[int, str]:
        """Wait until all receivers are ready; returns the process groups that all of them hold, by sender."""
        ranks = self._rank + 1, self._group.world_size + 1
        names = {sender: group.name for sender, group in held.items() if (group.rank, group.size) == ranks}
        what = f"weights of version {self.manifest.version}: receiver"
        messages = board.exchange(
            f"join/{self._group.request}",
            self._rank,
            self._group.world_size,
            msgspec.json.encode(names).decode(),
            what,
            self._location.timeout_s,
        )
        others = [msgspec.json.decode(message, type=dict[int, str]) for message in messages]
        return {sender: name for sender, name in names.items() if all(o.get(sender) == name for o in others)}

    def _request(self, board: Board, sender: int, held: str | None) -> None:
        group = self._group
        request = SendRequest(self.manifest.version, group.request, group.world_size, held)
        board.send_request(sender, msgspec.json.encode(request).decode())

    def _stream(self, sender: int, board: Board, held: HeldGroup | None) -> _Stream:
        """Wait for a sender's answer and enter a process group with it."""
        timeout_s, world_size = self._location.timeout_s, self._group.world_size
        with self._sender_errors(sender) as what:
            name = f"answer/{sender}/{self._group.request}"
            answer = msgspec.json.decode(board.wait(name, timeout_s, what), type=Answer)
            board.mark_read(name, world_size, [name])
            if answer.group is None:
                raise WireError(f"{what}: {answer.error}.")
            rank, size = self._rank + 1, world_size + 1
            group = _enter_group(held, answer.group, board.store, sender, rank, size, self._device, timeout_s)
        buckets = buckets_of(self.manifest.tensors, sender, self._location.bucket_bytes)
        return _Stream(sender, group, self._device, buckets)

    def _finish_receive(
        self, stream: _Stream, bucket: Bucket, buffer: torch.Tensor, work: Any
    ) -> Iterator[NamedTensor]:
        """Wait for a bucket and yield its tensors."""
        with self._sender_errors(stream.sender) as what:
            work.wait()
            if not stream.verify(buffer):
                raise WireError(f"{what}: checksums differ; they were damaged on the way.")
        yield from tensors_of(bucket, buffer)

    @contextlib.contextmanager
    def _sender_errors(self, sender: int) -> Iterator[str]:
        """Turn errors into a WireError that names the sender, except those of the store."""
        what = f"weights of version {self.manifest.version} from trainer rank {sender}"
        try:
            yield what
        except (WireError, DistNetworkError):
            raise
        except (RuntimeError, ValueError) as error:
            raise WireError(f"{what}: {str(error).splitlines()[0]}") from error


class _Stream:
    """The buckets of one sender, in order, and their checksums (on CPUs)."""

    def __init__(self, sender: int, group: HeldGroup, device: torch.device, buckets: list[Bucket]) -> None:
        self.sender, self.group, self.buckets = sender, group, buckets
        self._device = device
        self._checksums: list[int] = []

    def start_receive(self, bucket: Bucket) -> tuple[torch.Tensor, Any]:
        """Start to receive the next bucket; returns its buffer, and the work to wait for."""
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, _broadcast(self.group.process_group, buffer)

    def verify(self, buffer: torch.Tensor) -> bool:
        """Add a bucket; after the last one, whether the checksums of all are those of the sender."""
        if self._device.type != "cpu":
            return True
        self._checksums.append(checksum_of_bytes(buffer.numpy().data))
        if len(self._checksums) < len(self.buckets):
            return True
        sent = torch.zeros(len(self.buckets), dtype=torch.int64)
        _broadcast(self.group.process_group, sent).wait()
        return sent.tolist() == self._checksums


def _round_robin(streams: Mapping[int, _Stream]) -> Iterator[tuple[_Stream, Bucket]]:
    """One bucket of each sender, then the next of each: the same order on all receivers."""
    for row in itertools.zip_longest(*(stream.buckets for stream in streams.values())):
        yield from (pair for pair in zip(streams.values(), row) if pair[1] is not None)


def min_over_receivers(manifest: WeightManifest, group: WeightGroup, worker: int, topic: str, value: int) -> int:
    """All-reduce: the smallest `value` of all receivers of a group, which all must call this.

    topic: distinguishes the calls of one update.

    Raises: WireError if a receiver does not call it in time.
    """
    location = msgspec.json.decode(manifest.location.encode(), type=Location)
    what = f"weights of version {manifest.version}: receiver"
    name, rank = f"min/{group.request}/{topic}", group.rank + worker
    with _connected(location) as trainer:
        values = trainer.board.exchange(name, rank, group.world_size, str(value), what, location.timeout_s)
    return min(map(int, values))


# -- what both ends share --


@dataclass(frozen=True)
class HeldGroup:
    """A process group that this process holds after an update, until the next one begins."""

    name: str
    rank: int
    size: int
    process_group: object


def _enter_group(
    held: HeldGroup | None,
    name: str,
    store: TCPStore,
    sender: int,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
) -> HeldGroup:
    """The held process group if it has this name, else a new one."""
    if held is not None and held.name == name:
        return held
    return HeldGroup(name, rank, size, _new_group(store, f"group/{sender}/{name}", rank, size, device, timeout_s))


def _new_group(store: TCPStore, prefix: str, rank: int, size: int, device: torch.device, timeout_s: float) -> object:
    """A process group that torch does not register, so that an engine's own is not affected."""
    if device.type != "cuda":
        return new_gloo_group(store, prefix, rank, size, timeout_s)
    from torch.distributed import ProcessGroupNCCL

    use_interface_to(store.host)
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(PrefixStore(prefix, store), rank, size, options)


def _broadcast(group: object, tensor: torch.Tensor) -> Any:
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)  # type: ignore[attr-defined]


class Connection:
    """This process's connection to a publisher, and the process groups that it holds, by sender."""

    def __init__(self, location: Location) -> None:
        store = connect_store(location.host, location.port, location.timeout_s, TITLE)
        self.key, self.board = location.key, Board(store, location.key)
        self.groups: dict[int, HeldGroup] = {}
        if not self.board.is_own():
            raise WireError(
                f"{TITLE}: the trainer at {location.host}:{location.port} is not the one that published this version; "
                "it was restarted since then, and publishes again."
            )


_connections: dict[tuple[str, int], Connection] = {}
_connections_lock = threading.Lock()


@contextlib.contextmanager
def _connected(location: Location) -> Iterator[Connection]:
    """This process's connection to a publisher; the next call connects again after an error, or if the key differs.

    Raises: WireError if the connection is lost.
    """
    address = location.host, location.port
    with _connections_lock:
        connection = _connections.get(address)
        if connection is None or connection.key != location.key:
            connection = _connections[address] = Connection(location)
    try:
        yield connection
    except BaseException as error:
        with _connections_lock:
            if _connections.get(address) is connection:
                del _connections[address]
        if isinstance(error, DistNetworkError):
            raise WireError(f"{TITLE}: the trainer's store at {location.host}:{location.port} is gone.") from error
        raise


def close_all() -> None:
    """Close all connections of this process: at its end, and in tests."""
    with _connections_lock, contextlib.suppress(RuntimeError):
        _connections.clear()


def build_publisher(cfg: CollectiveWeights, ranks: Ranks) -> CollectivePublisher:
    """The publisher of a section."""
    return CollectivePublisher(
        cfg.host, cfg.port, bucket_bytes=cfg.bucket_bytes, timeout_s=cfg.join_timeout_s, ranks=ranks
    )


def build_receiver(
    manifest: WeightManifest, group: WeightGroup | None, worker: int, device: torch.device | None, receive: object
) -> CollectiveReceiver:
    """The receiver of a version; `receive` is for transports within others."""
    assert group is not None
    return CollectiveReceiver(manifest, group, worker, device)
