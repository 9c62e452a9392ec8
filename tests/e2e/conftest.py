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
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`fine_tuned` once per session for the same settings, whichever worker of xdist is first; only read the model."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "warmed-up"

    def model(**settings: Any) -> Path:
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        directory, weights = root / name, root / name / "model"
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not weights.exists():
                weights.symlink_to(fine_tuned(directory, **settings))
        return weights

    return model


@pytest.fixture(scope="session")
def sorter(warmed_up: Callable[..., Path]) -> Path:
    """0.13M parameters that sort four letters right in about a fifth of all tries."""
    return warmed_up(max_steps=100, scheduler={"type": "constant", "warmup_steps": 20})
