"""TensorBoard event files under RUN/tensorboard/<role>, written without TensorFlow or torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.base.paths import RunDir
from stretto.config.sections.monitors import TensorboardSection
from stretto.monitors.tables import images_of, without_images


class TensorboardMonitor:
    def __init__(self, run_dir: RunDir, role: str, resumed_step: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run_dir.path / "tensorboard" / role))
        if resumed_step is not None:  # the viewer drops later steps of earlier incarnations
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(resumed_step + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        self._add(step, summary=self._summary.Summary(value=values))

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """As a table in Markdown, under TEXT; images of row i under IMAGES, with the name and i."""
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text import metadata

        size = tensor_shape_pb2.TensorShapeProto.Dim(size=1)
        text = tensor_pb2.TensorProto(
            dtype="DT_STRING",
            string_val=[_as_markdown([without_images(row) for row in rows]).encode()],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[size]),
        )
        value = self._summary.Summary.Value(
            tag=name, tensor=text, metadata=metadata.create_summary_metadata(name, "")
        )
        pictures = [
            self._summary.Summary.Value(
                tag=f"{name}/{i}/{j}",
                image=self._summary.Summary.Image(encoded_image_string=png, colorspace=3),
            )
            for i, row in enumerate(rows)
            for j, png in enumerate(images_of(row))
        ]
        self._add(step, summary=self._summary.Summary(value=[value, *pictures]))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


def _as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        texts = (str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(rows[0]), line("-" * len(rows[0])), *(line(row.values()) for row in rows)])


def build(
    section: TensorboardSection, run_dir: RunDir, role: str, run_name: str, resumed_step: int | None
) -> TensorboardMonitor:
    """Build the monitor; takes a second to import the package."""
    return TensorboardMonitor(run_dir, role, resumed_step)
