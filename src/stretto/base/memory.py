"""How this process's C allocator treats big tensors."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_TOP_PAD = 64 << 20


def keep_freed_memory() -> bool:
    """Let glibc reuse freed tensors instead of giving them back; False where there is no glibc.

    By default every tensor above 128 KiB is mapped and unmapped anew, and its pages are faulted in and zeroed
    at each use: a fifth to a third of a small model's step on a CPU (measured in benchmarks/engine.py). Call
    once, at the start of a process that computes on the CPU.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, _TOP_PAD),
    )
    return all([mallopt(name, value) == 1 for name, value in settings])
