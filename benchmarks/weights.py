"""A weight update, publisher to tensors in another process: milliseconds by transport and size.

    python benchmarks/weights.py [--quick] [--size SIZE] [--transport TYPE] [--rounds N]

The publisher is this process; the receiver is another one, as trainer and engine are, told of a version
through a pipe. `publish_ms`: model to shared memory, disk or buckets, checksum included where files have one: what
the trainer waits for. `receive_ms`: map or receive, verify, copy into the engine's tensors; the embedded engine stands
still for the copy alone. `update_ms`: both, and the message. `publish_times_one_copy` and `receive_times_one_copy`:
over the time of one plain copy of the same bytes, which is taken after every update; `copies`: likewise update_ms.
`publish_cpu_copies` and `receive_cpu_copies`: the processor's time, over that of one copy. `GBps` and `memcpy_GBps` say
update and copy as rates. The first updates pay for fresh memory; figures are of the later ones.

`beside` (of the big models): how fast the publisher's process computes, products of matrices, while the receiver
receives, over how fast it does alone: a trainer goes on with its next step. Every other update is for that.

With changes only (`delta`) the model is bfloat16 and one weight in a hundred is new in each version.
`wire_MB`: what travels.
`pays_below_MBps`: the wire on which changes begin to be faster than all weights: bytes saved by milliseconds added;
null: they were faster on this one.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch

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

LONG_BYTES = 100_000_000
"""Bytes whose way takes long enough to compute meanwhile."""
NUM_FIRST = 4
"""Updates that are not timed: each of two files is written once while it grows, and once more."""


def model(num_parameters: int) -> list[tuple[str, torch.Tensor]]:
    """Matrices of 128 x 128, as a small transformer has, or of 1024 x 1024."""
    side = 128 if num_parameters * 4 < LONG_BYTES else 1024
    return [(f"layers.{i}.weight", torch.randn(side, side)) for i in range(num_parameters // side**2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def receiver() -> None:
    """The engine's part: answers every manifest with the milliseconds, and the processor's milliseconds, it took."""
    held: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        manifest = msgspec.json.decode(line, type=WeightManifest)
        started, cpu = time.perf_counter(), time.process_time()
        group = WeightGroup(request=str(manifest.version), world_size=1, rank=0)
        with receive(manifest, group) as tensors:
            for name, tensor in tensors:
                if name not in held:
                    held[name] = torch.empty_like(tensor)
                held[name].copy_(tensor)
        print((time.perf_counter() - started) * 1e3, (time.process_time() - cpu) * 1e3, flush=True)


class Copy:
    """One copy of all bytes into memory that is there; of a big model a part is copied."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        size = tensors[0][1].nbytes
        part = tensors[: max(1, 4 * LONG_BYTES // size)]
        self._pairs, self._factor = [(tensor.clone(), tensor) for _, tensor in part], len(tensors) / len(part)

    def ms(self) -> tuple[float, float]:
        """Milliseconds, and the processor's."""
        started, cpu = time.perf_counter(), time.process_time()
        for target, tensor in self._pairs:
            target.copy_(tensor)
        took = time.perf_counter() - started, time.process_time() - cpu
        return took[0] * 1e3 * self._factor, took[1] * 1e3 * self._factor


class Work:
    """What the trainer does meanwhile: products of matrices, as many as there is time for."""

    def __init__(self, engine: subprocess.Popen[str]) -> None:
        self._a, self._out = torch.randn(192, 192), torch.empty(192, 192)
        self._answer = selectors.DefaultSelector()
        self._answer.register(engine.stdout, selectors.EVENT_READ)

    def until_answer(self) -> float:
        """Products per second until the engine answers."""
        started, count = time.perf_counter(), 0
        while not self._answer.select(0):
            torch.mm(self._a, self._a, out=self._out)
            count += 1
        return count / (time.perf_counter() - started)

    def alone(self, duration_s: float) -> float:
        """Products per second for so long, while nothing is sent."""
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < duration_s:
            self._answer.select(0)
            torch.mm(self._a, self._a, out=self._out)
            count += 1
        return count / (time.perf_counter() - started)


def change(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """One weight in a hundred gets another value."""
    for _, tensor in tensors:
        flat = tensor.view(-1)
        flat[torch.randint(0, len(flat), (len(flat) // 100,))] += 0.25


def measure(
    cfg: WeightBroadcast, num_parameters: int, rounds: int, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    tensors = [(name, tensor.to(dtype)) for name, tensor in model(num_parameters)]
    taken: dict[str, list[float]] = {"publish_ms": [], "receive_ms": [], "update_ms": []}
    processor: dict[str, list[float]] = {"publish": [], "receive": [], "copy": []}
    command = [sys.executable, __file__, "--receiver"]
    with (
        tempfile.TemporaryDirectory() as work,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine,
    ):
        publisher = build_publisher(cfg, RunDir(Path(work)), "benchmark")
        meanwhile, rates = Work(engine), []
        copy, copies_ms = Copy(tensors), []
        for version in range(rounds + NUM_FIRST):
            if dtype == torch.bfloat16:
                change(tensors)
            started, cpu = time.perf_counter(), time.process_time()
            manifest = publisher.publish(version, tensors)
            published, publish_cpu_ms = time.perf_counter(), (time.process_time() - cpu) * 1e3
            engine.stdin.write(msgspec.json.encode(manifest).decode() + "\n")
            engine.stdin.flush()
            is_working = version % 2 == 0
            beside = meanwhile.until_answer() if is_working else 0.0
            receive_ms, receive_cpu_ms = map(float, engine.stdout.readline().split())
            done = time.perf_counter()
            publisher.release(version - 1)
            copy_ms, copy_cpu_ms = copy.ms()
            copies_ms.append(copy_ms)
            if version >= NUM_FIRST and is_working:
                rates.append(beside / meanwhile.alone(min(receive_ms / 1e3, 0.5)))
            elif version >= NUM_FIRST:
                taken["publish_ms"].append((published - started) * 1e3)
                taken["receive_ms"].append(receive_ms)
                taken["update_ms"].append((done - started) * 1e3)
                for name, value in zip(processor, (publish_cpu_ms, receive_cpu_ms, copy_cpu_ms)):
                    processor[name].append(value)
        publisher.close()
        engine.stdin.close()
    found = {name: round(statistics.median(values), 3) for name, values in taken.items()}
    cpu_ms = {name: statistics.median(values) for name, values in processor.items()}
    size, memcpy_ms = sum(tensor.nbytes for _, tensor in tensors), statistics.median(copies_ms[1:])
    return (
        found
        | {
            "wire_MB": round(manifest.sent_bytes / 1e6, 3),
            "publish_times_one_copy": round(found["publish_ms"] / memcpy_ms, 2),
            "receive_times_one_copy": round(found["receive_ms"] / memcpy_ms, 2),
            "publish_cpu_copies": round(cpu_ms["publish"] / cpu_ms["copy"], 2),
            "receive_cpu_copies": round(cpu_ms["receive"] / cpu_ms["copy"], 2),
            "copies": round(found["update_ms"] / memcpy_ms, 2),
            "GBps": round(size / found["update_ms"] / 1e6, 3),
            "memcpy_GBps": round(size / memcpy_ms / 1e6, 3),
        }
        | ({"beside": round(statistics.median(rates), 2)} if size > LONG_BYTES else {})
    )


def compare_changes(cfg: WeightBroadcast, num_parameters: int, rounds: int) -> dict[str, float | None]:
    """All weights against changes only, of the same bfloat16 model."""
    whole = measure(cfg, num_parameters, rounds, torch.bfloat16)
    section = DeltaSection(max_links=rounds + NUM_FIRST)
    if hasattr(cfg, "port"):
        cfg = cfg.model_copy(update={"port": free_port()})
    changes = measure(cfg.model_copy(update={"delta": section}), num_parameters, rounds, torch.bfloat16)
    added_ms = changes["update_ms"] - whole["update_ms"]
    pays = round((whole["wire_MB"] - changes["wire_MB"]) / added_ms * 1e3) if added_ms > 0 else None
    found = {f"bf16_{name}": value for name, value in whole.items()}
    return found | {f"delta_{name}": v for name, v in changes.items()} | {"delta_pays_below_MBps": pays}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no big model")
    parser.add_argument("--size", choices=["1MB", "4MB", "400MB", "2GB"], help="one size")
    parser.add_argument("--transport", choices=["shm", "filesystem", "collective"], help="one way, all weights")
    parser.add_argument("--rounds", type=int, help="updates after the first ones, of which every other one is timed")
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.receiver:
        return receiver()
    sizes = {"1MB": (262_144, 20 if args.quick else 200)}
    if not args.quick:
        sizes |= {"4MB": (1_000_000, 200), "400MB": (100_000_000, 6), "2GB": (500_000_000, 6)}
    if args.size is not None:
        sizes = {args.size: sizes[args.size]}
    figures: dict[str, float | None] = {}
    for size, (num_parameters, rounds) in sizes.items():
        rounds = args.rounds or rounds
        for cfg in (ShmWeights(), FilesystemWeights(), CollectiveWeights(port=free_port())):
            if args.transport not in (None, cfg.type):
                continue
            found = measure(cfg, num_parameters, rounds)
            print(f"{size} of float32, {cfg.type}: {found}", flush=True)
            figures.update({f"{cfg.type}_{size}_{name}": value for name, value in found.items()})
        for cfg in () if args.transport else (FilesystemWeights(), CollectiveWeights(port=free_port())):
            found = compare_changes(cfg, num_parameters, rounds)
            print(f"the same in bfloat16, {cfg.type}: {found}", flush=True)
            figures.update({f"{cfg.type}_{size}_{name}": value for name, value in found.items()})
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
