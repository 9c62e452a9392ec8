"""Versions of an adapter that vLLM's workers merge into their base weights: time, and bytes read from disk.

    python benchmarks/adapter_updates.py [--quick]

Workers are processes that merge as inference/vllm/base.py does, without vLLM. Before each version the pages of the
model's files are dropped, as on a host whose memory is needed elsewhere. One side maps the files, the other has shared
memory, in turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from stretto.base.files import SHARED_MEMORY
from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.models.hub import random_model, save_hf
from stretto.models.lora import Adapter, attach_adapters
from stretto_vllm.base import BaseWeights

LORA = LoRASection(rank=16, alpha=32.0)


def shape(*, is_quick: bool) -> ScratchSection:
    width = 512 if is_quick else 1024
    return ScratchSection(
        hidden_size=width, intermediate_size=4 * width, num_layers=4 if is_quick else 12, num_heads=width // 64,
        num_kv_heads=width // 64, head_dim=64,
    )  # fmt: skip


def drop_pages(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def unmap_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Let this process give up the pages that it has mapped; they are mapped again when they are read."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for tensor in tensors:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(start, tensor.data_ptr() + tensor.nbytes - start, mmap.MADV_DONTNEED)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def work(directory: Path, pairs: dict[str, torch.Tensor], is_shared: bool, pipe: Connection) -> None:
    """A worker: merges one version for each message; answers with seconds and bytes read."""
    torch.set_num_threads(1)
    weights = BaseWeights(directory, SHARED_MEMORY if is_shared else Path("/nowhere"))
    while pipe.recv():
        unmap_pages(weights.tensors)
        pipe.send(None)
        pipe.recv()
        read, started = bytes_from_disk(), time.perf_counter()
        for _, tensor in weights.merge(pairs.items(), LORA.rank, LORA.alpha / LORA.rank, torch.device("cpu")):
            tensor.sum()
        pipe.send((time.perf_counter() - started, bytes_from_disk() - read))
    weights.close()


class Workers:
    """Processes that merge the same versions."""

    def __init__(self, count: int, *words: object) -> None:
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(*words, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def version(self, directory: Path) -> tuple[float, int]:
        """The slowest worker's seconds, and the bytes that all of them read from disk."""
        for pipe in self.pipes:
            pipe.send(True)
            pipe.recv()
        drop_pages(directory)
        for pipe in self.pipes:
            pipe.send(True)
        answers = [pipe.recv() for pipe in self.pipes]
        return max(seconds for seconds, _ in answers), sum(num_bytes for _, num_bytes in answers)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, help="on a disk; the default is the one for temporary files")
    words = parser.parse_args()
    num_versions = 3 if words.quick else 6
    with tempfile.TemporaryDirectory(dir=words.directory) as name:
        directory = Path(name)
        model = random_model(shape(is_quick=words.quick), 1000)
        save_hf(model, directory)
        num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        os.sync()  # pages that are not written yet cannot be dropped
        attach_adapters(model, LORA)
        pairs = {key: tensor.detach().clone() for key, tensor in Adapter.of(model).tensors()}
        del model
        sides = {kind: Workers(2, directory, pairs, kind == "shared") for kind in ("files", "shared")}
        found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in sides}
        for _ in range(num_versions):
            for kind, workers in sides.items():
                found[kind].append(workers.version(directory))
        for workers in sides.values():
            workers.close()
    figures: dict[str, object] = {"model_bytes": num_bytes, "workers": 2}
    for kind, versions in found.items():
        later = versions[1:]
        figures[kind] = {
            "first_s": round(versions[0][0], 3),
            "later_s": round(statistics.median(seconds for seconds, _ in later), 3),
            "first_read_bytes": versions[0][1],
            "later_read_bytes": int(statistics.median(count for _, count in later)),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
