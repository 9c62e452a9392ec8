"""Published weights arrive bit for bit, or not at all, even if a process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from peers import peer
from safetensors.torch import load_file

from stretto.base.errors import DataError, EngineError, WireError
from stretto.base.files import SHARED_MEMORY, remove_unowned
from stretto.base.paths import RunDir
from stretto.config.sections.transport import FilesystemWeights, ShmWeights, WeightBroadcast
from stretto.records.weight_manifest import WeightManifest, load_manifest
from stretto.transports.weights import Publisher, build_publisher, filesystem, receive, shm
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.shm import ShmPublisher

BOTH = pytest.mark.parametrize("cfg", [ShmWeights(), FilesystemWeights()], ids=lambda cfg: cfg.type)


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Every kind of tensor a checkpoint may hold."""
    gen = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 4, generator=gen)
    return [
        ("fp32", torch.randn(16, 8, generator=gen)),
        ("bf16", torch.randn(5, 3, generator=gen).bfloat16()),
        ("fp16", torch.randn(7, generator=gen).half()),
        ("fp8", torch.randn(9, generator=gen).to(torch.float8_e4m3fn)),
        ("int", torch.randint(0, 9, (3,), generator=gen)),
        ("flags", torch.randn(5, generator=gen) > 0),
        ("scalar", torch.tensor(float(seed))),
        ("empty", torch.empty(0, 4)),
        ("transposed", base.t()),
        ("slice", base[1:3]),
        ("grad", torch.nn.Parameter(torch.randn(2, 2, generator=gen))),
    ]


def assert_received(manifest: WeightManifest, sent: list[tuple[str, torch.Tensor]]) -> None:
    with receive(manifest) as tensors:
        got = [(name, tensor.clone()) for name, tensor in tensors]
    assert [name for name, _ in got] == [name for name, _ in sent]
    for (name, a), (_, b) in zip(got, sent):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.view(torch.uint8).equal(b.detach().contiguous().view(torch.uint8)) if a.ndim else a == b, name


def publisher(cfg: WeightBroadcast, tmp_path: Path) -> Publisher:
    return build_publisher(cfg, RunDir(tmp_path / "run"), f"{os.getpid()}/of tests")


def shm_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("stretto-weights-*_of_tests-*")}


@BOTH
def test_every_kind_of_tensor_arrives_bit_for_bit(cfg: WeightBroadcast, tmp_path: Path) -> None:
    source = publisher(cfg, tmp_path)
    for version in range(4):
        manifest = source.publish(version, iter(weights(version)))
        # The manifest travels as JSON and as msgpack.
        manifest = msgspec.json.decode(msgspec.json.encode(manifest), type=WeightManifest)
        assert manifest.version == version and manifest.transport == cfg.type
        assert_received(manifest, weights(version))
        source.release(version - 1)
    source.close()


@BOTH
def test_a_version_that_is_not_released_can_still_be_read(cfg: WeightBroadcast, tmp_path: Path) -> None:
    source = publisher(cfg, tmp_path)
    manifests = [source.publish(version, weights(version)) for version in range(5)]
    for version, manifest in enumerate(manifests):
        assert_received(manifest, weights(version))
    source.close()


@BOTH
def test_a_damaged_byte_is_noticed(cfg: WeightBroadcast, tmp_path: Path) -> None:
    source = publisher(cfg, tmp_path)
    manifest = source.publish(0, weights())
    path = Path(manifest.location, manifest.shards[0])
    with path.open("r+b") as file:
        file.seek(-70, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-70, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WireError, match="checksum"):
        receive(manifest)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(WireError, match="checksum"):
        receive(manifest)
    path.unlink()
    with pytest.raises(WireError, match="does not exist"):
        receive(manifest)
    source.close()


@BOTH
def test_what_was_published_with_crc32_is_read_and_an_unknown_checksum_refused(
    cfg: WeightBroadcast, tmp_path: Path
) -> None:
    source = publisher(cfg, tmp_path)
    manifest = source.publish(0, weights())
    shards = [zlib.crc32(Path(manifest.location, shard).read_bytes()) for shard in manifest.shards]
    crc = zlib.crc32(b"".join(shard.to_bytes(4, "little") for shard in shards))
    plain = msgspec.to_builtins(msgspec.structs.replace(manifest, checksum=crc))
    del plain["checksum_kind"]  # as in manifests of older versions
    assert_received(msgspec.convert(plain, WeightManifest), weights())
    with pytest.raises(WireError, match=r"kind 'sum128'.*knows 'sum64' or 'crc32'; start trainer and engines"):
        receive(msgspec.structs.replace(manifest, checksum_kind="sum128"))
    source.close()


@BOTH
def test_pages_of_the_version_before_are_noticed(cfg: WeightBroadcast, tmp_path: Path) -> None:
    """What a writer leaves behind that dies, or that is not waited for: whole pages of what was there."""
    source = publisher(cfg, tmp_path)
    old, new = ([("w", torch.randn(40_000)), ("b", torch.randn(10))] for _ in range(2))
    before = source.publish(0, old)
    bytes_before = Path(before.location, before.shards[0]).read_bytes()
    manifest = source.publish(1, new)
    path = Path(manifest.location, manifest.shards[0])
    now = path.read_bytes()
    page = slice(16 * 4096, 17 * 4096)
    other = slice(20 * 4096, 21 * 4096)
    for damaged in (
        now[: page.start] + bytes_before[page] + now[page.stop :],
        now[: page.start] + bytes_before[page.start :],
        now[: page.start] + now[other] + now[page.stop : other.start] + now[page] + now[other.stop :],
    ):
        assert len(damaged) == len(now)
        path.write_bytes(damaged)
        with pytest.raises(WireError, match="checksum"):
            receive(manifest)
    path.write_bytes(now)
    assert_received(manifest, new)
    source.close()


@BOTH
def test_a_wrong_manifest_is_refused(cfg: WeightBroadcast, tmp_path: Path) -> None:
    source = publisher(cfg, tmp_path)
    manifest = source.publish(0, weights())
    first, *others = manifest.tensors
    for change in ({"dtype": "float99"}, {"shape": (99,)}, {"offset": 1 << 40}):
        lie = msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(first, **change), *others))
        with pytest.raises(WireError, match="fp32"):
            list(receive(lie))
    source.close()


@BOTH
def test_what_was_received_is_not_changed_by_the_receiver(cfg: WeightBroadcast, tmp_path: Path) -> None:
    source = publisher(cfg, tmp_path)
    manifest = source.publish(0, weights())
    with receive(manifest) as tensors:
        dict(tensors)["fp32"].zero_()
    assert_received(manifest, weights())
    source.close()


@BOTH
def test_tensors_may_outlive_the_context(cfg: WeightBroadcast, tmp_path: Path) -> None:
    source = publisher(cfg, tmp_path)
    with receive(source.publish(0, weights())) as tensors:
        copied = dict(tensors)
    source.close()
    assert copied["fp32"].equal(weights()[0][1])


def test_shared_memory_is_used_again_only_after_release(tmp_path: Path) -> None:
    source = publisher(ShmWeights(), tmp_path)
    old = source.publish(0, weights(0))
    new = source.publish(1, weights(1))
    assert old.shards != new.shards
    source.release(0)
    assert source.publish(2, weights(2)).shards == old.shards
    with pytest.raises(WireError, match="holds version 2"):
        receive(old)
    assert_received(new, weights(1))
    source.close()


def test_a_reader_notices_that_its_version_was_overwritten(tmp_path: Path) -> None:
    source = publisher(ShmWeights(), tmp_path)
    manifest = source.publish(0, weights(0))
    with pytest.raises(WireError, match="overwritten while they were read"), receive(manifest):
        source.release(0)
        source.publish(1, weights(1))
    source.close()


def test_a_model_that_shrinks_leaves_no_old_bytes(tmp_path: Path) -> None:
    source = publisher(ShmWeights(), tmp_path)
    source.publish(0, weights())
    source.release(0)
    assert_received(source.publish(1, weights()[:2]), weights()[:2])
    source.close()


def test_a_version_after_a_longer_one_takes_its_own_memory_and_a_late_reader_of_that_is_told(tmp_path: Path) -> None:
    source = publisher(ShmWeights(), tmp_path)
    manifest = source.publish(0, [("w", torch.ones(8 << 20, dtype=torch.uint8))])
    path = Path(manifest.location, manifest.shards[0])
    with pytest.raises(WireError, match="overwritten while they were read"), receive(manifest) as tensors:
        for version in range(1, 4):
            source.release(version - 1)
            sent = [("w", torch.full((version << 18,), version, dtype=torch.uint8))]
            manifest = source.publish(version, sent)
            assert path.name == manifest.shards[0] and path.stat().st_blocks * 512 < 1 << 20
            assert_received(manifest, sent)
        [(_, tensor)] = tensors
        assert not tensor[-1]  # to read it ends in no SIGBUS
    source.close()


def test_shared_memory_has_to_have_room_for_the_versions_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, allocate = (3 << 20) + (1 << 16), os.posix_fallocate

    def allocate_within(fd: int, start: int, num_bytes: int) -> None:
        if start + num_bytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate_within)
    source = publisher(ShmWeights(), tmp_path)
    sent = [(f"t{i}", torch.full((1 << 20,), i, dtype=torch.uint8)) for i in range(4)]
    with pytest.raises(EngineError, match=r"No space left.*--shm-size"):
        source.publish(0, sent)
    assert_received(source.publish(0, sent[1:]), sent[1:])
    source.close()


def test_a_version_that_was_not_finished_is_refused(tmp_path: Path) -> None:
    def fails():
        yield weights()[0]
        raise RuntimeError("out of memory")

    source = publisher(ShmWeights(), tmp_path)
    manifest = source.publish(0, weights())
    source.release(0)
    with pytest.raises(RuntimeError):
        source.publish(1, fails())
    with pytest.raises(WireError, match="incomplete"):
        receive(manifest)
    assert_received(source.publish(1, weights(1)), weights(1))
    source.close()


def test_closing_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    before = shm_files()
    source = publisher(ShmWeights(), tmp_path)
    for version in range(3):
        source.publish(version, weights())
    assert len(shm_files() - before) == 3
    source.close()
    assert shm_files() <= before


def test_a_full_shared_memory_is_an_error_that_says_so(tmp_path: Path) -> None:
    source = ShmPublisher("run")
    source.publish(0, weights())
    file = source._files[0]
    os.close(file.fd)
    file.fd = os.open("/dev/full", os.O_RDWR)
    source.release(0)
    with pytest.raises(EngineError, match=r"No space left.*--shm-size"):
        source.publish(1, weights())
    source.close()


def test_a_directory_of_shared_memory_that_takes_no_more_files_is_an_error_that_says_so(tmp_path: Path) -> None:
    directory = tmp_path / "shm"
    directory.mkdir()
    source = ShmPublisher("run", directory)
    directory.rmdir()
    with pytest.raises(EngineError, match=f"cannot write version 0 to shared memory in {directory}: No such file"):
        source.publish(0, weights())
    source.close()


PUBLISH_AND_HANG = """
import sys, time
from pathlib import Path
import torch
from stretto.base.paths import RunDir
from stretto.config.sections.transport import ShmWeights
from stretto.transports.weights import build_publisher
publisher = build_publisher(ShmWeights(), RunDir(Path(sys.argv[1])), "killed/of tests")
manifest = publisher.publish(0, [("w", torch.arange(10.0))])
print(manifest.shards[0], flush=True)
time.sleep(100)
"""


def test_files_of_a_killed_publisher_are_removed_and_those_of_a_live_one_are_not(tmp_path: Path) -> None:
    alive = publisher(ShmWeights(), tmp_path)
    live_file = alive.publish(0, weights()).shards[0]
    with peer(PUBLISH_AND_HANG, tmp_path) as dead:
        dead_file = dead.line()
        remove_unowned(SHARED_MEMORY)
        assert {dead_file, live_file} <= shm_files()
        dead.kill()
        publisher(ShmWeights(), tmp_path).close()
        assert dead_file not in shm_files() and live_file in shm_files()
    alive.close()


READ = """
import sys
import msgspec, torch
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.weights import receive
for line in sys.stdin:
    manifest = msgspec.json.decode(line, type=WeightManifest)
    with receive(manifest) as tensors:
        total = sum(float(t.double().sum()) for _, t in tensors)
    print(total, flush=True)
"""


def test_another_process_reads_every_version_and_its_death_takes_nothing_away(tmp_path: Path) -> None:
    sources = [publisher(cfg, tmp_path) for cfg in (ShmWeights(), FilesystemWeights())]
    tensors = [("a", torch.arange(1000.0)), ("b", torch.ones(10))]
    with peer(READ) as reader:
        for version in range(3):
            for _, tensor in tensors:
                tensor += 1
            manifests = [source.publish(version, tensors) for source in sources]
            for manifest in manifests:
                reader.write_line(msgspec.json.encode(manifest).decode())
                assert float(reader.line()) == sum(float(t.double().sum()) for _, t in tensors)
            for source in sources:
                source.release(version - 1)
        reader.kill()
    for manifest in manifests:
        assert_received(manifest, tensors)
    for source in sources:
        source.close()


# -- files --


def test_shards_are_split_by_size_and_any_safetensors_reader_loads_them(tmp_path: Path) -> None:
    source = FilesystemPublisher(tmp_path / "broadcasts", keep_versions=2, shard_bytes=200)
    manifest = source.publish(3, weights())
    assert len(manifest.shards) > 2
    assert_received(manifest, weights())
    loaded = {}
    for shard in manifest.shards:
        loaded.update(load_file(Path(manifest.location, shard)))
    assert loaded["fp32"].equal(weights()[0][1]) and len(loaded) == len(weights())
    assert load_manifest(Path(manifest.location)) == manifest
    source.close()


def test_the_newest_versions_and_those_in_use_are_kept(tmp_path: Path) -> None:
    def versions() -> list[int]:
        return sorted(int(path.name.split("_")[1]) for path in (tmp_path / "b").glob("version_*"))

    source = FilesystemPublisher(tmp_path / "b", keep_versions=2)
    for version in range(5):
        source.publish(version, weights())
        if version >= 1:
            source.release(version - 1)
    assert versions() == [3, 4]
    source.publish(5, weights())
    source.publish(6, weights())
    assert versions() == [4, 5, 6]
    source.close()

    resumed = FilesystemPublisher(tmp_path / "b", keep_versions=2)
    resumed.publish(4, weights(4))  # the run went back to step 4: what came after never was
    assert versions() == [4]
    assert_received(load_manifest(tmp_path / "b" / "version_4"), weights(4))
    resumed.close()


def test_a_half_written_version_is_never_seen(tmp_path: Path) -> None:
    def fails():
        yield weights()[0]
        raise RuntimeError("killed")

    source = FilesystemPublisher(tmp_path / "b", keep_versions=2)
    with pytest.raises(RuntimeError):
        source.publish(0, fails())
    assert not (tmp_path / "b" / "version_0").exists()
    with pytest.raises(DataError, match="no published weights"):
        load_manifest(tmp_path / "b" / "version_0")
    FilesystemPublisher(tmp_path / "b", keep_versions=2).close()
    assert list((tmp_path / "b").iterdir()) == []


@BOTH
def test_what_is_larger_than_a_piece_arrives_bit_for_bit(
    cfg: WeightBroadcast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (filesystem, shm):
        monkeypatch.setattr(room, "PIECE_BYTES", 1 << 16)
    source = publisher(cfg, tmp_path)
    for version in range(3):
        gen = torch.Generator().manual_seed(version)
        sizes = [120_000, 3, 16_384, 16_383, 1, 250_001]
        sent = [(f"t{i}", torch.randn(size, generator=gen)) for i, size in enumerate(sizes)]
        manifest = source.publish(version, sent)
        assert_received(manifest, sent)
        source.release(version - 1)
    if cfg.type == "filesystem":
        loaded = load_file(Path(manifest.location, manifest.shards[0]))
        assert all(loaded[name].equal(tensor) for name, tensor in sent)
    source.close()


def test_a_full_header_and_a_tensor_at_an_odd_place_begin_a_new_file(tmp_path: Path) -> None:
    source = FilesystemPublisher(tmp_path / "b", keep_versions=2)
    many = [(f"{'layers.' * 20}{i}", torch.full((i % 5 + 1,), float(i))) for i in range(900)]
    sent = [*many, ("odd", torch.ones(3, dtype=torch.uint8)), ("even", torch.ones(3)), ("last", torch.ones(1).byte())]
    manifest = source.publish(0, sent)
    assert_received(manifest, sent)
    assert len(manifest.shards) > 3
    loaded = [load_file(Path(manifest.location, shard)) for shard in manifest.shards]
    assert [name for tensors in loaded for name in sorted(tensors)] and "odd" in loaded[-2] and "even" in loaded[-1]
    assert sum(map(len, loaded)) == len(sent)
    source.close()


def test_where_a_file_cannot_be_written_past_the_page_cache_it_is_written_through_it(tmp_path: Path) -> None:
    content = memoryview(os.urandom(2 * 4096 + 1))[1:]  # begins at no page
    fd = filesystem._open_direct(tmp_path / "file")
    filesystem._write_at(fd, content, 0)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == content


def test_where_writes_past_the_page_cache_are_refused_two_threads_find_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, both = os.pwrite, threading.Barrier(2)

    def write_buffered(fd: int, view: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            both.wait(10)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", write_buffered)
    fd, content = filesystem._open_direct(tmp_path / "file"), os.urandom(1 << 13)
    with ThreadPoolExecutor(2) as writers:
        parts = [memoryview(content)[start : start + 4096] for start in (0, 4096)]
        list(writers.map(filesystem._write_at, (fd, fd), parts, (0, 4096)))
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == content
