"""The machine itself: interpreter, cores, memory, open files, disk, clock, RDMA, GPUs and their driver."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from stretto.base.files import SHARED_MEMORY
from stretto.base.process import num_cores, output_of, visible_gpus
from stretto.base.runtime import machine_bytes
from stretto_doctor.finding import Finding, bad, good, note, warn

PYTHONS = ((3, 11), (3, 13))
FILES_OF_A_BATCH = 4096
MIN_SHARED_BYTES, MIN_DISK_BYTES = 1 << 30, 10 << 30
SLOW_DISK_BYTES_PER_S = 100e6
PROBE_BYTES, PROBE_S = 64 << 20, 1.0
RDMA_CLASS = Path("/sys/class/infiniband")
_ADJTIMEX_ERROR = 5  # state TIME_ERROR: the clock is not synchronized
_TIMEX_BYTES = 208  # sizeof(struct timex)


def gib(num_bytes: float) -> str:
    """`12.3 GiB`, or in MiB below 0.1 GiB."""
    if num_bytes < 0.1 * (1 << 30):
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def python() -> Iterator[Finding]:
    """The interpreter and the operating system."""
    first, last = (".".join(map(str, version)) for version in PYTHONS)
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield bad("python", text, f"use Python {first} to {last}: make PYTHON=/path/to/python3.12")
    elif sys.platform != "linux":
        yield bad("python", f"{text}: processes are watched by Linux calls", "use Linux")
    else:
        yield good("python", text)


def memory() -> Iterator[Finding]:
    """Cores and main memory, within the limits of a container."""
    yield good("cores, memory", f"{num_cores()} cores, {gib(machine_bytes())}")


def shared_memory() -> Iterator[Finding]:
    """/dev/shm, through which weights are sent to engines of this machine."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        fix = 'mount a tmpfs there, or set weight_broadcast.type = "filesystem"'
        yield bad("shared memory", f"{SHARED_MEMORY}: {error.strerror}", fix)
        return
    text = f"{SHARED_MEMORY} has {gib(free)} free"
    if free < MIN_SHARED_BYTES:
        fix = 'docker run --shm-size=16g (Kubernetes: an emptyDir in memory), or weight_broadcast.type = "filesystem"'
        yield warn("shared memory", f"{text}: weights larger than that cannot be handed over", fix)
    else:
        yield good("shared memory", text)


def open_files() -> Iterator[Finding]:
    """The limit of open files: each running request needs a socket on both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{hard} open files allowed (now {soft}; processes raise it)"
    if hard < FILES_OF_A_BATCH:
        fix = f"ulimit -Hn {16 * FILES_OF_A_BATCH} as root, or LimitNOFILE= of the service"
        yield warn("open files", f"{text}: about {hard // 2} rollouts in flight", fix)
    else:
        yield good("open files", text)


def disk(directory: Path) -> Iterator[Finding]:
    """Free space of a directory's disk, and how fast it writes."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    try:
        speed = write_speed(there)
    except OSError as error:
        fix = f"choose another with --output-dir, or: chown {os.getuid()} {there}"
        yield bad("disk", f"{directory}: cannot be written: {error.strerror}", fix)
        return
    text = f"{directory}: {gib(free)} free, writes {speed / 1e6:.0f} MB/s"
    if free < MIN_DISK_BYTES:
        yield warn("disk", text, "free some, or put runs elsewhere with --output-dir")
    elif speed < SLOW_DISK_BYTES_PER_S:
        fix = "keep checkpoints rarer (ckpt.interval), or put runs on a local disk with --output-dir"
        yield warn("disk", f"{text}: checkpoints of large models take minutes", fix)
    else:
        yield good("disk", text)


def write_speed(directory: Path) -> float:
    """Bytes per second at which a file is written and flushed to the disk; takes at most about PROBE_S."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".stretto-doctor-") as file:
        start, num_bytes = time.perf_counter(), 0
        while num_bytes < PROBE_BYTES and time.perf_counter() - start < PROBE_S:
            num_bytes += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - start)


def clock() -> Iterator[Finding]:
    """Whether the kernel's clock is synchronized, as by NTP; logs of several hosts are merged by time."""
    buffer = (ctypes.c_char * _TIMEX_BYTES)()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (AttributeError, OSError):
        return
    if state == _ADJTIMEX_ERROR:
        text = "not synchronized: with several hosts, logs and timelines are out of order"
        yield note("clock", text, "timedatectl set-ntp true, or start chrony")
    elif state >= 0:
        yield good("clock", "synchronized")


def gpus() -> Iterator[Finding]:
    """GPUs that processes here may use, their driver and their free memory."""
    names = visible_gpus()
    if not names:
        hidden = "CUDA_VISIBLE_DEVICES hides all" if "CUDA_VISIBLE_DEVICES" in os.environ else "none"
        yield note("GPUs", f"{hidden}: everything runs on the CPU, for small models")
        return
    query = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    listing = output_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    if listing is None:
        fix = "install the NVIDIA driver, or run the container with --gpus all"
        yield bad("GPUs", f"{len(names)} GPUs, and nvidia-smi does not answer", fix)
        return
    rows = [line.split(",")[:6] for line in listing.splitlines() if line.count(",") >= 5]
    for index, name, driver, total, used, errors in ([cell.strip() for cell in row] for row in rows):
        text = f"{name}, driver {driver}, {used} of {total} MiB used"
        if errors.isdecimal() and int(errors):
            fix = "nvidia-smi -q -d ECC; leave it out with CUDA_VISIBLE_DEVICES, and have it reset"
            yield warn(f"GPU {index}", f"{text}; {errors} memory errors", fix)
        elif total.isdecimal() and used.isdecimal() and int(used) > 0.05 * int(total):
            yield warn(f"GPU {index}", f"{text}: somebody uses it", "nvidia-smi shows who")
        else:
            yield good(f"GPU {index}", text)


def rdma() -> Iterator[Finding]:
    """InfiniBand and RoCE devices, with which NCCL and cache transfers between hosts are fast."""
    devices = sorted(RDMA_CLASS.glob("*")) if RDMA_CLASS.is_dir() else []
    if not devices:
        yield note("RDMA", "no device: between hosts weights and caches go by TCP")
        return
    active = [device.name for device in devices if _is_active(device)]
    if not active:
        yield warn("RDMA", f"{len(devices)} devices, no port is active", "ibstat shows why")
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"active: {', '.join(active)}"
    if soft != resource.RLIM_INFINITY and soft < 1 << 30:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield warn("RDMA", f"{text}; only {soft} bytes may be locked in memory", fix)
    elif not Path("/dev/infiniband").is_dir():
        fix = "docker run --device=/dev/infiniband"
        yield warn("RDMA", f"{text}; /dev/infiniband is not in this container", fix)
    else:
        yield good("RDMA", text)


def _is_active(device: Path) -> bool:
    return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))
