"""Weights by broadcast: bit for bit to every receiver, and an error for all where one is missing."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
import torch
from peers import Peer, peer
from ports import free_port
from pydantic import TypeAdapter
from torch.distributed import DistStoreError, TCPStore

from stretto.base.errors import WireError
from stretto.base.paths import RunDir
from stretto.config.sections.transport import (
    CollectiveWeights,
    DeltaSection,
    FilesystemWeights,
    ShmWeights,
    WeightBroadcast,
)
from stretto.records.weight_manifest import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights import receive
from stretto_broadcast import collective, host_copy
from stretto_broadcast.board import Board
from stretto_broadcast.buckets import buckets_of
from stretto_broadcast.collective import CollectivePublisher, Location, Part


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    return [
        ("fp32", torch.randn(160, 8, generator=gen)),
        ("bf16", torch.randn(5, 3, generator=gen).bfloat16()),
        ("fp8", torch.randn(9, generator=gen).to(torch.float8_e4m3fn)),
        ("scalar", torch.tensor(float(seed))),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.randn(6, 4, generator=gen).t()),
        ("flags", torch.randn(5, generator=gen) > 0),
        ("big", torch.randn(300, 30, generator=gen)),
    ]


@pytest.fixture(autouse=True)
def is_far(monkeypatch):
    """This process receives as if it were on another machine."""
    monkeypatch.setattr(Part, "is_near", False)


@pytest.fixture
def is_near(is_far, monkeypatch):
    """This process receives as on the machine that it is on."""
    monkeypatch.undo()


@pytest.fixture(params=[1, 1000, 1 << 30], ids=["a bucket per tensor", "some buckets", "one bucket"])
def publisher(request):
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=request.param, timeout_s=120)
    yield publisher
    publisher.close()
    collective._connections.clear()


def group(request: str, rank: int = 0, world_size: int = 1) -> WeightGroup:
    return WeightGroup(request=request, world_size=world_size, rank=rank)


def received(manifest: WeightManifest, who: WeightGroup) -> list[tuple[str, torch.Tensor]]:
    with receive(manifest, who) as tensors:
        return [(name, tensor.clone()) for name, tensor in tensors]


def assert_same(got, sent) -> None:
    assert [name for name, _ in got] == [name for name, _ in sent]
    for (name, a), (_, b) in zip(got, sent):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))


def test_every_kind_of_tensor_arrives_bit_for_bit_and_versions_follow_each_other(publisher):
    for version in range(4):
        sent = weights(version)
        manifest = publisher.publish(version, sent)
        assert_same(received(manifest, group(f"r{version}")), sent)
        publisher.release(version - 1)


def test_a_published_version_does_not_change_with_the_tensors(publisher):
    tensor = torch.ones(50)
    manifest = publisher.publish(1, [("a", tensor)])
    tensor.zero_()
    [(_, got)] = received(manifest, group("r"))
    assert got.eq(1).all()


def test_a_version_may_be_asked_for_again_until_it_is_released(publisher):
    sent = weights()
    manifest = publisher.publish(1, sent)
    assert_same(received(manifest, group("first")), sent)
    assert_same(received(manifest, group("second")), sent)
    publisher.publish(2, weights(2))
    publisher.release(1)
    with pytest.raises(WireError, match="version 1 is no longer held, only 2"):
        received(manifest, group("third"))


def test_without_a_group_nothing_is_received(publisher):
    with pytest.raises(WireError, match="names no group"):
        receive(publisher.publish(1, weights()))


RECEIVE = """
import sys, zlib
import msgspec, torch
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.transports.weights import receive
from stretto_broadcast.collective import Part
torch.set_num_threads(1)
if sys.argv[1] == "far":  # as on another machine
    Part.is_near = False
print("ready", flush=True)
for line in sys.stdin:
    manifest, group = msgspec.json.decode(line, type=tuple[WeightManifest, WeightGroup])
    crc = 0
    with receive(manifest, group) as tensors:
        for name, tensor in sorted(tensors):
            crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    print(crc, flush=True)
"""

SEND = """
import datetime, sys, zlib
import msgspec, torch
import torch.distributed as dist
from pathlib import Path
from stretto.base.paths import RunDir
from stretto.config.sections.transport import WeightBroadcast
from stretto.trainer.ranks import exchange
from stretto.transports.weights import build_publisher
from pydantic import TypeAdapter
from torch.distributed import DistStoreError, TCPStore
torch.set_num_threads(1)
rank, count, meeting, settings, place = sys.argv[1:]

class Ranks:
    rank, world_size = int(rank), int(count)
    def gather(self, value, kind):
        return exchange.gather(value, kind)

dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{meeting}", rank=int(rank), world_size=int(count),
    timeout=datetime.timedelta(seconds=30),
)
cfgs = TypeAdapter(list[WeightBroadcast]).validate_json(settings)
publishers = [build_publisher(cfg, RunDir(Path(f"{place}/{i}")), f"run {i}", Ranks()) for i, cfg in enumerate(cfgs)]
for line in sys.stdin:
    which, version, owned, released = msgspec.json.decode(line)
    publisher = publishers[which]
    gen = torch.Generator().manual_seed(5)
    # One element of each is new in every version.
    tensors = [(f"t{i}", torch.randn(40 + i, 30, generator=gen).bfloat16()) for i in range(12)]
    for _, tensor in tensors:
        tensor[3, 4] = version
    publisher.release(released)
    manifest = publisher.publish(version, (tensors[i] for i in owned))
    print(msgspec.json.encode(manifest).decode(), flush=True)
for publisher in publishers:
    publisher.close()
"""


@contextlib.contextmanager
def senders(cfgs: list[WeightBroadcast], place: Path, count: int = 2) -> Iterator[list[Peer]]:
    """Trainer ranks that publish t0 ... t11 of a version together, by any of these transports."""
    meeting, settings = free_port(), TypeAdapter(list[WeightBroadcast]).dump_json(cfgs).decode()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(peer(SEND, rank, count, meeting, settings, place)) for rank in range(count)]
    collective._connections.clear()
    host_copy.close_all()


def published(ranks: list[Peer], version: int, owned: list[list[int]], which: int = 0) -> WeightManifest:
    """The manifest that every rank returns."""
    for process, mine in zip(ranks, owned, strict=True):
        process.write_line(msgspec.json.encode((which, version, mine, version - 2)).decode())
    lines = [process.line() for process in ranks]
    assert len(set(lines)) == 1
    return msgspec.json.decode(lines[0], type=WeightManifest)


def the_tensors(version: int) -> dict[str, torch.Tensor]:
    """The tensors that the senders publish."""
    gen = torch.Generator().manual_seed(5)
    tensors = {f"t{i}": torch.randn(40 + i, 30, generator=gen).bfloat16() for i in range(12)}
    for tensor in tensors.values():
        tensor[3, 4] = version
    return tensors


def encoded(manifest: WeightManifest, who: WeightGroup) -> str:
    return msgspec.json.encode((manifest, who)).decode()


def test_processes_receive_together_and_one_that_dies_fails_the_rest():
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=1000, timeout_s=120)
    try:
        with peer(RECEIVE, "far") as first, peer(RECEIVE, "far") as second:
            assert first.line() == second.line() == "ready"
            for version in (1, 2):
                manifest = publisher.publish(version, weights(version))
                for rank, process in enumerate((first, second)):
                    process.write_line(encoded(manifest, group(f"r{version}", rank, 2)))
                crcs = {first.line(), second.line()}
                assert len(crcs) == 1
            second.kill()
            location = msgspec.json.decode(manifest.location.encode(), type=Location)
            location = msgspec.json.encode(msgspec.structs.replace(location, timeout_s=1.0)).decode()
            first.write_line(encoded(msgspec.structs.replace(manifest, location=location), group("r3", 0, 2)))
            with pytest.raises(AssertionError, match="WireError: weights of version 2: receiver 1 of 2"):
                first.line()
        with peer(RECEIVE, "far") as alone:
            assert alone.line() == "ready"
            alone.write_line(encoded(manifest, group("r4", 0, 1)))
            assert alone.line() in crcs
    finally:
        publisher.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(peer(RECEIVE, "far")) for _ in range(4)]
        assert [process.line() for process in processes] == ["ready"] * 4
        yield processes


def assert_received(receivers: list[Peer], manifest: WeightManifest) -> None:
    """An update with the_tensors, which succeeds at the first attempt."""
    request, crc = uuid4().hex, 0
    for rank, process in enumerate(receivers):
        process.write_line(encoded(manifest, group(request, rank, len(receivers))))
    for _, tensor in sorted(the_tensors(manifest.version).items()):
        crc = zlib.crc32(tensor.view(torch.uint8).numpy().tobytes(), crc)
    assert [process.line() for process in receivers] == [str(crc)] * len(receivers)


def test_engines_receive_at_once_from_a_trainer_that_was_killed_and_restarted(engines, tmp_path):
    cfg = CollectiveWeights(port=free_port(), bucket_bytes=5000, join_timeout_s=600)
    everything = [list(range(12))]
    with senders([cfg], tmp_path, 1) as ranks:
        for version in range(4):
            assert_received(engines[::2], old := published(ranks, version, everything))
        received(old, group("here"))
        ranks[0].kill()
        with pytest.raises(WireError, match=f"the trainer's store at 127.0.0.1:{cfg.port} is gone"):
            received(old, group("gone"))
    with senders([cfg], tmp_path, 1) as ranks:
        for version in (2, 3, 4):  # the newest checkpoint was that of version 2
            assert_received(engines[::2], published(ranks, version, everything))
            with pytest.raises(WireError, match="is not the one that published this version"):
                received(old, group("late"))


def test_an_engine_receives_with_the_others_at_once_though_it_was_restarted_or_has_another_rank(engines):
    """Nobody has noticed that it was killed: the one that follows it has its address and its rank."""
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=5000, timeout_s=600)
    a, b, c, after_b = engines
    try:
        for version, receivers in enumerate(([a, b], [b, a], [a], [a], [c, a, b], [c, b], [c, b])):
            assert_received(receivers, publisher.publish(version, the_tensors(version).items()))
        b.kill()
        for version in (7, 8):
            assert_received([c, after_b], publisher.publish(version, the_tensors(version).items()))
    finally:
        publisher.close()


def test_an_update_that_an_engine_breaks_off_leaves_nothing_for_the_next(publisher):
    sent = [(f"t{i}", torch.full((400,), float(i))) for i in range(20)]
    manifest = publisher.publish(1, sent)
    with receive(manifest, group("broken off")) as tensors:
        next(iter(tensors))
    assert_same(received(manifest, group("next")), sent)


TOGETHER = [
    CollectiveWeights(port=free_port(), bucket_bytes=5000),
    CollectiveWeights(port=free_port(), bucket_bytes=5000, delta=DeltaSection()),
    FilesystemWeights(),
    FilesystemWeights(delta=DeltaSection()),
    ShmWeights(),
    ShmWeights(delta=DeltaSection()),
]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory) -> Iterator[tuple[list[Peer], Path]]:
    place = tmp_path_factory.mktemp("runs")
    with senders(TOGETHER, place, 3) as ranks:
        yield ranks, place
        for process in ranks:
            process.end()


@pytest.mark.parametrize("which", range(len(TOGETHER)))
def test_what_several_ranks_publish_together_is_what_one_publishes(which, three_ranks):
    owned = [[0, 3, 4, 5, 11], [], [1, 2, 6, 7, 8, 9, 10]]
    (ranks, place), cfg = three_ranks, TOGETHER[which]
    sizes = []
    for version in range(3):
        manifest = published(ranks, version, owned, which)
        got = dict(received(manifest, group(f"r{version}")))
        want = the_tensors(version)
        assert got.keys() == want.keys() and len(manifest.tensors) == 12
        assert all(got[name].equal(tensor) for name, tensor in want.items())
        sizes.append(manifest.sent_bytes)
    assert (sizes[1] < sizes[0] / 10) == (cfg.delta is not None)
    if cfg.type == "filesystem":
        folder = RunDir(place / f"{which}").broadcasts
        names = {path.name for path in (folder / "version_2").iterdir()}
        assert names == {"manifest.json", "rank_0_shard_00000.safetensors", "rank_2_shard_00000.safetensors"}
        assert not list(folder.glob(".*"))


def test_a_rank_that_owns_more_than_before_starts_a_new_chain_of_changes(tmp_path):
    cfg = FilesystemWeights(delta=DeltaSection())
    with senders([cfg], tmp_path) as ranks:
        for version, first in enumerate((6, 6, 5, 5)):
            manifest = published(ranks, version, [list(range(first)), list(range(first, 12))])
            got = dict(received(manifest, group(f"r{version}")))
            assert all(got[name].equal(tensor) for name, tensor in the_tensors(version).items())
            assert (manifest.sent_bytes < 2000) == (version in (1, 3))


def test_buckets_of_all_senders_come_in_turn(tmp_path):
    cfg = CollectiveWeights(port=free_port(), bucket_bytes=1)
    with senders([cfg], tmp_path) as ranks:
        manifest = published(ranks, 0, [list(range(6)), list(range(6, 12))])
        with receive(manifest, group("r")) as tensors:
            order = [int(name.removeprefix("t")) // 6 for name, _ in tensors]
    assert order == [0, 1] * 6


@pytest.mark.parametrize("is_stopped", [False, True], ids=["dies", "is stuck"])
def test_a_sender_that_is_lost_on_the_way_fails_the_update_in_time(tmp_path, is_stopped, monkeypatch):
    cfg = CollectiveWeights(port=free_port(), bucket_bytes=5000, join_timeout_s=120)
    with senders([cfg], tmp_path) as ranks:
        owned = [list(range(6)), list(range(6, 12))]
        manifest = published(ranks, 0, owned)
        received(manifest, group("r0"))
        manifest = published(ranks, 1, owned)
        collective._connections.clear()  # so that it enters new groups
        enter = collective.enter_group

        def lose_and_enter(held, name, store, sender, *args):
            if sender == 1:
                ranks[1].process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
                *args, timeout_s = args
                assert timeout_s == cfg.join_timeout_s
                args.append(0.2)  # gloo tries five times
            return enter(held, name, store, sender, *args)

        monkeypatch.setattr(collective, "enter_group", lose_and_enter)
        with pytest.raises(WireError, match="version 1 from trainer rank 1"):
            receive(manifest, group("r1"))


def test_ranks_that_publish_with_one_that_died_end_with_an_error(tmp_path):
    with senders([FilesystemWeights()], tmp_path) as ranks:
        owned = [list(range(6)), list(range(6, 12))]
        published(ranks, 0, owned)
        ranks[1].kill()
        ranks[0].write_line(msgspec.json.encode((0, 1, owned[0], -1)).decode())
        with pytest.raises(AssertionError, match="RuntimeError"):
            ranks[0].line()


def test_a_taken_port_is_named(publisher):
    port = msgspec.json.decode(publisher.publish(0, []).location)["port"]
    with pytest.raises(WireError, match=f"cannot listen at 127.0.0.1:{port}"):
        CollectivePublisher("127.0.0.1", port, bucket_bytes=10, timeout_s=5)


def test_buckets_hold_whole_tensors_in_order():
    sizes = [100, 10, 300, 5, 5]
    entries = [TensorEntry(str(i), "uint8", (n,), i % 2, 0, n) for i, n in enumerate(sizes)]
    found = buckets_of(entries, 0, 200)
    assert [[entry.name for entry in bucket.entries] for bucket in found] == [["0"], ["2"], ["4"]]
    assert all(bucket.num_bytes % 64 == 0 for bucket in found)
    everything = [e.name for s in (0, 1) for b in buckets_of(entries, s, 1 << 20) for e in b.entries]
    assert sorted(everything) == [str(i) for i in range(5)]


def test_a_publisher_is_closed_while_nobody_asks(publisher):
    publisher.close()
    assert not any(thread.name == "weights" and thread.is_alive() for thread in threading.enumerate())


def store_of(manifest: WeightManifest) -> TCPStore:
    """The store, as an outsider who knows address and port reaches it."""
    location = msgspec.json.decode(manifest.location)
    return TCPStore(location["host"], location["port"], wait_for_workers=False, timeout=timedelta(seconds=60))


def test_what_an_outsider_writes_to_the_store_is_not_trusted(publisher):
    """Not even a message that was signed under another name."""
    sent = weights()
    manifest = publisher.publish(1, sent)
    store = store_of(manifest)
    store.set("request/0/0", "close")
    assert_same(received(manifest, group("r1")), sent)
    store.set("request/0/1", f"{'0' * 64} close")
    assert_same(received(manifest, group("r2")), sent)
    board = Board(store, msgspec.json.decode(manifest.location)["key"])
    board.set("request/0/9", "close")
    store.set("request/0/2", store.get("request/0/9"))
    assert_same(received(manifest, group("r3")), sent)
    store.set("answer/0/r4", "go")
    with pytest.raises(WireError, match="sender: a message with a wrong signature"):
        board.wait("answer/0/r4", 5, "sender")


def test_a_forged_message_stays_so_that_the_real_one_that_replaces_it_is_not_deleted(publisher):
    manifest = publisher.publish(1, [])
    board = Board(store_of(manifest), msgspec.json.decode(manifest.location)["key"])
    board.store.set("request/7/0", "close")
    with pytest.raises(WireError, match="request/7/0: a message with a wrong signature"):
        board.pop("request/7/0")
    assert board.store.check(["request/7/0"])
    board.set("request/7/0", "close")
    assert board.pop("request/7/0") == "close" and not board.store.check(["request/7/0"])


def test_the_store_listens_at_its_host_only(publisher):
    """Not at the other addresses of the machine, of which 127.0.0.2 is one."""
    port = msgspec.json.decode(publisher.publish(0, []).location)["port"]
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_messages_at_the_store_do_not_pile_up():
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=1000, timeout_s=120)
    store = None
    try:
        with peer(RECEIVE, "far") as first, peer(RECEIVE, "far") as second:
            assert first.line() == second.line() == "ready"
            counts = []
            for version in range(6):
                manifest = publisher.publish(version, weights(version))
                for rank, process in enumerate((first, second)):
                    process.write_line(encoded(manifest, group(f"r{version}", rank, 2)))
                assert first.line() == second.line()
                publisher.release(version - 1)
                store = store or store_of(manifest)
                counts.append(store.num_keys())
        assert counts[1:] == counts[:1] * 5
    finally:
        publisher.close()


# -- on the sender's machine --


def test_engines_of_the_senders_machine_map_its_memory_and_ask_it_for_nothing(tmp_path):
    cfg = CollectiveWeights(port=free_port(), bucket_bytes=5000)
    owned = [list(range(6)), list(range(6, 12))]
    with senders([cfg], tmp_path) as ranks, peer(RECEIVE, "near") as one, peer(RECEIVE, "near") as other:
        assert one.line() == other.line() == "ready"
        for version in range(4):
            manifest = published(ranks, version, owned)
            assert_received([one, other], manifest)
            store = store_of(manifest)
            assert not store.check(["count/0"]) and not store.check(["count/1"])


def test_near_and_far_engines_receive_a_version_together(tmp_path):
    cfg = CollectiveWeights(port=free_port(), bucket_bytes=5000)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(senders([cfg], tmp_path))
        where = ("near", "far", "near", "far")
        engines = [stack.enter_context(peer(RECEIVE, each)) for each in where]
        assert [process.line() for process in engines] == ["ready"] * 4
        order = (engines, engines, engines[::-1], engines[:2], engines)
        for version, receivers in enumerate(order):
            assert_received(receivers, published(ranks, version, [list(range(6)), list(range(6, 12))]))


def test_a_near_engine_sees_no_version_that_is_half_written(publisher, is_near):
    def fails():
        yield weights(2)[0]
        raise RuntimeError("out of memory")

    old, sent = publisher.publish(0, weights(0)), weights(1)
    manifest = publisher.publish(1, sent)
    publisher.release(0)
    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish(2, fails())
    with pytest.raises(WireError, match="incomplete version"):
        received(old, group("old"))
    assert_same(received(manifest, group("new")), sent)
    with pytest.raises(WireError, match="overwritten while they were read"), receive(manifest, group("read")):
        publisher.release(1)
        publisher.publish(3, sent)
        publisher.publish(4, sent)


@pytest.mark.parametrize("place", ["near", "far"])
def test_a_byte_that_was_damaged_is_noticed_before_a_tensor_is_handed_out(place, request):
    if place == "near":
        request.getfixturevalue("is_near")
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=1000, timeout_s=120)
    try:
        manifest = publisher.publish(1, weights())
        part = collective.HostReceiver(manifest, group("r"), 0, torch.device("cpu"))._location.parts[0]
        path = part.directory / str(part.fd)
        content = path.read_bytes()
        path.write_bytes(content[:-70] + bytes([content[-70] ^ 1]) + content[-69:])
        with pytest.raises(WireError, match="checksum"):
            receive(manifest, group("damaged"))
        path.write_bytes(content)
        assert_same(received(manifest, group("whole")), weights())
    finally:
        publisher.close()
        collective._connections.clear()


def test_the_memory_of_another_process_with_the_same_number_is_not_taken_for_the_senders(publisher, is_near):
    location = msgspec.json.decode(publisher.publish(1, weights()).location, type=collective.Location)
    [part] = location.parts
    assert part.is_near
    assert not msgspec.structs.replace(part, name="stretto-0").is_near
    assert not msgspec.structs.replace(part, pid=1 << 30).is_near


def test_a_trainer_that_has_ended_is_named_and_not_taken_for_one_on_another_host(publisher, is_near):
    manifest = publisher.publish(1, weights())
    receiver = collective.HostReceiver(manifest, group("r"), 0, torch.device("cpu"))
    dead = msgspec.structs.replace(receiver._location.parts[0], pid=1 << 30)
    receiver._location = msgspec.structs.replace(receiver._location, parts=(dead,))
    with pytest.raises(WireError, match=r"rank 0 of the trainer, process 1073741824 .* has ended.*--resume") as caught:
        receiver._map(0)
    assert "filesystem" not in str(caught.value)


class LateStore:
    """A store at which each message comes as late as may be; the last one never comes."""

    def __init__(self, last: str) -> None:
        self.values: dict[str, bytes] = {}
        self.waits: list[float] = []
        self.last = last

    def set(self, name, value):
        self.values[name] = value.encode()

    def get(self, name):
        return self.values[name]

    def wait(self, names, timeout):
        self.waits.append(timeout.total_seconds())
        if names == [self.last]:
            raise DistStoreError("timeout")
        time.sleep(0.02)


def test_a_receiver_waits_for_all_others_together_no_longer_than_its_timeout():
    store = LateStore("join/2")
    board = Board(store, "key")
    board.set("join/1", "here")
    with pytest.raises(WireError, match=r"receiver 2 of 3: no message in 0\.03 s"):
        board.exchange("join", 0, 3, "here", "receiver", 0.03)
    first, second, third = store.waits
    assert first >= second + 0.02 > third > 0
