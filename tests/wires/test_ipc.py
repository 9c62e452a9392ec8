"""Weights in the memory of a GPU that two processes share; without a GPU they are refused with the reason."""

from __future__ import annotations

import zlib

import msgspec
import pytest
import torch
from peers import peer

from stretto.base.errors import ConfigError, EngineError, WireError
from stretto.base.paths import RunDir
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.transport import IpcWeights
from stretto.records.weight_manifest import TensorEntry, WeightManifest
from stretto.transports.weights import build_publisher, receive
from stretto_broadcast.buckets import buckets_of, tensors_of
from stretto_broadcast.ipc import Location

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ENV = ["--orchestrator.env", '[{"id": "sort-letters"}]', "--weight-broadcast.type", "ipc"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_both_ends_say_so(tmp_path):
    with pytest.raises(EngineError, match="maps the memory of a GPU, but this process has none"):
        build_publisher(IpcWeights(), RunDir(tmp_path), "run")
    location = msgspec.json.encode(Location("GPU-7", 100, ())).decode()
    manifest = WeightManifest(version=1, transport="ipc", location=location, shards=(), tensors=(), checksum=0)
    with pytest.raises(WireError, match="GPU-7, which this process does not see"):
        receive(manifest)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--inference.device", "cpu"], "the engine has no GPU"),
        (["--inference.deployment.num-replicas", "2"], "one process can map the memory"),
        (["--inference.parallel.tp", "2"], "one process can map the memory"),
        (["--orchestrator.num-train-workers", "2"], "share one GPU"),
        (["--weight-broadcast.delta"], "go through the memory of the host"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        load(RLConfig, [*ENV, *flags])


def test_buckets_give_their_tensors_back():
    tensors = [("a", torch.randn(5, 3)), ("b", torch.arange(7)), ("c", torch.randn(40).bfloat16())]
    entries = [
        TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0, 0, t.nbytes) for name, t in tensors
    ]
    got = []
    for bucket in buckets_of(entries, 0, 128):
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for name, target in tensors_of(bucket, buffer):
            target.copy_(dict(tensors)[name])
        got += [(name, tensor.clone()) for name, tensor in tensors_of(bucket, buffer)]
    assert [name for name, _ in got] == ["a", "b", "c"]
    assert all(a.equal(b) for (_, a), (_, b) in zip(got, tensors))


RECEIVE = """
import sys, zlib
import msgspec, torch
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.weights import receive
for line in sys.stdin:
    crc = 0
    with receive(msgspec.json.decode(line, type=WeightManifest)) as tensors:
        for name, tensor in tensors:
            crc = zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    print(crc, flush=True)
"""


@needs_cuda
def test_another_process_reads_the_trainers_memory(tmp_path):
    publisher = build_publisher(IpcWeights(bucket_bytes=1000), RunDir(tmp_path), "run")
    with peer(RECEIVE) as engine:
        for version in range(4):
            sent = [("a", torch.randn(40, 30)), ("b", torch.randn(9).bfloat16()), ("c", torch.tensor(version))]
            engine.write_line(msgspec.json.encode(publisher.publish(version, sent)).decode())
            crc = 0
            for _, tensor in sent:
                crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
            assert engine.line() == str(crc)
            publisher.release(version - 1)
        engine.end()
    publisher.close()
