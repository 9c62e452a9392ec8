"""Weights by broadcast: bit for bit to every receiver, and an error for all where one is missing."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from peers import free_port, peer

from stretto.base.errors import WireError
from stretto.records.weights import TensorEntry, WeightGroup, WeightManifest
from stretto.transports.weights import receive
from stretto.transports.weights.collective import CollectivePublisher, buckets_of, forget


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


@pytest.fixture(params=[1, 1000, 1 << 30], ids=["a bucket a tensor", "some buckets", "one bucket"])
def publisher(request):
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=request.param, timeout_s=20)
    yield publisher
    publisher.close()
    forget()


def group(request: str, rank: int = 0, world_size: int = 1, epoch: str = "0") -> WeightGroup:
    return WeightGroup(epoch=epoch, request=request, world_size=world_size, rank=rank)


def received(manifest: WeightManifest, who: WeightGroup) -> list[tuple[str, torch.Tensor]]:
    with receive(manifest, who) as tensors:
        return [(name, tensor.clone()) for name, tensor in tensors]


def assert_same(got, sent) -> None:
    assert [name for name, _ in got] == [name for name, _ in sent]
    for (name, a), (_, b) in zip(got, sent):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert (
            a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
        )


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
    assert_same(received(manifest, group("second", epoch="1")), sent)
    publisher.publish(2, weights(2))
    publisher.release(1)
    with pytest.raises(WireError, match="version 1 is no longer held, only 2"):
        received(manifest, group("third", epoch="2"))


def test_without_a_group_nothing_is_received(publisher):
    with pytest.raises(WireError, match="names no group"):
        receive(publisher.publish(1, weights()))


RECEIVE = """
import sys, zlib
import msgspec, torch
from stretto.records.weights import WeightGroup, WeightManifest
from stretto.transports.weights import receive
torch.set_num_threads(1)
for line in sys.stdin:
    manifest, group = msgspec.json.decode(line, type=tuple[WeightManifest, WeightGroup])
    crc = 0
    with receive(manifest, group) as tensors:
        for name, tensor in tensors:
            crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    print(crc, flush=True)
"""

SEND = """
import sys
import msgspec, torch
from stretto.transports.weights.collective import CollectivePublisher
torch.set_num_threads(1)
port = int(sys.argv[1])
publisher = CollectivePublisher("127.0.0.1", port, bucket_bytes=1000, timeout_s=20, rank=1, num_ranks=2)
for line in sys.stdin:
    version = int(line)
    tensors = [("second", torch.full((40, 3), float(version))), ("third", torch.arange(version + 5.0))]
    print(msgspec.json.encode(publisher.publish(version, tensors)).decode(), flush=True)
"""


def told(manifest: WeightManifest, who: WeightGroup) -> str:
    return msgspec.json.encode((manifest, who)).decode()


def test_processes_receive_together_and_one_that_dies_fails_the_rest():
    publisher = CollectivePublisher("127.0.0.1", free_port(), bucket_bytes=1000, timeout_s=8)
    try:
        with peer(RECEIVE) as first, peer(RECEIVE) as second:
            for version in (1, 2):
                manifest = publisher.publish(version, weights(version))
                for rank, process in enumerate((first, second)):
                    process.tell(told(manifest, group(f"r{version}", rank, 2)))
                crcs = {first.line(), second.line()}
                assert len(crcs) == 1
            second.kill()
            first.tell(told(manifest, group("r3", 0, 2)))
            with pytest.raises(AssertionError, match="WireError: weights of version 2: receiver 1 of 2"):
                first.line()
        with peer(RECEIVE) as alone:  # the next epoch is without the dead one
            alone.tell(told(manifest, group("r4", 0, 1, epoch="1")))
            assert alone.line() in crcs
    finally:
        publisher.close()


def test_every_trainer_rank_sends_what_it_owns():
    port = free_port()
    first = CollectivePublisher("127.0.0.1", port, bucket_bytes=1000, timeout_s=20, num_ranks=2)
    try:
        with peer(SEND, port) as other:
            for version in (1, 2):
                other.tell(str(version))
                theirs = msgspec.json.decode(other.line(), type=WeightManifest)
                mine = first.publish(version, [("first", torch.full((7,), -float(version)))])
                both = msgspec.structs.replace(mine, tensors=mine.tensors + theirs.tensors)
                got = dict(received(both, group(f"r{version}")))
                assert list(got) == ["first", "second", "third"]
                assert got["first"].eq(-version).all() and got["second"].eq(version).all()
                assert got["third"].equal(torch.arange(version + 5.0))
    finally:
        first.close()
        forget()


def test_a_port_that_is_taken_is_said(publisher):
    port = msgspec.json.decode(publisher.publish(0, []).location)["port"]
    with pytest.raises(WireError, match=f"cannot hold the store at 127.0.0.1:{port}"):
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
