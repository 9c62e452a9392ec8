"""Runs in this process may write only metrics that docs/metrics.md has."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.base.paths import RunDir
from stretto.monitors.base import Monitors
from stretto.monitors.catalog import unlisted
from stretto.monitors.file import MetricsFile, read_metrics


def unlisted_of(run: RunDir) -> dict[str, list[str]]:
    """By process, the names in a run's metrics files that have no entry in the catalog."""
    files = sorted(run.path.glob("metrics/*.jsonl"))
    found = {file.stem: unlisted(file.stem, {k for row in read_metrics(file) for k in row}) for file in files}
    return {role: names for role, names in found.items() if names}


def listed_only(monkeypatch) -> Iterator[None]:
    """While this is open, remember the names that are written; at the end none may be without an entry."""
    missing: dict[str, list[str]] = {}
    opened, log = MetricsFile.__init__, Monitors.log

    def open_file(self, path, **kwargs) -> None:
        opened(self, path, **kwargs)
        self.role = path.stem

    def checked_log(self, step, metrics) -> None:
        role = getattr(self._monitors.get("file"), "role", None)
        if role is not None and (names := unlisted(role, metrics)):
            missing.setdefault(role, []).extend(names)
        log(self, step, metrics)

    monkeypatch.setattr(MetricsFile, "__init__", open_file)
    monkeypatch.setattr(Monitors, "log", checked_log)
    yield
    assert not missing, f"not in monitors/catalog.py: {missing}"
