"""What devices can do: peaks, memory, bandwidths and links, each with its source; and the share of it that is reached.

Figures of GPUs are the makers' data sheets, dense (without sparsity), per device, links per direction. Shares of a
peak that real kernels reach are assumptions, and each names where it comes from. The CPU is measured when it is asked
for: half a second of numpy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from stretto.base.errors import ConfigError
from stretto.base.runtime import machine_bytes

GIB = float(1 << 30)


@dataclass(frozen=True)
class Hardware:
    """One kind of device."""

    name: str
    memory_bytes: float
    bandwidth: float
    """To its own memory, bytes per second."""
    flops: dict[str, float]
    """Peak of matrix products, operations per second, by type: float32, bfloat16, float8."""
    link_bandwidth: float
    """To the other devices of its node, bytes per second and direction."""
    network_bandwidth: float
    """Its share of the node's network, bytes per second and direction."""
    host_bandwidth: float
    """To the memory of its host, bytes per second and direction."""
    reserved_bytes: float
    """Taken before the first tensor: contexts, communication buffers."""
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    """By figure: where it is from."""
    is_cpu: bool = False
    op_s: float = 4e-6
    """Least time of one operation, as its launch costs it."""

    def peak(self, dtype: str) -> float:
        """Operations per second in a type; the next wider one where a device has no such products."""
        order = ("float8", "bfloat16", "float32")
        for name in order[order.index(dtype) :]:
            if name in self.flops:
                return self.flops[name]
        raise AssertionError(f"{self.name} has no {dtype}")


@dataclass(frozen=True)
class Reached:
    """Shares of the peaks that programs reach; assumptions, which `describe` lists."""

    training: float = 0.40
    """Share of the peak of products, in forward and backward passes."""
    training_fp8: float = 0.25
    """Share of the 8-bit peak there: rounding, and what stays in 16 bits, take more of the time."""
    prefill: float = 0.45
    """Share of the peak of products, while prompts are read."""
    attention: float = 0.35
    """Share of the 16-bit peak, in attention over long rows."""
    bandwidth: float = 0.65
    """Share of the memory's bandwidth, while tokens are written."""
    links: float = 0.70
    """Share of the bandwidth of links and networks."""
    experts: float = 0.60
    """Share of the rate of training, where tokens travel to experts on other devices."""

    def describe(self) -> list[str]:
        """One line per assumption."""
        return [
            f"training reaches {self.training:.0%} of the peak of products ({self.training_fp8:.0%} of the 8-bit "
            "one); peers publish 15 to 37 % of it for whole steps at 16k to 65k tokens (prime-rl, benchmarks/results)",
            f"reading prompts reaches {self.prefill:.0%} of the peak, attention over long rows {self.attention:.0%} of "
            "the 16-bit peak",
            f"writing tokens reaches {self.bandwidth:.0%} of the memory's bandwidth, links {self.links:.0%} of theirs",
            f"expert parallelism keeps {self.experts:.0%} of the speed (exchange of tokens, unequal loads)",
        ]


_TB, _GB = 1e12, 1e9
_NVIDIA = "NVIDIA data sheet"


def _gpu(
    name: str,
    gigabytes: float,
    bandwidth: float,
    bfloat16: float,
    float8: float | None,
    link: float,
    network: float,
    host: float,
    notes: str,
) -> Hardware:
    flops = {"float32": bfloat16 / 8, "bfloat16": bfloat16} | ({} if float8 is None else {"float8": float8})
    sheet = f"{_NVIDIA}, {name}"
    sources = {
        "memory": f"{sheet}: {gigabytes:g} GB",
        "bandwidth": f"{sheet}: {bandwidth / _TB:g} TB/s",
        "bfloat16": f"{sheet}: {bfloat16 / _TB:g} TFLOP/s, dense",
        "float8": f"{sheet}: {float8 / _TB:g} TFLOP/s, dense" if float8 else "no 8-bit products",
        "links": notes.split("; ")[0],
        "network": notes.split("; ")[1],
        "host": notes.split("; ")[2],
        "reserved": "assumed: 2 GB for the CUDA context, cuBLAS and NCCL",
    }
    return Hardware(name, gigabytes * 1e9, bandwidth, flops, link, network, host, 2 * _GB, sources)


GPUS: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "H100", 80, 3.35 * _TB, 989 * _TB, 1979 * _TB, 450 * _GB, 50 * _GB, 64 * _GB,
            "NVLink 4: 900 GB/s both ways; DGX H100: 400 Gb/s per GPU; PCIe 5 x16: 64 GB/s",
        ),
        _gpu(
            "H200", 141, 4.8 * _TB, 989 * _TB, 1979 * _TB, 450 * _GB, 50 * _GB, 64 * _GB,
            "NVLink 4: 900 GB/s both ways; DGX H200: 400 Gb/s per GPU; PCIe 5 x16: 64 GB/s",
        ),
        _gpu(
            "B200", 180, 7.7 * _TB, 2250 * _TB, 4500 * _TB, 900 * _GB, 50 * _GB, 64 * _GB,
            "NVLink 5: 1800 GB/s both ways; DGX B200: 400 Gb/s per GPU; PCIe 5 x16: 64 GB/s",
        ),
        _gpu(
            "A100", 80, 2.039 * _TB, 312 * _TB, None, 300 * _GB, 25 * _GB, 32 * _GB,
            "NVLink 3: 600 GB/s both ways; DGX A100: 200 Gb/s per GPU; PCIe 4 x16: 32 GB/s",
        ),
        _gpu(
            "L40S", 48, 0.864 * _TB, 362 * _TB, 733 * _TB, 32 * _GB, 25 * _GB, 32 * _GB,
            "no NVLink, PCIe 4 x16: 32 GB/s; assumed: 200 Gb/s per GPU; PCIe 4 x16: 32 GB/s",
        ),
    )
}  # fmt: skip


@cache
def this_cpu() -> Hardware:
    """One core of this machine, measured with numpy's products and copies (half a second)."""
    flops, bandwidth = _products(), _copies()
    measured = "measured now, one core: numpy"
    return Hardware(
        "CPU",
        float(machine_bytes()),
        bandwidth,
        {"float32": flops, "bfloat16": flops},
        bandwidth / 2,
        1.25 * _GB,
        bandwidth,
        0.33 * GIB,
        {
            "memory": "this machine's",
            "bandwidth": f"{measured} copies",
            "float32": f"{measured} products",
            "bfloat16": "as float32",
            "links": "half a copy's rate: written once, read once",
            "network": "assumed: 10 Gb/s",
            "reserved": "assumed: Python, torch and our modules, 0.33 GiB (resident set of an idle trainer)",
        },
        is_cpu=True,
        op_s=1.5e-5,
    )


def _products(size: int = 512, seconds: float = 0.3) -> float:
    """Operations per second of float32 products on one thread: the fastest, for others may use this core too."""
    left = np.random.default_rng(0).random((size, size), dtype=np.float32)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(4):
            left @ left
        # numpy may use several threads: the processor time of all of them counts.
        best = min(best, max(time.process_time() - used, time.perf_counter() - began))
    return 4 * 2 * size**3 / best


def _copies(num_bytes: int = 1 << 26, times: int = 6) -> float:
    """Bytes per second, read and written: the best of several copies that are larger than any cache."""
    source, target = np.ones(num_bytes // 8), np.empty(num_bytes // 8)
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def find_hardware(name: str | None, num_gpus: int) -> Hardware:
    """The hardware of a name; None: this CPU if the run asks for no GPUs, else H100.

    Raises: ConfigError for an unknown name.
    """
    if name is None:
        return this_cpu() if num_gpus == 0 else GPUS["H100"]
    known = {key.lower(): gpu for key, gpu in GPUS.items()} | {"cpu": None}
    if name.lower() not in known:
        raise ConfigError(f"--gpu {name}: not in the table; one of {', '.join(GPUS)}, or CPU for this machine")
    return known[name.lower()] or this_cpu()
