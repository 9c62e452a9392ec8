"""For tests of the embedded engine that hold with its kernels in C and with torch's operations."""

from __future__ import annotations

from collections.abc import Iterator

import engine_runs
import pytest


@pytest.fixture(scope="module", params=[True, False], ids=["kernels", "torch"])
def both_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    engine_runs.USE_KERNELS = request.param
    yield
    engine_runs.USE_KERNELS = True
