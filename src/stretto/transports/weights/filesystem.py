"""Weights as safetensors files under RUN/broadcasts/version_N, with manifest.json written last.

A version is written into a hidden directory beside its place and renamed into it, so that whoever sees
`version_N` sees all of it. Needs a file system that trainer and engines share. Any safetensors reader can
load the shards. Of several trainer ranks each writes files of its own, and the first one puts them together.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from stretto.base.errors import EngineError
from stretto.records.weights import MANIFEST, TensorEntry, WeightManifest
from stretto.transports.weights.layout import ONE_RANK, Named, Part, Ranks, checksum_of, dtype_name, joined

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
_VERSION = re.compile(r"version_(\d+)$")


class FilesystemPublisher:
    """Keeps the newest `keep_versions` versions and every one that was not released."""

    def __init__(
        self,
        directory: Path,
        *,
        keep_versions: int,
        shard_bytes: int = SHARD_BYTES,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._directory = directory
        self._keep_versions = keep_versions
        self._shard_bytes, self._ranks = shard_bytes, ranks
        self._in_use: set[int] = set()  # published by this process and not yet released
        directory.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            for path in directory.glob(".version_*"):  # half-written by a process that died
                shutil.rmtree(path, ignore_errors=True)
        ranks.gather(None)  # nobody writes before that

    def publish(self, version: int, tensors: Iterable[Named]) -> WeightManifest:
        started = time.perf_counter()
        ranks, final = self._ranks, self._directory / f"version_{version}"
        partial = self._directory / f".version_{version}.{ranks.rank}.{os.getpid()}"
        try:
            told = ranks.gather((partial.name, self._write(partial, tensors)))
            found = joined(part for _, part in told)
            manifest = WeightManifest(
                version=version,
                transport="filesystem",
                location=str(final.resolve()),
                shards=found.shards,
                tensors=found.tensors,
                checksum=checksum_of(found.checksums),
            )
            if ranks.rank == 0:
                for name, part in told[1:]:
                    self._take_over(self._directory / name, part, partial)
                (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
                if final.exists():  # of an earlier life of this run
                    final.rename(doomed := self._directory / f".version_{version}.old.{os.getpid()}")
                    shutil.rmtree(doomed, ignore_errors=True)
                partial.rename(final)
        except OSError as cause:
            raise EngineError(
                f"weights of version {version} in {final}: {cause}; free some space."
            ) from cause
        if ranks.rank == 0:
            self._in_use.add(version)
            self._prune(newest=version)
        logger.debug("published version=%d in %.3fs", version, time.perf_counter() - started)
        return manifest

    def _write(self, partial: Path, tensors: Iterable[Named]) -> Part:
        """This rank's files, in a directory of its own."""
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
            checksums.append(_crc_of_file(path))
            shards.append(path.name)
        return Part(tuple(shards), tuple(checksums), tuple(entries))

    @staticmethod
    def _take_over(directory: Path, part: Part, target: Path) -> None:
        """Another rank's files become part of the version."""
        for shard in part.shards:
            (directory / shard).rename(target / shard)
        directory.rmdir()

    def release(self, version: int) -> None:
        self._in_use = {held for held in self._in_use if held > version}

    def close(self) -> None:
        """The newest versions stay: an engine may be started from them."""
        self._in_use.clear()

    def _prune(self, newest: int) -> None:
        """Versions beyond `newest` are of an undone life of the run."""
        found = {
            int(match[1]): path for path in self._directory.iterdir() if (match := _VERSION.match(path.name))
        }
        kept = set(sorted(v for v in found if v <= newest)[-self._keep_versions :]) | self._in_use
        for version, path in found.items():
            if version not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _split(tensors: Iterable[Named], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in order, in parts of at most `shard_bytes` (or one tensor)."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        dtype_name(name, tensor)
        if part and size + tensor.nbytes > shard_bytes:
            yield part
            part, size = {}, 0
        # A copy of its own: safetensors refuses tensors that share memory, as tied or sliced weights do.
        part[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if part:
        yield part


def _entries(path: Path, shard: int, tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    """Where safetensors put each tensor, read from the header it wrote: length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(length))
    entries = []
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        dtype = dtype_name(name, tensor)
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), shard, 8 + length + start, end - start))
    return entries


def _crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
