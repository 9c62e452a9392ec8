"""Every metric that these runs write is in docs/metrics.md."""

from __future__ import annotations

import pytest
from listed_metrics import listed_only


@pytest.fixture(autouse=True)
def metrics_are_listed(monkeypatch):
    yield from listed_only(monkeypatch)
