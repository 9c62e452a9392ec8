"""Weights by broadcast: every trainer rank sends the tensors it owns to all engines at once, without shared files.

The trainer's first rank runs a TCP store. Publishing copies the tensors into buckets (whole tensors, up to
bucket_bytes) and returns; a thread sends them when engines request them, while the next step is trained. Engines
receive as a WeightGroup, which the orchestrator makes: the processes that receive together, and their ranks. For each
trainer rank t that has something to send:

    first receiver  board: request/<t>/<n> = {version, epoch, request, world_size}
    sender t        board: answer/<t>/<request> = "go", or the reason for an error
    all             one process group of the sender (rank 0) and the receivers (1 ...), reused during the epoch;
                    one broadcast per bucket, then one of the buckets' checksums (on CPUs)

Receivers take one bucket of each sender in turn and start to receive the next ones early, so that several senders work
at the same time. gloo on CPUs, NCCL on GPUs. Receivers wait for each other at the board (join/<request>/<rank>) before
they enter a group. If one process dies, the update fails for all within timeout_s, and the orchestrator makes another
group without it.

The store listens at `host` only. It accepts any connection, so every message on the board is signed with a key that is
new for each publisher and is sent only in manifests: messages of outsiders are not trusted. The process groups (gloo,
NCCL) have no authentication: use them in private networks only. Messages are deleted when all have read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import logging
import secrets
import socket
import threading
import time
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
from stretto.transports.weights.checksum import KIND, check_kind, checksum_of_bytes
from stretto.transports.weights.layout import (
    ONE_RANK,
    Bucket,
    NamedTensor,
    Ranks,
    RankShards,
    buckets_of,
    dtype_name,
    group_into_buckets,
    merge_shards,
    padded,
    tensors_of,
)

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=365)
CLOSE = "close"
RETRY_S = 0.2
FORGED_PAUSE_S = 0.1
"""Pause after a message with a wrong signature, which limits the work that an outsider can cause."""
NUM_AHEAD = 4
"""Buckets that a receiver receives while it loads one, from as many senders if there are that many."""


class SendRequest(msgspec.Struct, frozen=True):
    """Request of a group's first receiver to a sender."""

    version: int
    epoch: str
    request: str
    world_size: int


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
        key = ranks.gather(secrets.token_hex(32))[0]
        open_store = _create_store if self._rank == 0 else _connect_store
        store = open_store(host, port, timeout_s)
        self._board = Board(store, key)
        self._location = Location(host, store.port, bucket_bytes, timeout_s, key)
        self._buckets: dict[int, list[torch.Tensor]] = {}  # by version
        self._free_buckets: list[list[torch.Tensor]] = []  # of a released version, to be reused
        self._lock = threading.Lock()
        self._groups = ProcessGroups()
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
        merged = merge_shards(self._ranks.gather(RankShards((f"rank {self._rank}",), (), tuple(entries))))
        return WeightManifest(
            version=version,
            transport="collective",
            location=msgspec.json.encode(self._location).decode(),
            shards=merged.shards,
            tensors=merged.tensors,
            checksum=0,
            checksum_kind=KIND,
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
            store = _connect_store(location.host, location.port, RETRY_S)
            Board(store, location.key).send_request(self._rank, CLOSE)
        self._thread.join(timeout=5.0)
        self._groups.close()
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
            except Exception as error:  # the store is gone, and with it the first rank
                if not self._is_closed.is_set():
                    logger.info("the weight store is gone: %s", str(error).splitlines()[0])
                return
            if message == CLOSE:
                return
            count += 1
            request = msgspec.json.decode(message, type=SendRequest)
            try:
                self._send(request)
            except Exception as error:
                # The engines see the same failure, and the orchestrator decides which of them try again.
                logger.warning("version %d did not reach group %s: %s", request.version, request.epoch, error)
                self._groups.drop(request.epoch)

    def _send(self, request: SendRequest) -> None:
        answer = f"answer/{self._rank}/{request.request}"
        with self._lock:
            buffers = self._buckets.get(request.version)
        if buffers is None:
            versions = ", ".join(map(str, self._buckets)) or "none"
            self._board.set(answer, why := f"version {request.version} is no longer held, only {versions}")
            raise WireError(why)
        self._board.set(answer, "go")
        device = buffers[0].device if buffers else torch.device("cpu")
        group = self._groups.get(
            self._board.store, request.epoch, self._rank, 0, request.world_size + 1, device, self._timeout_s
        )
        started = time.perf_counter()
        for buffer in buffers:
            _broadcast(group, buffer).wait()
        if device.type == "cpu":
            _broadcast(group, _checksums(buffers)).wait()
        size = sum(map(len, buffers))
        logger.debug(
            "sent version=%d bytes=%d to %d in %.3fs",
            request.version,
            size,
            request.world_size,
            time.perf_counter() - started,
        )


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

_LOCAL_GROUPS_LOCK = threading.Lock()


class CollectiveReceiver:
    """Iterable of the (name, tensor) of one version, in order of arrival; iterate over it once.

    Tensors are views of a bucket, which lives as long as one of them. Iteration raises WireError if a sender refuses,
    dies, or sends damaged bytes.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        group: WeightGroup,
        worker: int = 0,
        device: torch.device | None = None,
    ) -> None:
        check_kind(manifest)
        self.manifest = manifest
        self._group, self._device = group, device or torch.device("cpu")
        self._rank = group.rank + worker
        self._location = msgspec.json.decode(manifest.location.encode(), type=Location)

    def __iter__(self) -> Iterator[NamedTensor]:
        board = _board_of(self._location)
        self._wait_for_receivers(board)
        senders = sorted({entry.shard for entry in self.manifest.tensors})
        if self._rank == 0:
            for sender in senders:
                request = SendRequest(
                    self.manifest.version, self._group.epoch, self._group.request, self._group.world_size
                )
                board.send_request(sender, msgspec.json.encode(request).decode())
        streams = {sender: self._stream(sender, board) for sender in senders}
        ahead: deque[tuple[_Stream, Bucket, torch.Tensor, Any]] = deque()
        for stream, bucket in _round_robin(streams):
            # The next buckets are received while one is loaded.
            with self._sender_errors(stream.sender):
                ahead.append((stream, bucket, *stream.start_receive(bucket)))
            if len(ahead) > NUM_AHEAD:
                yield from self._finish_receive(*ahead.popleft())
        while ahead:
            yield from self._finish_receive(*ahead.popleft())

    def _wait_for_receivers(self, board: Board) -> None:
        """Wait until all receivers of the group are ready."""
        what = f"weights of version {self.manifest.version}: receiver"
        board.exchange(
            f"join/{self._group.request}", self._rank, self._group.world_size, "here", what, self._location
        )

    def _stream(self, sender: int, board: Board) -> _Stream:
        """Wait for a sender's answer and enter a process group with it."""
        timeout_s, receivers = self._location.timeout_s, self._group
        with self._sender_errors(sender) as what:
            name = f"answer/{sender}/{receivers.request}"
            answer = board.wait(name, timeout_s, what)
            board.mark_read(name, receivers.world_size, [name])
            if answer != "go":
                raise WireError(f"{what}: {answer}.")
            group = _groups_of(self._location).get(
                board.store,
                receivers.epoch,
                sender,
                self._rank + 1,
                receivers.world_size + 1,
                self._device,
                timeout_s,
            )
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
        """Turn errors into a WireError that names the sender, and drop the groups of this epoch."""
        what = f"weights of version {self.manifest.version} from trainer rank {sender}"
        try:
            yield what
        except (WireError, RuntimeError, ValueError) as error:
            _groups_of(self._location).drop(self._group.epoch)
            if isinstance(error, WireError):
                raise
            raise WireError(f"{what}: {str(error).splitlines()[0]}") from error

    def __enter__(self) -> CollectiveReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def check_unchanged(self) -> None:
        """Nothing to check: buckets are copies, and their checksums were compared on arrival."""


class _Stream:
    """The buckets of one sender, in order, and their checksums (on CPUs)."""

    def __init__(self, sender: int, group: object, device: torch.device, buckets: list[Bucket]) -> None:
        self.sender, self.buckets = sender, buckets
        self._group, self._device = group, device
        self._checksums: list[int] = []

    def start_receive(self, bucket: Bucket) -> tuple[torch.Tensor, Any]:
        """Start to receive the next bucket; returns its buffer, and the work to wait for."""
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, _broadcast(self._group, buffer)

    def verify(self, buffer: torch.Tensor) -> bool:
        """Add a bucket; after the last one, whether the checksums of all are those of the sender."""
        if self._device.type != "cpu":
            return True
        self._checksums.append(checksum_of_bytes(buffer.numpy().data))
        if len(self._checksums) < len(self.buckets):
            return True
        sent = torch.zeros(len(self.buckets), dtype=torch.int64)
        _broadcast(self._group, sent).wait()
        return sent.tolist() == self._checksums


def _round_robin(streams: Mapping[int, _Stream]) -> Iterator[tuple[_Stream, Bucket]]:
    """One bucket of each sender, then the next of each: the same order on all receivers."""
    for row in itertools.zip_longest(*(stream.buckets for stream in streams.values())):
        yield from (pair for pair in zip(streams.values(), row) if pair[1] is not None)


def min_over_receivers(
    manifest: WeightManifest, group: WeightGroup, worker: int, topic: str, value: int
) -> int:
    """All-reduce: the smallest `value` of all receivers of a group, which all must call this.

    topic: distinguishes the calls of one update.

    Raises: WireError if a receiver does not call it in time.
    """
    location = msgspec.json.decode(manifest.location.encode(), type=Location)
    what = f"weights of version {manifest.version}: receiver"
    name, rank = f"min/{group.request}/{topic}", group.rank + worker
    values = _board_of(location).exchange(name, rank, group.world_size, str(value), what, location)
    return min(map(int, values))


# -- what both ends share --


class ProcessGroups:
    """The process groups of one end, by epoch and sender; a new epoch ends the older ones."""

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
    """A process group that torch does not register, so that an engine's own is not affected."""
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


def _create_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A store that listens at `host` only.

    TCPStore by itself would listen at all addresses of the machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family, backlog=1024) as listener:
            port = listener.getsockname()[1]
            return _open_store(host, port, timeout_s, master_listen_fd=listener.detach(), is_master=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise WireError(
            f"weight_broadcast: cannot listen at {host}:{port}: {str(error).splitlines()[0]}; the host must be "
            "an address of the trainer's first rank, and the port free there."
        ) from error


def _connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    try:
        return _open_store(host, port, timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise WireError(
            f"weight_broadcast: cannot connect to {host}:{port}: {str(error).splitlines()[0]}; trainer ranks and "
            "engines must be able to connect to that port of the trainer's first rank."
        ) from error


def _open_store(host: str, port: int, timeout_s: float, **master: Any) -> TCPStore:
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **master)


class Board:
    """Signed messages at a store, by name; only who has the key can make valid ones."""

    def __init__(self, store: TCPStore, key: str) -> None:
        self.store = store
        self._key = key.encode()

    def set(self, name: str, message: str) -> None:
        self.store.set(name, f"{self._sign(name, message)} {message}")

    def wait(self, name: str, timeout_s: float, what: str) -> str:
        """Wait for the message with this name; what: who sends it, for error messages.

        Raises: WireError if there is none in time, or its signature is wrong.
        """
        try:
            self.store.wait([name], timedelta(seconds=timeout_s))
        except Exception as error:
            raise WireError(f"{what}: no message in {timeout_s:g} s.") from error
        return self._verified(name, self.store.get(name), what)

    def pop(self, name: str) -> str:
        """Wait for a message as long as the store lives, delete it and return it.

        Raises: WireError if its signature is wrong. It is not deleted then: the real one might just replace it.
        """
        self.store.wait([name], FOREVER)
        message = self._verified(name, self.store.get(name), f"weight_broadcast: {name}")
        self.delete(name)
        return message

    def delete(self, name: str) -> None:
        self.store.delete_key(name)

    def send_request(self, sender: int, message: str) -> None:
        """Append a message to a sender's requests."""
        count = self.store.add(f"count/{sender}", 1) - 1
        self.set(f"request/{sender}/{count}", message)

    def exchange(
        self, name: str, rank: int, world_size: int, message: str, what: str, location: Location
    ) -> list[str]:
        """All-gather: the messages of all ranks of a group.

        Raises: WireError, `what` and the rank, if a rank sends none in time.
        """
        self.set(f"{name}/{rank}", message)
        timeout_s = location.timeout_s
        messages = [
            self.wait(f"{name}/{other}", timeout_s, f"{what} {other} of {world_size}")
            for other in range(world_size)
        ]
        self.mark_read(name, world_size, [f"{name}/{other}" for other in range(world_size)])
        return messages

    def mark_read(self, name: str, world_size: int, messages: Sequence[str]) -> None:
        """Record that one of world_size readers has read these messages; the last one deletes them."""
        if self.store.add(f"{name}/num_read", 1) == world_size:
            for each in (*messages, f"{name}/num_read"):
                self.delete(each)

    def _sign(self, name: str, message: str) -> str:
        return hmac.digest(self._key, f"{name} {message}".encode(), hashlib.sha256).hex()

    def _verified(self, name: str, text: bytes, what: str) -> str:
        signature, _, message = text.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(signature.encode(), self._sign(name, message).encode()):
            raise WireError(f"{what}: a message with a wrong signature, from outside this run.")
        return message


_boards: dict[tuple[str, int, str], Board] = {}
_groups: dict[tuple[str, int], ProcessGroups] = {}


def _board_of(location: Location) -> Board:
    """This process's board at a trainer's store; connects at the first call."""
    key = (location.host, location.port, location.key)
    with _LOCAL_GROUPS_LOCK:
        if key not in _boards:
            _boards[key] = Board(_connect_store(*key[:2], location.timeout_s), location.key)
        return _boards[key]


def _groups_of(location: Location) -> ProcessGroups:
    with _LOCAL_GROUPS_LOCK:
        return _groups.setdefault((location.host, location.port), ProcessGroups())


def close_all() -> None:
    """Close all groups and boards of this process: at its end, and in tests."""
    with _LOCAL_GROUPS_LOCK, contextlib.suppress(RuntimeError):
        _groups.clear()
        _boards.clear()
