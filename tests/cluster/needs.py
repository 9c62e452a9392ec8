"""What a test of a cluster needs and this machine does not have."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest


def find_missing(mark: pytest.Mark) -> list[str]:
    """The programs and modules that a test names and this machine does not have."""
    programs = [name for name in mark.args if shutil.which(name) is None]
    return programs + [name for name in mark.kwargs.get("modules", ()) if find_spec(name) is None]
