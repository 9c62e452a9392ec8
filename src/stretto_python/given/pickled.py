"""Objects that have no text, such as closures and instances with state, as pickles in the run directory.

A pickle runs code when it is opened. These are written by the user's own process out of objects that he passed to
`stretto.rl`, `sft` or `evaluate`, and opened only by the Python file beside them, which names the SHA-256 of each: a
file that has changed since is refused. So they can do what that file can do, and no more.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic

PYTHON = ".".join(map(str, sys.version_info[:2]))
"""Functions are pickled as byte code, which only the same minor version of Python reads."""


def pickled(value: Any, key: str) -> bytes:
    """A value as a pickle that another process can open; classes and functions of `__main__` are in it.

    key: where it was given, for messages.

    Raises: ConfigError for what cannot be pickled.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as cause:  # whatever __reduce__ of some class raises
        raise ConfigError(
            f"{key} = {value!r:.80} cannot be given to the processes of a run: {type(cause).__name__}: {cause}. "
            "Make locks, files, connections and models inside the function or class, when it is first called"
        ) from cause


def write(data: bytes, directory: Path, name: str) -> tuple[str, str]:
    """Write a pickle, which only its owner may read; its file name and its SHA-256."""
    digest = hashlib.sha256(data).hexdigest()
    file = f"{name}-{digest[:8]}.pickle"
    write_atomic(directory / file, data, mode=0o600)
    return file, digest


def opened(beside: str, file: str, sha256: str, python: str) -> Any:
    """The object in a pickle; beside: the Python file that names it, in the same directory.

    Raises: ConfigError for a file that has changed, or was written by another version of Python.
    """
    path = Path(beside).with_name(file)
    if python != PYTHON:
        raise ConfigError(
            f"{path} was written by Python {python}, and this is {PYTHON}; continue the run with Python {python}, or "
            "start it again from the script or notebook"
        )
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(
            f"{path} is not the file that was written with {beside}; start the run again from the script or notebook"
        )
    return pickle.loads(data)
