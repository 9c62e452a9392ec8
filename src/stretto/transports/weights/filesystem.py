"""Weights as safetensors files under RUN/broadcasts/version_N, both ends; manifest.json is written last.

A version is written into a hidden directory and renamed when it is complete, so that a reader of `version_N` sees all
of it. Trainer and engines must share the file system. Any safetensors reader can load the shards. With several trainer
ranks, each writes its own files, and the first rank moves them into one directory.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from stretto.base.errors import EngineError, WireError
from stretto.base.files import put_in_place
from stretto.records.weight_manifest import MANIFEST, TensorEntry, WeightManifest
from stretto.transports.weights.checksum import Checksum, checksum_function
from stretto.transports.weights.layout import (
    ONE_RANK,
    NamedTensor,
    Ranks,
    RankShards,
    Receiver,
    build_manifest,
    combine_checksums,
    dtype_name,
    tensor_over,
)

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
_VERSION = re.compile(r"version_(\d+)$")
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""By the name that a file's header has: that of a manifest."""


class FilesystemPublisher:
    """Keeps the newest `keep_versions` versions and all that are not released."""

    def __init__(
        self, directory: Path, *, keep_versions: int, shard_bytes: int = SHARD_BYTES, ranks: Ranks = ONE_RANK
    ) -> None:
        self._directory = directory
        self._keep_versions = keep_versions
        self._shard_bytes, self._ranks = shard_bytes, ranks
        self._in_use: set[int] = set()  # published by this process and not yet released
        directory.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            for path in directory.glob(".version_*"):  # left incomplete by a process that died
                shutil.rmtree(path, ignore_errors=True)
        ranks.gather(None, None)  # a barrier: no rank writes before that

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        started = time.perf_counter()
        ranks, final = self._ranks, self._directory / f"version_{version}"
        partial = self._directory / f".version_{version}.{ranks.rank}.{os.getpid()}"
        try:
            gathered = ranks.gather((partial.name, self._write(partial, tensors)), tuple[str, RankShards])
            parts = (shards for _, shards in gathered)
            location = str(final.resolve())
            manifest = build_manifest(parts, version=version, transport="filesystem", location=location)
            if ranks.rank == 0:
                for name, shards in gathered[1:]:
                    self._move_shards(self._directory / name, shards, partial)
                (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
                put_in_place(partial, final)
        except OSError as cause:
            raise EngineError(
                f"cannot write weights of version {version} to {final}: {cause}; free some space."
            ) from cause
        if ranks.rank == 0:
            self._in_use.add(version)
            self._prune(newest=version)
        logger.debug("published version=%d in %.3fs", version, time.perf_counter() - started)
        return manifest

    def _write(self, partial: Path, tensors: Iterable[NamedTensor]) -> RankShards:
        """Write this rank's files into a directory of its own."""
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        prefix = "" if self._ranks.world_size == 1 else f"rank_{self._ranks.rank}_"
        shards: list[str] = []
        checksums: list[int] = []
        entries: list[TensorEntry] = []
        for shard, tensors_of_shard in enumerate(_split(tensors, self._shard_bytes)):
            path = partial / f"{prefix}shard_{shard:05d}.safetensors"
            save_file(tensors_of_shard, path)
            entries += _entries(path, shard, tensors_of_shard)
            checksums.append(_checksum_of_file(path))
            shards.append(path.name)
        return RankShards(tuple(shards), tuple(checksums), tuple(entries))

    @staticmethod
    def _move_shards(directory: Path, shards: RankShards, target: Path) -> None:
        """Move another rank's files into the directory of the version."""
        for shard in shards.shards:
            (directory / shard).rename(target / shard)
        directory.rmdir()

    def release(self, version: int) -> None:
        self._in_use = {each for each in self._in_use if each > version}

    def close(self) -> None:
        """The newest versions stay on disk: an engine may be started from them."""
        self._in_use.clear()

    def _prune(self, newest: int) -> None:
        """Remove old versions, and those beyond `newest`, which are left from undone steps."""
        found = {int(match[1]): path for path in self._directory.iterdir() if (match := _VERSION.match(path.name))}
        kept = set(sorted(v for v in found if v <= newest)[-self._keep_versions :]) | self._in_use
        for version, path in found.items():
            if version not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _split(tensors: Iterable[NamedTensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Split tensors, in order, into shards of at most `shard_bytes` (or one tensor)."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        dtype_name(name, tensor)
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        # A copy, because safetensors refuses tensors that share memory, as tied or sliced weights do.
        shard[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if shard:
        yield shard


class MappedReceiver(Receiver):
    """Maps the files of a version and verifies them; the tensors are views (private copy-on-write mappings)."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._paths = [Path(manifest.location, shard) for shard in manifest.shards]
        self._maps: list[mmap.mmap] = []
        try:
            for path in self._paths:
                self._maps.append(self._map(path))
            checksum = checksum_function(manifest)
            crc = combine_checksums(checksum(memoryview(mapped)) for mapped in self._maps)
            if crc != manifest.checksum:
                raise WireError(
                    f"weights of version {manifest.version} in {manifest.location} have the checksum {crc:#010x}, but "
                    f"the manifest says {manifest.checksum:#010x}; they were overwritten or damaged."
                )
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[NamedTensor]:
        for entry in self.manifest.tensors:
            yield entry.name, tensor_over(self._maps[entry.shard], entry, entry.offset)

    def close(self) -> None:
        """Drop the mappings; each ends with the last tensor that refers to it.

        They are not closed explicitly: torch keeps a mapping object alive but does not lock its buffer, so closing
        it would leave tensors over unmapped memory.
        """
        self._maps = []

    def _map(self, path: Path) -> mmap.mmap:
        what = f"weights of version {self.manifest.version}: {path}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WireError(
                f"{what} does not exist; the publisher removed it or runs on another host "
                '(across hosts use weight_broadcast.type = "filesystem").'
            ) from None
        except OSError as cause:
            raise WireError(f"{what}: {cause.strerror}.") from cause
        try:
            if os.fstat(fd).st_size == 0:
                raise WireError(f"{what} is empty.")
            # Private: writable, as torch requires, without changing the publisher's bytes.
            return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)


def describe_files(directory: Path, *, version: int, location: Path) -> WeightManifest:
    """The manifest of the safetensors files of a model directory, which is going to be at `location`.

    Raises: WireError for a dtype that no transport has.
    """
    entries: list[TensorEntry] = []
    paths = sorted(directory.glob("*.safetensors"))
    for shard, path in enumerate(paths):
        length, header = _header(path)
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise WireError(f"{path}: {name} is {entry['dtype']}, which weights for engines cannot be")
            start, end = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            found.append(TensorEntry(name, dtype, shape, shard, 8 + length + start, end - start))
        entries += sorted(found, key=lambda entry: entry.offset)
    names, checksums = tuple(path.name for path in paths), tuple(map(_checksum_of_file, paths))
    part = RankShards(names, checksums, tuple(entries))
    return build_manifest([part], version=version, transport="filesystem", location=str(location.resolve()))


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Length and content of a file's header (length, then JSON)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length, msgspec.json.decode(file.read(length))


def _entries(path: Path, shard: int, tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    """Entries of a shard's tensors, with offsets from the file's header."""
    length, header = _header(path)
    entries = []
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        dtype = dtype_name(name, tensor)
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), shard, 8 + length + start, end - start))
    return entries


def _checksum_of_file(path: Path) -> int:
    checksum = Checksum()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum.add(block)
    return checksum.value
