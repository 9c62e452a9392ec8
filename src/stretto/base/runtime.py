"""Settings of the interpreter, the C library and the operating system, made at the start of a process.

Garbage collection (the cyclic collector runs only after the process has grown by 1 GiB), memory (its size; reuse of
freed tensors), and the limit of open files.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

CHECK_INTERVAL_S = 1.0
GROWTH_BYTES = 1 << 30
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_TOP_PAD = 64 << 20
_HEAP, _HUGE_PAGE = 1 << 30, 2 << 20
_MADV_HUGEPAGE = 14


def collect_less() -> None:
    """Run the cyclic collector less often; call at the start of a process.

    Imports create a million objects that stay, and each collection would search them again.
    """
    gc.set_threshold(10_000, 20, 50)


@contextmanager
def importing() -> Iterator[None]:
    """Context in which the cyclic collector does not run; what was imported in it is never searched.

    For what takes longest to import: importing torch and the trainer takes a tenth less.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_objects() -> None:
    """Exclude all existing objects from garbage collection; call when a process has been set up."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def collect_on_growth() -> AsyncIterator[None]:
    """Collect garbage cycles only whenever the process has grown by GROWTH_BYTES.

    With ten thousand rollouts in flight, a full collection takes a second and Python's automatic partial ones take
    up to 250 ms; in measurements they freed nothing.
    """
    freeze_objects()
    gc.disable()
    collecting = asyncio.create_task(_collect_repeatedly(_peak_bytes()))
    try:
        yield
    finally:
        collecting.cancel()
        gc.freeze()
        gc.enable()


async def _collect_repeatedly(last_peak_bytes: int) -> None:
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        if _peak_bytes() > last_peak_bytes + GROWTH_BYTES:
            gc.collect()
            last_peak_bytes = _peak_bytes()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def machine_bytes() -> int:
    """Memory that this process may use: the machine's, limited by its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def available_bytes() -> int:
    """Memory that this process may still use: cached files count, and so does the limit of its container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if not limit.isdecimal():
        return free
    return max(0, min(free, int(limit) - int(used) + int(files.get("inactive_file", 0))))


def keep_freed_memory() -> bool:
    """Let glibc reuse the memory of freed tensors; returns False where there is no glibc.

    By default every tensor above 128 KiB gets new pages, which are faulted in and zeroed at each use: a fifth to a
    third of a small model's step on a CPU (measured in benchmarks/engine.py). The first GiB uses huge pages: with
    small ones, page table walks take a tenth of a step. Call once, at the start of a process that computes on the
    CPU.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (AttributeError, OSError):  # musl
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_ARENA_MAX, 1),  # all threads use the same heap
    )
    is_set = all([mallopt(name, value) == 1 for name, value in settings])
    _grow_heap(libc)
    return is_set and mallopt(_M_TOP_PAD, _TOP_PAD) == 1


def _grow_heap(libc: ctypes.CDLL) -> None:
    """Reserve _HEAP bytes of addresses for the heap, backed by huge pages once they are touched."""
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_M_TOP_PAD, _HEAP)
    block = libc.malloc(_LARGEST_MMAP_THRESHOLD // 2)
    if block is None:  # `ulimit -v` leaves no room: the heap grows as it needs to
        return
    start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    size = (libc.sbrk(0) - start) // _HUGE_PAGE * _HUGE_PAGE
    # Any other size means that the heap had no room to grow and the block lies outside of it.
    if _HEAP // 2 < size <= 2 * _HEAP:
        libc.madvise(start, size, _MADV_HUGEPAGE)
    libc.free(block)


def raise_file_limit() -> int:
    """Allow as many open files and sockets as the system permits; returns the new limit.

    Every running request needs a socket on both ends, and the usual soft limit of 1024 is less than a batch of
    rollouts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports a hard limit that it then refuses to set
        return soft
    return hard
