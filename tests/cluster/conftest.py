"""Clusters on one machine: a test names the programs and modules it needs, and is skipped where one is missing.

    @pytest.mark.cluster("sbatch", "munged", modules=("ray",), root=True)

Tests of this folder without the mark need nothing and are run by `make test`; `make test-cluster` installs what the
others need and runs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from needs import find_missing, find_refusal

# Daemons are where only root looks, and what pip and `make test-cluster` install is beside this Python.
PLACES = (str(Path(sys.executable).parent), "/usr/local/sbin", "/usr/sbin", "/sbin")
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("cluster"):
        if missing := [*find_missing(mark)]:
            pytest.skip(f"{', '.join(missing)} is missing; `make test-cluster` installs it")
        if mark.kwargs.get("root") and os.geteuid() != 0:
            pytest.skip("only root can make network namespaces")
        if mark.kwargs.get("root") and (why := find_refusal()):
            pytest.skip(f"root cannot make hosts with a network of their own here, as in a container: {why}")
