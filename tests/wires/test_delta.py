"""Weights sent as changes arrive bit for bit, whatever an engine held before; wrong copies are found and repaired."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from peers import peer
from ports import free_port

from stretto.base import files
from stretto.base.errors import EngineError, WireError
from stretto.base.paths import RunDir
from stretto.config.sections.transport import (
    CollectiveWeights,
    DeltaSection,
    FilesystemWeights,
    ShmWeights,
    WeightBroadcast,
)
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.transports.weights import build_publisher, receive
from stretto.transports.weights.layout import HEAD_BYTES
from stretto_broadcast import collective, host_copy
from stretto_broadcast.delta import Chain, DeltaReceiver, decode_gaps, encode_gaps, find_changes


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Every kind of tensor a checkpoint may hold."""
    gen = torch.Generator().manual_seed(seed)
    return [
        ("odd", torch.randn(5, generator=gen).to(torch.float8_e4m3fn)),
        ("bf16", torch.randn(300, 70, generator=gen).bfloat16()),
        ("fp32", torch.randn(16, 8, generator=gen)),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.randn(6, 40, generator=gen).bfloat16().t()),
        ("scalar", torch.tensor(float(seed))),
        ("flags", torch.randn(5, generator=gen) > 0),
        ("int", torch.arange(300)),
    ]


def step(tensors: list[tuple[str, torch.Tensor]], seed: int, count: int = 100):
    """The same with a few other elements, as after a step of the optimizer; NaN and signed zeros among them."""
    gen = torch.Generator().manual_seed(seed)
    after = [(name, tensor.clone()) for name, tensor in tensors]
    flat = after[1][1].view(-1)
    flat[torch.randint(0, len(flat), (count,), generator=gen)] += 1
    flat[0], flat[1] = float("nan"), -0.0 if seed % 2 else 0.0
    after[2][1].add_(seed)
    after[5][1].fill_(seed)
    return after


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_received(manifest: WeightManifest, sent, group: WeightGroup | None = None) -> None:
    with receive(manifest, group) as tensors:
        got = [(name, tensor.clone()) for name, tensor in tensors]
        tensors.check_unchanged()
    assert [name for name, _ in got] == [name for name, _ in sent]
    for (name, a), (_, b) in zip(got, sent):
        assert a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b), name


def links(manifest: WeightManifest) -> list[int]:
    """The versions of a manifest's links, the snapshot first."""
    return [link.version for link in msgspec.json.decode(manifest.location, type=Chain).links]


def configs(**fields) -> list[WeightBroadcast]:
    delta = DeltaSection(**fields)
    return [ShmWeights(delta=delta), FilesystemWeights(delta=delta), CollectiveWeights(delta=delta, join_timeout_s=120)]


def memory(tmp_path: Path) -> Path:
    """Where a test's copies are; in /dev/shm other tests remove what dead processes have left."""
    directory = tmp_path / "memory"
    directory.mkdir(exist_ok=True)
    return directory


@contextlib.contextmanager
def publisher(cfg: WeightBroadcast, tmp_path: Path, run: str = "a run"):
    if "directory" not in cfg.delta.model_fields_set:
        cfg = cfg.model_copy(update={"delta": cfg.delta.model_copy(update={"directory": memory(tmp_path)})})
    if isinstance(cfg, CollectiveWeights):
        cfg = cfg.model_copy(update={"port": free_port()})
    source = build_publisher(cfg, RunDir(tmp_path / "run"), run)
    try:
        yield source
    finally:
        source.close()
        host_copy.close_all()
        collective._connections.clear()


def group(manifest: WeightManifest, request: str, rank: int = 0, world_size: int = 1) -> WeightGroup | None:
    if not manifest.needs_group:
        return None
    return WeightGroup(request=request, world_size=world_size, rank=rank)


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in memory(tmp_path).glob(files.COPY + "*") if not path.suffix]


OVER = pytest.mark.parametrize("cfg", configs(), ids=lambda cfg: cfg.type)


@OVER
def test_versions_that_differ_little_travel_as_changes_and_arrive_bit_for_bit(cfg, tmp_path):
    with publisher(cfg, tmp_path) as source:
        sent = weights()
        for version in range(6):
            manifest = source.publish(version, iter(sent))
            manifest = msgspec.json.decode(msgspec.json.encode(manifest), type=WeightManifest)
            assert links(manifest) == list(range(version + 1))
            assert_received(manifest, sent, group(manifest, f"r{version}"))
            source.release(version - 1)
            sent = step(sent, version)
    assert not copies(tmp_path)


@OVER
def test_an_engine_that_missed_versions_or_has_none_gets_all_it_lacks(cfg, tmp_path):
    with publisher(cfg, tmp_path) as source:
        sent = weights()
        for version in range(8):
            manifest = source.publish(version, iter(sent))
            if version in (2, 5, 6):
                assert_received(manifest, sent, group(manifest, f"r{version}"))
                source.release(version - 1)
            if version == 5:
                host_copy.close_all()  # as in a restarted engine
            sent = step(sent, version)


def test_the_same_version_is_loaded_twice_without_reading_anything(tmp_path):
    with publisher(configs()[1], tmp_path) as source:
        manifest = source.publish(0, weights())
        assert_received(manifest, weights())
        for file in (tmp_path / "run/broadcasts/version_0").iterdir():
            file.unlink()
        assert_received(manifest, weights())


def test_other_weights_are_a_snapshot_and_start_a_new_chain(tmp_path):
    with publisher(configs()[1], tmp_path) as source:
        a, b = weights(0), weights(1)
        found = []
        for version, sent in enumerate([a, b, step(b, 1), a, a, b]):
            manifest = source.publish(version, sent)
            assert_received(manifest, sent)
            found.append(links(manifest))
        assert found == [[0], [1], [1, 2], [3], [3, 4], [5]]


def test_a_chain_ends_after_max_links_and_when_its_changes_add_up(tmp_path):
    def chains(cfg: WeightBroadcast, count: int, num_changed: int) -> list[int]:
        found = []
        with publisher(cfg, tmp_path) as source:
            sent = weights()
            for version in range(count):
                manifest = source.publish(version, sent)
                assert_received(manifest, sent)
                found.append(len(links(manifest)))
                sent = step(sent, version, num_changed)
        return found

    assert chains(FilesystemWeights(delta=DeltaSection(max_links=2)), 6, 100) == [1, 2, 3, 1, 2, 3]
    assert chains(FilesystemWeights(delta=DeltaSection(max_ratio=0.2)), 6, 2000) == [1, 2, 1, 2, 1, 2]


def test_links_are_kept_as_long_as_a_chain_that_may_be_read_begins_with_them(tmp_path):
    cfg = FilesystemWeights(delta=DeltaSection(max_links=2), keep_versions=2)
    with publisher(cfg, tmp_path) as source:
        sent = weights()
        for version in range(5):
            manifest = source.publish(version, sent)
            host_copy.close_all()
            assert_received(manifest, sent)
            source.release(version - 1)
            sent = step(sent, version)
        names = {path.name for path in (tmp_path / "run/broadcasts").iterdir()}
        assert names == {"version_3", "version_4"}


def test_other_tensors_of_the_same_number_are_a_snapshot(tmp_path):
    with publisher(configs()[1], tmp_path) as source:
        for version, sent in enumerate(
            [
                [("a", torch.ones(4, 6)), ("b", torch.ones(8))],
                [("a", torch.ones(6, 4)), ("b", torch.ones(8))],
                [("b", torch.ones(8)), ("a", torch.ones(6, 4))],
                [("b", torch.ones(8).int()), ("a", torch.ones(6, 4))],
                [("b", torch.ones(8).int())],
                [("b", torch.ones(8).int()), ("c", torch.ones(3))],
                [("b", torch.ones(80).int())],
            ]
        ):
            manifest = source.publish(version, sent)
            assert links(manifest) == [version]
            assert_received(manifest, sent)


def test_a_copy_with_wrong_content_is_written_again(tmp_path, caplog):
    with publisher(configs()[1], tmp_path) as source:
        sent = weights()
        assert_received(source.publish(0, sent), sent)
        [path] = copies(tmp_path)
        with path.open("r+b") as file:
            file.seek(HEAD_BYTES + 2936)
            file.write(b"\1\2\3")
        sent = step(sent, 1)
        assert_received(source.publish(1, sent), sent)
    assert "bf16 has the checksum" in caplog.text and "Starting from the snapshot" in caplog.text


def test_in_a_broadcast_a_damaged_copy_is_written_again_for_all(tmp_path):
    with publisher(configs()[2], tmp_path) as source:
        sent = weights()
        manifest = source.publish(0, sent)
        assert_received(manifest, sent, group(manifest, "r0"))
        with copies(tmp_path)[0].open("r+b") as file:
            file.seek(HEAD_BYTES + 2936)
            file.write(b"\1\2\3")
        sent = step(sent, 1)
        manifest = source.publish(1, sent)
        assert_received(manifest, sent, group(manifest, "r1"))


def test_a_snapshot_that_is_overwritten_while_it_is_copied_is_no_version_of_the_host(tmp_path, monkeypatch):
    [cfg] = [cfg for cfg in configs() if cfg.type == "shm"]
    with publisher(cfg, tmp_path) as source:
        old, new = ([(name, torch.full((9000,), value)) for name in "ab"] for value in (1.0, 2.0))
        manifest = source.publish(0, old)
        words_of, num_copied = DeltaReceiver._words, 0

        def overwrite(receiver, writer, index):
            nonlocal num_copied
            num_copied += 1
            if num_copied == 2:
                source._inner.release(0)
                source._inner.publish(1, new)
            return words_of(receiver, writer, index)

        monkeypatch.setattr(DeltaReceiver, "_words", overwrite)
        for _ in range(2):
            with pytest.raises(WireError, match="holds version 1"):
                receive(manifest)


def test_a_damaged_link_is_refused_and_the_next_snapshot_is_good(tmp_path):
    cfg = FilesystemWeights(delta=DeltaSection(max_links=1))
    with publisher(cfg, tmp_path) as source:
        sent = weights()
        assert_received(source.publish(0, sent), sent)
        manifest = source.publish(1, sent := step(sent, 1))
        shard = tmp_path / "run/broadcasts/version_1/shard_00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[-7] ^= 1
        shard.write_bytes(data)
        with pytest.raises(WireError, match=r"version 1.*overwritten or damaged"):
            receive(manifest)
        assert_received(source.publish(2, sent), sent)


def test_a_restarted_trainer_starts_a_chain_of_its_own(tmp_path):
    with publisher(configs()[1], tmp_path) as source:
        assert_received(source.publish(7, weights()), weights())
        cfg = configs(directory=memory(tmp_path))[1]
        second = build_publisher(cfg, RunDir(tmp_path / "run"), "a run")
        manifest = second.publish(7, weights(1))
        assert_received(manifest, weights(1))
        assert len(copies(tmp_path)) == 1
        second.close()


FOLLOW = """
import sys, zlib
import msgspec, torch
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.transports.weights import receive
torch.set_num_threads(1)
for line in sys.stdin:
    manifest, group, does_hold = msgspec.json.decode(line, type=tuple[WeightManifest, WeightGroup | None, bool])
    crc = 0
    with receive(manifest, group) as tensors:
        for name, tensor in tensors:
            crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
        print(crc, flush=True)
        while does_hold:
            pass
"""


def crc_of(sent) -> int:
    return zlib.crc32(b"".join(bits(tensor) for _, tensor in sent))


def encoded(manifest: WeightManifest, who: WeightGroup | None = None, *, does_hold: bool = False) -> str:
    return msgspec.json.encode((manifest, who, does_hold)).decode()


@OVER
def test_processes_share_a_copy_and_a_restarted_one_continues(cfg, tmp_path):
    with publisher(cfg, tmp_path) as source, peer(FOLLOW) as first:
        sent = weights()
        a, b = sent, step(sent, 1)
        with peer(FOLLOW) as second:
            for version, sent in enumerate([a, b, a, b]):
                manifest = source.publish(version, sent)
                for rank, process in enumerate((first, second)):
                    process.write_line(encoded(manifest, group(manifest, f"r{version}", rank, 2)))
                assert [first.line(), second.line()] == [str(crc_of(sent))] * 2
                assert len(copies(tmp_path)) == 1
                source.release(version - 1)
            second.kill()
        with peer(FOLLOW) as third:
            sent = step(b, 4)
            manifest = source.publish(4, sent)
            third.write_line(encoded(manifest, group(manifest, "r4")))
            assert third.line() == str(crc_of(sent))
            third.end()
        first.end()
    assert not copies(tmp_path)


def test_a_process_that_holds_on_to_a_version_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copy, "READERS_S", 0.2)
    with publisher(configs()[1], tmp_path) as source, peer(FOLLOW) as stuck:
        sent = weights()
        manifest = source.publish(0, sent)
        stuck.write_line(encoded(manifest, does_hold=True))
        assert stuck.line() == str(crc_of(sent))
        sent = step(sent, 1)
        assert_received(source.publish(1, sent), sent)
        stuck.kill()


def test_copies_of_dead_processes_are_removed(tmp_path):
    with publisher(configs()[1], tmp_path) as source:
        manifest = source.publish(0, weights())
        with peer(FOLLOW) as engine:
            engine.write_line(encoded(manifest))
            engine.line()
            assert files.remove_unowned(memory(tmp_path)) == 0
            engine.kill()
        assert len(copies(tmp_path)) == 1
        assert files.remove_unowned(memory(tmp_path)) == 1
    assert not copies(tmp_path)


def test_a_directory_that_is_full_or_missing_is_named(tmp_path):
    cfg = FilesystemWeights(delta=DeltaSection(directory=tmp_path / "none"))
    with publisher(cfg, tmp_path) as source, pytest.raises(EngineError, match=r"delta.directory = .*does not exist"):
        receive(source.publish(0, weights()))


@given(st.lists(st.integers(0, 2000), unique=True).map(sorted))
def test_gaps_give_the_positions_back(positions):
    found = decode_gaps(encode_gaps(np.array(positions, np.int64)))
    assert found.tolist() == positions


@given(st.integers(0, 2**32), st.integers(0, 400), st.sampled_from([np.uint8, np.uint16, np.uint32]))
def test_changes_make_one_array_of_the_other(seed, num_changed, dtype):
    gen = np.random.default_rng(seed)
    before = gen.integers(0, 4, 1000, dtype=dtype)
    after = before.copy()
    after[gen.integers(0, 1000, num_changed)] = gen.integers(0, 4, num_changed, dtype=dtype)
    changes = find_changes(before, after)
    if changes is None:
        assert (before == after).all()
        return
    gaps, values = changes
    if gaps is None:
        assert (values == after).all()
    else:
        assert len(gaps) + values.nbytes < after.nbytes
        before[decode_gaps(gaps)] = values
        assert (before == after).all()
