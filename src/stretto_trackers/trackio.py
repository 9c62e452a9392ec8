"""trackio, a local tracker that records in its own cache directory; `trackio show` plots it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.config.sections.monitors import TrackioSection
from stretto.monitors.monitor import IMAGES, Source, TableRow, Tracker, Values, images_of, without_images


class TrackioMonitor(Tracker):
    def __init__(self, section: TrackioSection, source: Source) -> None:
        import trackio

        self._run = trackio.init(
            project=section.project,
            name=source.label(source.run_name),
            group=source.run_name,
            config=source.config(),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        import trackio
        from PIL import Image

        def shown(row: TableRow) -> dict[str, Any]:
            pictures = [trackio.Image(Image.open(io.BytesIO(png))) for png in images_of(row)]
            return without_images(row) | ({IMAGES: pictures} if any(map(images_of, rows)) else {})

        data = [shown(row) for row in rows]
        table = trackio.Table(data=data)  # type: ignore[arg-type]  # it also takes rows as dictionaries
        self._run.log({name: table}, step=step)

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        import trackio

        self._run.log({name: trackio.Histogram(each) for name, each in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
