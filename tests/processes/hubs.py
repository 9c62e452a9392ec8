"""The Pythons that have the packages of hubs.

STRETTO_HUBS is a directory with a virtual environment for each: `openenv`, `harbor`, `nemo-gym` (docs/contributing.md).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest


def python_of(hub: str) -> str:
    """The Python that has the package of a hub; the test is skipped if there is none."""
    python = Path(os.environ.get("STRETTO_HUBS", "")) / hub / "bin" / "python"
    if "STRETTO_HUBS" in os.environ and python.exists():
        return str(python)
    if importlib.util.find_spec(hub.replace("-", "_")) is None:
        pytest.skip(f"there is no package {hub}")
    return sys.executable
