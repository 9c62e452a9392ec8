"""Weights by broadcast: every trainer rank sends the tensors it owns to all engines at once, without shared files.

The trainer's first rank runs a TCP store. Publishing copies the tensors, on CPUs into a file in memory, on GPUs into
buckets, and returns. Engines receive as a WeightGroup, which the orchestrator makes: the processes that receive
together, and their ranks. A receiver on a sender's machine maps its file, as shm.py does. To the others, which are
far, a thread sends buckets (whole tensors, up to bucket_bytes) when they request them, while the next step is trained.
For each trainer rank t that has something to send:

    all receivers  board: join/<request>/<rank> = the process groups that they hold, by sender, and who is near
    first far one  board: request/<t>/<n> = {version, request, world_size, held}
    sender t       board: answer/<t>/<request> = {group}, the process group to enter, or {error}
    all far ones   broadcasts from the sender (rank 0) to the receivers (1 ...): one per bucket

A process group is named after the request for which it was made. It is used again if the sender and all receivers hold
it, with the same ranks; otherwise all make a new one. A process gives it up during an update, so that a group in which
one process failed is never used again. A restarted process holds none, so that no process waits in a group with a dead
one. Engines recognise a restarted trainer by its key, and drop the groups and the connection of the dead one.

On CPUs (gloo) a far receiver has memory for a whole version, and verifies it before it hands out the first tensor. On
GPUs (NCCL) it takes one bucket of each sender in turn, starts to receive the next ones early, and has no checksums.
Receivers meet at the board before they enter a group. If one dies, the update fails for all within timeout_s.
The store listens at `host` only. It accepts any connection, so messages at the board are signed (board.py). The process
groups (gloo, NCCL) have no authentication: use them in private networks only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import DistNetworkError

from stretto.base.errors import EngineError, WireError
from stretto.config.sections.transport import CollectiveWeights
from stretto.records.weight_manifest import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights.checksum import Checksum, check_kind
from stretto.transports.weights.layout import (
    HEAD_BYTES,
    ONE_RANK,
    NamedTensor,
    Ranks,
    RankShards,
    Receiver,
    build_manifest,
    combine_checksums,
    dtype_name,
    padded,
    shard_head,
    tensor_over,
)
from stretto.transports.weights.shm import ShmFile, ShmReceiver
from stretto.transports.weights.store import connect_store, create_store
from stretto_broadcast.board import Board
from stretto_broadcast.buckets import Bucket, buckets_of, group_into_buckets, tensors_of
from stretto_broadcast.groups import Held, HeldGroup, broadcast, enter_group

logger = logging.getLogger(__name__)

CLOSE = "close"
TITLE = "weight_broadcast"
RETRY_S = 0.2
FORGED_PAUSE_S = 0.1
"""Pause after a message with a wrong signature, which limits the work that an outsider can cause."""
NUM_AHEAD = 4
"""Buckets that a receiver on a GPU receives while it loads one, from as many senders if there are that many."""


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


class Joined(msgspec.Struct, frozen=True):
    """What a receiver tells the others before an update."""

    held: dict[int, Held]  # by sender
    near: tuple[int, ...]  # senders whose files it maps


class Part(msgspec.Struct, frozen=True):
    """Where a sender on a CPU has its tensors: a file in memory, which processes of its machine can open."""

    pid: int
    fd: int
    name: str  # of the file; no other has it
    checksum: int

    @property
    def directory(self) -> Path:
        return Path(f"/proc/{self.pid}/fd")

    @property
    def is_near(self) -> bool:
        """Whether this process can open the file: it is on the same machine and in a PID namespace that shows it."""
        try:
            return os.readlink(self.directory / str(self.fd)) == f"/memfd:{self.name} (deleted)"
        except OSError:
            return False


class Location(msgspec.Struct, frozen=True):
    """`location` of a manifest: where the store is, and how tensors are grouped into buckets."""

    host: str
    port: int
    bucket_bytes: int
    timeout_s: float
    key: str
    parts: tuple[Part, ...] = ()  # by sender; none on GPUs


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
        self._buckets: dict[int, list[torch.Tensor]] = {}  # by version; on CPUs they are parts of its file
        self._files: list[ShmFile] = []  # on CPUs
        self._free_buckets: list[list[torch.Tensor]] = []  # on GPUs: of a released version, to be reused
        self._lock = threading.Lock()
        self._group: HeldGroup | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        """Copy a version; the tensors may be changed afterwards.

        Raises: EngineError if there is no memory for a copy.
        """
        rest = iter(tensors)
        first = next(rest, None)
        named = rest if first is None else itertools.chain([first], rest)
        is_on_cpu = first is None or first[1].device.type == "cpu"
        shards, part = self._write(version, named) if is_on_cpu else (self._fill_buckets(version, named), None)
        gathered = self._ranks.gather((shards, part), tuple[RankShards, Part | None])
        parts = tuple(part for _, part in gathered if part is not None)
        return build_manifest(
            [shards for shards, _ in gathered],
            version=version,
            transport="collective",
            location=msgspec.json.encode(msgspec.structs.replace(self._location, parts=parts)).decode(),
            needs_group=True,
        )

    def _write(self, version: int, tensors: Iterable[NamedTensor]) -> tuple[RankShards, Part]:
        """Copy tensors of a CPU into a file in memory, which buckets are parts of."""
        try:
            file = next((file for file in self._files if file.version is None), None)
            if file is None:
                name = f"stretto-{secrets.token_hex(16)}"
                file = ShmFile(os.memfd_create(name, os.MFD_CLOEXEC), Path(name))
                self._files.append(file)
            checksum, entries = file.write(version, tensors)
        except OSError as cause:
            raise EngineError(f"no memory for a copy of version {version}: {cause.strerror}.") from cause
        buckets = buckets_of(entries, 0, self._bucket_bytes)
        starts = [bucket.entries[0].offset for bucket in buckets]
        with self._lock:
            self._buckets[version] = [
                file.part(start, start + bucket.num_bytes) for start, bucket in zip(starts, buckets)
            ]
        part = Part(os.getpid(), file.fd, file.path.name, checksum)
        return RankShards((f"rank {self._rank}",), (checksum,), tuple(entries)), part

    def _fill_buckets(self, version: int, tensors: Iterable[NamedTensor]) -> RankShards:
        """Copy tensors of a GPU into buckets there."""
        with self._lock:
            free = self._free_buckets.pop() if self._free_buckets else []
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
        return RankShards((f"rank {self._rank}",), (), tuple(entries))

    def release(self, version: int) -> None:
        """Drop this version and older ones; engines request only newer ones."""
        with self._lock:
            released = [self._buckets.pop(old) for old in list(self._buckets) if old <= version]
            for file in self._files:
                if file.version is not None and file.version <= version:
                    file.version = None
            if not self._files:
                self._free_buckets = (self._free_buckets + released)[-1:]

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
        files, self._files = self._files, []
        for file in files:
            os.close(file.fd)

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
            except Exception:  # later versions may reach them
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
        held = enter_group(held, name, store, self._rank, 0, size, device, self._timeout_s)
        group = held.process_group
        started = time.perf_counter()
        for buffer in buffers:
            broadcast(group, buffer).wait()
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


# -- an engine's end --


class _GroupReceiver(Receiver):
    """What receivers on CPUs and on GPUs share: how they meet each other and the senders."""

    def __init__(self, manifest: WeightManifest, group: WeightGroup, worker: int, device: torch.device) -> None:
        check_kind(manifest)
        self.manifest = manifest
        self._group, self._device = group, device
        self._rank = group.rank + worker
        self._location = msgspec.json.decode(manifest.location.encode(), type=Location)
        self._senders = sorted({entry.shard for entry in manifest.tensors})
        self._near: tuple[int, ...] = ()

    def _join(self, board: Board, held: Mapping[int, HeldGroup]) -> list[Joined]:
        """Wait until all receivers are ready; returns what each of them says."""
        names = {sender: Held(group.name, group.rank, group.size) for sender, group in held.items()}
        messages = board.exchange(
            f"join/{self._group.request}",
            self._rank,
            self._group.world_size,
            msgspec.json.encode(Joined(names, self._near)).decode(),
            f"weights of version {self.manifest.version}: receiver",
            self._location.timeout_s,
        )
        return [msgspec.json.decode(message, type=Joined) for message in messages]

    def _enter(self, sender: int, board: Board, joined: Sequence[Joined], held: HeldGroup | None) -> HeldGroup:
        """Enter a process group with a sender and the receivers that are far from it."""
        far = [rank for rank, each in enumerate(joined) if sender not in each.near]
        rank, size = far.index(self._rank) + 1, len(far) + 1
        if rank == 1:
            places = [joined[each].held.get(sender) for each in far]
            first = places[0]
            is_held = first is not None and places == [Held(first.name, i, size) for i in range(1, size)]
            name = first.name if first is not None and is_held else None
            request = SendRequest(self.manifest.version, self._group.request, len(far), name)
            board.send_request(sender, msgspec.json.encode(request).decode())
        with self._sender_errors(sender) as what:
            name = f"answer/{sender}/{self._group.request}"
            answer = msgspec.json.decode(board.wait(name, self._location.timeout_s, what), type=Answer)
            board.mark_read(name, len(far), [name])
            if answer.group is None:
                raise WireError(f"{what}: {answer.error}.")
            timeout_s = self._location.timeout_s
            return enter_group(held, answer.group, board.store, sender, rank, size, self._device, timeout_s)

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


class HostReceiver(_GroupReceiver):
    """Receives on a CPU: all tensors are here and verified when it has been made.

    Raises: WireError if a sender refuses, dies, or sends damaged bytes.
    """

    def __init__(self, manifest: WeightManifest, group: WeightGroup, worker: int, device: torch.device) -> None:
        super().__init__(manifest, group, worker, device)
        parts = self._location.parts
        if self._senders and len(parts) < len(manifest.shards):
            raise WireError(
                f"weights of version {manifest.version} are sent from GPUs, or by a trainer of another version of "
                "stretto; this engine is on a CPU."
            )
        self._near = tuple(sender for sender in self._senders if parts[sender].is_near)
        self._maps: dict[int, ShmReceiver] = {}
        self._received: dict[int, torch.Tensor] = {}
        try:
            with _connected(self._location) as trainer:
                self._trainer, held, trainer.groups = trainer, trainer.groups, {}
                joined = self._join(trainer.board, held)
                far = [sender for sender in self._senders if sender not in self._near]
                entered = {s: self._enter(s, trainer.board, joined, held.get(s)) for s in far}
                works = {sender: self._start_receive(sender, entered[sender]) for sender in far}
                for sender in self._near:
                    self._maps[sender] = self._map(sender)
                for sender in far:
                    self._finish_receive(sender, works[sender])
                trainer.groups = held | entered
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[NamedTensor]:
        tensors = {sender: iter(mapped) for sender, mapped in self._maps.items()}
        buffers = {sender: buffer.numpy().data for sender, buffer in self._received.items()}
        for entry in self.manifest.tensors:
            if entry.shard in tensors:
                yield next(tensors[entry.shard])
            else:
                yield entry.name, tensor_over(buffers[entry.shard], entry, entry.offset - HEAD_BYTES)

    def check_unchanged(self) -> None:
        for mapped in self._maps.values():
            mapped.check_unchanged()

    def close(self) -> None:
        """Keep the memory for the next update: new memory costs more than a copy."""
        for mapped in self._maps.values():
            mapped.close()
        if self._received:
            self._trainer.memory.update(self._received)
        self._maps, self._received = {}, {}

    def _map(self, sender: int) -> ShmReceiver:
        """The tensors of a sender on this machine."""
        part = self._location.parts[sender]
        own = (msgspec.structs.replace(entry, shard=0) for entry in self.manifest.tensors if entry.shard == sender)
        mapped = WeightManifest(
            version=self.manifest.version, transport="shm",
            location=str(part.directory), shards=(str(part.fd),), tensors=tuple(own),
            checksum=combine_checksums([part.checksum]),
            checksum_kind=self.manifest.checksum_kind,
        )  # fmt: skip
        try:
            return ShmReceiver(mapped)
        except WireError as error:
            who = f"rank {sender} of the trainer, process {part.pid} of this machine, has ended, with its weights"
            raise error if part.is_near else WireError(f"{who}; its log says why, --resume continues the run") from None

    def _start_receive(self, sender: int, group: HeldGroup) -> list[tuple[torch.Tensor, Any]]:
        """Start to receive all buckets of a sender; returns their bytes, and the works to wait for."""
        buckets = buckets_of(self.manifest.tensors, sender, self._location.bucket_bytes)
        size = sum(bucket.num_bytes for bucket in buckets)
        memory = self._trainer.memory.pop(sender, None)
        if memory is None or memory.numel() != size:
            memory = torch.empty(size, dtype=torch.uint8)
        self._received[sender] = memory
        parts = memory.split([bucket.num_bytes for bucket in buckets])
        with self._sender_errors(sender):
            return [(part, broadcast(group.process_group, part)) for part in parts]

    def _finish_receive(self, sender: int, works: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """Wait for the buckets of a sender and verify them; each one while the next ones arrive."""
        checksum = Checksum()
        checksum.add(shard_head(self.manifest.version))
        with self._sender_errors(sender) as what:
            for part, work in works:
                work.wait()
                checksum.add(part.numpy().data)
            if checksum.value != self._location.parts[sender].checksum:
                raise WireError(f"{what}: checksums differ; they were damaged on the way.")


class DeviceReceiver(_GroupReceiver):
    """Receives on a GPU: tensors in order of arrival, without a second copy of the model; iterate over it once.

    They are views of a bucket, which lives as long as one of them. Iteration raises WireError if a sender refuses or
    dies.
    """

    has_arrived = False

    def __iter__(self) -> Iterator[NamedTensor]:
        with _connected(self._location) as trainer:
            held, trainer.groups = trainer.groups, {}
            joined = self._join(trainer.board, held)
            entered = {s: self._enter(s, trainer.board, joined, held.get(s)) for s in self._senders}
            ahead: deque[tuple[int, Bucket, torch.Tensor, Any]] = deque()
            for sender, bucket in _round_robin(self.manifest, self._senders, self._location.bucket_bytes):
                # The next buckets are received while one is loaded.
                buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
                with self._sender_errors(sender):
                    ahead.append((sender, bucket, buffer, broadcast(entered[sender].process_group, buffer)))
                if len(ahead) > NUM_AHEAD:
                    yield from self._finish_receive(*ahead.popleft())
            while ahead:
                yield from self._finish_receive(*ahead.popleft())
            trainer.groups = held | entered

    def _finish_receive(self, sender: int, bucket: Bucket, buffer: torch.Tensor, work: Any) -> Iterator[NamedTensor]:
        """Wait for a bucket and yield its tensors."""
        with self._sender_errors(sender):
            work.wait()
        yield from tensors_of(bucket, buffer)


def _round_robin(manifest: WeightManifest, senders: Iterable[int], bucket_bytes: int) -> Iterator[tuple[int, Bucket]]:
    """One bucket of each sender, then the next of each: the same order on all receivers."""
    buckets = {sender: buckets_of(manifest.tensors, sender, bucket_bytes) for sender in senders}
    for row in itertools.zip_longest(*buckets.values()):
        yield from ((sender, bucket) for sender, bucket in zip(buckets, row) if bucket is not None)


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


# -- an engine's connection --


class Connection:
    """This process's connection to a publisher, and the process groups and memory that it holds, by sender."""

    def __init__(self, location: Location) -> None:
        store = connect_store(location.host, location.port, location.timeout_s, TITLE)
        self.key, self.board = location.key, Board(store, location.key)
        self.groups: dict[int, HeldGroup] = {}
        self.memory: dict[int, torch.Tensor] = {}  # by sender: for the next version that comes from far
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


def build_publisher(cfg: CollectiveWeights, ranks: Ranks) -> CollectivePublisher:
    """The publisher of a section."""
    return CollectivePublisher(
        cfg.host, cfg.port, bucket_bytes=cfg.bucket_bytes, timeout_s=cfg.join_timeout_s, ranks=ranks
    )


def build_receiver(
    manifest: WeightManifest, group: WeightGroup | None, worker: int, device: torch.device | None, receive: object
) -> Receiver:
    """The receiver of a version; `receive` is for transports within others."""
    assert group is not None
    device = device or torch.device("cpu")
    kind = HostReceiver if device.type == "cpu" else DeviceReceiver
    return kind(manifest, group, worker, device)
