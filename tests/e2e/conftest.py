"""Whole runs. That this file is here lets the folders below import runs.py and envs.py."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import fine_tuned


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Path]], Path]:
    """`once(name, build)`: what `build` returns, built by whichever worker of xdist needs it first; only read it."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "once"

    def get(name: str, build: Callable[[], Path]) -> Path:
        root.mkdir(exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / name).exists():
                (root / name).symlink_to(build())
        return root / name

    return get


@pytest.fixture(scope="session")
def warmed_up(
    once: Callable[[str, Callable[[], Path]], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`fine_tuned`, once per session for the same settings."""

    def model(**settings: Any) -> Path:
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        return once(name, lambda: fine_tuned(tmp_path_factory.mktemp("warmed-up"), **settings))

    return model


@pytest.fixture(scope="session")
def sorter(warmed_up: Callable[..., Path]) -> Path:
    """0.13M parameters that sort four letters right in about a fifth of all tries."""
    return warmed_up(max_steps=100, scheduler={"type": "constant", "warmup_steps": 20})
