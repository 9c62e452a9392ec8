"""The machine itself: interpreter, cores, memory, open files, disk, clock, RDMA, GPUs and their driver."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from stretto.base.process import num_cores, visible_gpus
from stretto.base.runtime import machine_bytes
from stretto.doctor.finding import Finding, State

PYTHONS = ((3, 11), (3, 13))
FILES_OF_A_BATCH = 4096
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED, LEAST_DISK = 1 << 30, 10 << 30
SLOW_DISK_BYTES_PER_S = 100e6
PROBE_BYTES, PROBE_S = 64 << 20, 1.0
COMMAND_TIMEOUT_S = 8.0
RDMA_CLASS = Path("/sys/class/infiniband")
_ADJTIMEX_ERROR, _TIMEX_BYTES = (
    5,
    208,
)  # state TIME_ERROR: the clock is not synchronized; sizeof(struct timex)


def gib(num_bytes: float) -> str:
    """`12.3 GiB`, or `45.6 MiB` of less than a tenth of one."""
    return (
        f"{num_bytes / (1 << 30):.1f} GiB"
        if num_bytes >= 0.1 * (1 << 30)
        else f"{num_bytes / (1 << 20):.1f} MiB"
    )


def python() -> Iterator[Finding]:
    """The interpreter, and whether this is an environment of its own."""
    first, last = (".".join(map(str, version)) for version in PYTHONS)
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Finding(
            "python", State.BAD, text, f"use Python {first} to {last}: make PYTHON=/path/to/python3.12"
        )
    elif sys.platform != "linux":
        yield Finding("python", State.BAD, f"{text}: processes are watched by Linux calls", "use Linux")
    else:
        yield Finding("python", State.GOOD, text)


def memory() -> Iterator[Finding]:
    """Cores and main memory, as far as a container's limits allow them."""
    yield Finding("cores, memory", State.GOOD, f"{num_cores()} cores, {gib(machine_bytes())}")


def shared_memory() -> Iterator[Finding]:
    """/dev/shm, through which weights go to engines of this machine."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        fix = 'mount a tmpfs there, or set weight_broadcast.type = "filesystem"'
        yield Finding("shared memory", State.BAD, f"{SHARED_MEMORY}: {error.strerror}", fix)
        return
    text = f"{SHARED_MEMORY} has {gib(free)} free"
    if free < LEAST_SHARED:
        fix = 'docker run --shm-size=16g (Kubernetes: an emptyDir in memory), or weight_broadcast.type = "filesystem"'
        yield Finding(
            "shared memory", State.WARN, f"{text}: weights larger than that cannot be handed over", fix
        )
    else:
        yield Finding("shared memory", State.GOOD, text)


def open_files() -> Iterator[Finding]:
    """The limit of open files: each running request has a socket at both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{hard} open files allowed (now {soft}; processes raise it)"
    if hard < FILES_OF_A_BATCH:
        fix = f"ulimit -Hn {16 * FILES_OF_A_BATCH} as root, or LimitNOFILE= of the service"
        yield Finding("open files", State.WARN, f"{text}: about {hard // 2} rollouts in flight", fix)
    else:
        yield Finding("open files", State.GOOD, text)


def disk(directory: Path) -> Iterator[Finding]:
    """Free space of a directory's disk, and how fast it writes."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    try:
        speed = write_speed(there)
    except OSError as error:
        fix = f"choose another with --output-dir, or: chown {os.getuid()} {there}"
        yield Finding("disk", State.BAD, f"{directory}: cannot be written: {error.strerror}", fix)
        return
    text = f"{directory}: {gib(free)} free, writes {speed / 1e6:.0f} MB/s"
    if free < LEAST_DISK:
        yield Finding("disk", State.WARN, text, "free some, or put runs elsewhere with --output-dir")
    elif speed < SLOW_DISK_BYTES_PER_S:
        fix = "keep checkpoints rarer (ckpt.interval), or put runs on a local disk with --output-dir"
        yield Finding("disk", State.WARN, f"{text}: checkpoints of large models take minutes", fix)
    else:
        yield Finding("disk", State.GOOD, text)


def write_speed(directory: Path) -> float:
    """Bytes per second of a file that is written and flushed to the disk; takes about a second at most."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".stretto-doctor-") as file:
        start, num_bytes = time.perf_counter(), 0
        while num_bytes < PROBE_BYTES and time.perf_counter() - start < PROBE_S:
            num_bytes += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - start)


def clock() -> Iterator[Finding]:
    """Whether the kernel's clock is kept by NTP or the like; logs of several hosts are merged by time."""
    buffer = (ctypes.c_char * _TIMEX_BYTES)()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (AttributeError, OSError):
        return
    if state == _ADJTIMEX_ERROR:
        text = "not synchronized: with several hosts, logs and timelines are out of order"
        yield Finding("clock", State.NOTE, text, "timedatectl set-ntp true, or start chrony")
    elif state >= 0:
        yield Finding("clock", State.GOOD, "synchronized")


def gpus() -> Iterator[Finding]:
    """GPUs that processes here may use, their driver and their free memory."""
    names = visible_gpus()
    if not names:
        hidden = "CUDA_VISIBLE_DEVICES hides all" if "CUDA_VISIBLE_DEVICES" in os.environ else "none"
        yield Finding("GPUs", State.NOTE, f"{hidden}: everything runs on the CPU, for small models")
        return
    query = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    listing = output_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    if listing is None:
        fix = "install the NVIDIA driver, or run the container with --gpus all"
        yield Finding("GPUs", State.BAD, f"{len(names)} GPUs, and nvidia-smi does not answer", fix)
        return
    rows = [
        [cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.count(",") >= 5
    ]
    for index, name, driver, total, used, errors in (row[:6] for row in rows):
        text = f"{name}, driver {driver}, {used} of {total} MiB used"
        if errors.isdecimal() and int(errors):
            fix = "nvidia-smi -q -d ECC; leave it out with CUDA_VISIBLE_DEVICES, and have it reset"
            yield Finding(f"GPU {index}", State.WARN, f"{text}; {errors} memory errors", fix)
        elif total.isdecimal() and used.isdecimal() and int(used) > 0.05 * int(total):
            yield Finding(f"GPU {index}", State.WARN, f"{text}: somebody uses it", "nvidia-smi shows who")
        else:
            yield Finding(f"GPU {index}", State.GOOD, text)


def rdma() -> Iterator[Finding]:
    """InfiniBand and RoCE devices, by which NCCL and cache transfers are fast between hosts."""
    devices = sorted(RDMA_CLASS.glob("*")) if RDMA_CLASS.is_dir() else []
    if not devices:
        yield Finding("RDMA", State.NOTE, "no device: between hosts weights and caches go by TCP")
        return
    active = [device.name for device in devices if _is_active(device)]
    if not active:
        yield Finding("RDMA", State.WARN, f"{len(devices)} devices, no port is active", "ibstat shows why")
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"active: {', '.join(active)}"
    if soft != resource.RLIM_INFINITY and soft < 1 << 30:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield Finding("RDMA", State.WARN, f"{text}; only {soft} bytes may be locked in memory", fix)
    elif not Path("/dev/infiniband").is_dir():
        fix = "docker run --device=/dev/infiniband"
        yield Finding("RDMA", State.WARN, f"{text}; /dev/infiniband is not in this container", fix)
    else:
        yield Finding("RDMA", State.GOOD, text)


def _is_active(device: Path) -> bool:
    return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))


def output_of(argv: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """What a program prints; None if it is missing, fails or does not end."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
