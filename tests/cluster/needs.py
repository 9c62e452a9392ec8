"""What a test of a cluster needs and this machine does not have."""

from __future__ import annotations

import functools
import shutil
import subprocess
from importlib.util import find_spec

import pytest


def find_missing(mark: pytest.Mark) -> list[str]:
    """The programs and modules that a test names and this machine does not have."""
    programs = [name for name in mark.args if shutil.which(name) is None]
    return programs + [name for name in mark.kwargs.get("modules", ()) if find_spec(name) is None]


@functools.cache
def find_refusal() -> str:
    """Why no host with a network of its own can be made; "" if it can. What this makes goes with its command."""
    words = "mount --make-rprivate / && ip link add probe type bridge && ip link add one type veth peer name two"
    try:
        ended = subprocess.run(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        return str(error)
    return (ended.stderr.strip() or f"exit status {ended.returncode}") if ended.returncode else ""
