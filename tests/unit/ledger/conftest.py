"""A run directory for every test of the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.paths import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")
