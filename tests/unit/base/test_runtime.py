"""What a process asks of the interpreter and the C library."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.base import runtime

HAS_GLIBC = "gnu" in (sys.implementation._multiarch or "")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

HEAP = """
import ctypes, re, resource, threading
from pathlib import Path
from stretto.base.runtime import keep_freed_memory

assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
found = []
threads = [threading.Thread(target=lambda: found.append(libc.malloc(8 << 20))) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
for address in (start + (4 << 20) for start in found):
    (own,) = [m for m in maps[1:] if (b := [int(x, 16) for x in m.split()[0].split("-")])[0] <= address < b[1]]
    print("[heap]" in own, " hg" in own.split("VmFlags:")[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10)
"""


@pytest.mark.skipif(not (HAS_GLIBC and THP.exists()), reason="huge pages of glibc's heap")
def test_tensors_of_every_thread_lie_in_one_heap_of_huge_pages_that_takes_no_memory_before_it_is_used():
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True"] * 5, done.stdout + done.stderr


LITTLE = """
import resource
from pathlib import Path
from stretto.base.runtime import keep_freed_memory

pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), resource.RLIM_INFINITY))
keep_freed_memory()
print("went on")
"""


@pytest.mark.skipif(not HAS_GLIBC, reason="glibc's heap")
def test_a_process_without_room_for_a_large_heap_goes_on():
    done = subprocess.run([sys.executable, "-c", LITTLE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "went on\n", done.stdout + done.stderr


@pytest.mark.heavy
def test_nothing_is_collected_while_importing_and_what_was_imported_is_never_searched() -> None:
    before = gc.get_freeze_count()
    with runtime.importing():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    try:
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()
