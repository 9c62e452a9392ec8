"""Compiles the C files of this folder for this machine, once, loads them, and declares their functions.

The library is kept in $XDG_CACHE_HOME/stretto (or ~/.cache/stretto); its name is a hash of the source, the compiler and
the processor. Without a C compiler there are no kernels, and their callers use torch's operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from stretto.base.files import cache_dir

logger = logging.getLogger(__name__)

LANES = 16
"""The kernels support widths that are multiples of this."""
DTYPES = (torch.float32, torch.bfloat16)

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("chosen.c", "kernels.c", "products.c", "training.c"))
_HEADER = Path(__file__).with_name("lanes.h")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
_COMPILE_S = 300
"""Many times what it takes: on a machine with twenty processes per core five seconds become a minute."""


@functools.cache
def find_library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with one line in the log, if this machine cannot compile them."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        logger.info("no C compiler (cc, or $CC): torch's operations are used, which are slower for small models")
        return None
    try:
        path = cache_dir() / f"kernels-{_fingerprint(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or error
        logger.warning(
            "cannot compile %s, so torch's operations are used, which are slower: %s", _HEADER.parent, message
        )
        return None


def _fingerprint(compiler: list[str]) -> str:
    """Hash of all that the library depends on; machines that share the directory may differ."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    sources = (path.read_text() for path in (_HEADER, *_SOURCES))
    facts = (*sources, *compiler, *_FLAGS, platform.machine(), platform.processor(), *features)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _compile(compiler: list[str], path: Path) -> None:
    """Write the library to `path`, whole or not at all; with OpenMP if the compiler has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        unfinished = Path(directory) / path.name
        command = [*compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(unfinished), "-lm"]
        run = lambda *flags: subprocess.run(
            [*command, *flags], check=True, capture_output=True, text=True, timeout=_COMPILE_S
        )
        try:
            run("-fopenmp")
        except subprocess.CalledProcessError:
            run()
        unfinished.replace(path)


def declare(function: ctypes._NamedFuncPointer, arguments: str) -> ctypes._NamedFuncPointer:
    """arguments: a letter for each, of pointers, int64, floats and ints; functions return nothing."""
    types: dict[str, type[ctypes._SimpleCData[Any]]] = {"p": c_void_p, "l": c_int64, "f": c_float, "i": c_int}
    function.argtypes, function.restype = [types[a] for a in arguments], None
    return function
