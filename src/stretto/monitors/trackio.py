"""trackio, a local tracker: it records in its own cache directory, and `trackio show` plots it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.paths import RunDir
from stretto.config.sections.monitors import TrackioSection
from stretto.monitors.tables import Values, config_of, without_images


class TrackioMonitor:
    def __init__(self, section: TrackioSection, run_dir: RunDir, role: str, run_name: str) -> None:
        import trackio

        self._run = trackio.init(
            project=section.project,
            name=f"{run_name}-{role}",
            group=run_name,
            config=config_of(run_dir),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        self._run.log({name: trackio.Table(data=list(map(without_images, rows)))}, step=step)

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        import trackio

        self._run.log({name: trackio.Histogram(each) for name, each in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def build(
    section: TrackioSection, run_dir: RunDir, role: str, run_name: str, resumed_step: int | None
) -> TrackioMonitor:
    """Build the monitor; takes seconds to import the package and start its server."""
    return TrackioMonitor(section, run_dir, role, run_name)
