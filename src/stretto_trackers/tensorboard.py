"""TensorBoard event files under RUN/tensorboard/<role>, written without TensorFlow or torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stretto.config.sections.monitors import TensorboardSection
from stretto.monitors.monitor import Source, TableRow, Tracker, Values, images_of, without_images

NUM_BINS = 30  # of a histogram


class TensorboardMonitor(Tracker):
    def __init__(self, section: TensorboardSection, source: Source) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(source.run_dir.path / "tensorboard" / source.role))
        if config := source.config():
            self._log_text(0, "config", f"```json\n{json.dumps(config, indent=2)}\n```")
        if source.resumed_step is not None:  # the viewer drops later steps of earlier incarnations
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(source.resumed_step + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        self._add(step, summary=self._summary.Summary(value=values))

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Show a table in Markdown under TEXT, and image j of row i as `name/i/j` under IMAGES."""
        self._log_text(step, name, _as_markdown([without_images(row) for row in rows]))
        pictures = [
            self._summary.Summary.Value(
                tag=f"{name}/{i}/{j}", image=self._summary.Summary.Image(encoded_image_string=png, colorspace=3)
            )
            for i, row in enumerate(rows)
            for j, png in enumerate(images_of(row))
        ]
        if pictures:
            self._add(step, summary=self._summary.Summary(value=pictures))

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        def histogram(each: Values) -> Any:
            counts, edges = np.histogram(each, bins=NUM_BINS)
            return self._summary.HistogramProto(
                min=each.min(), max=each.max(), num=len(each), sum=each.sum(), sum_squares=np.square(each).sum(),
                bucket_limit=edges[1:].tolist(), bucket=counts.tolist(),
            )  # fmt: skip

        shown = [self._summary.Summary.Value(tag=name, histo=histogram(each)) for name, each in values.items()]
        self._add(step, summary=self._summary.Summary(value=shown))

    def close(self) -> None:
        self._writer.close()

    def _log_text(self, step: int, name: str, text: str) -> None:
        """A text in Markdown."""
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text import metadata

        size = tensor_shape_pb2.TensorShapeProto.Dim(size=1)
        tensor = tensor_pb2.TensorProto(
            dtype="DT_STRING", string_val=[text.encode()], tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[size])
        )
        shown = metadata.create_summary_metadata(name, "")
        value = self._summary.Summary.Value(tag=name, tensor=tensor, metadata=shown)
        self._add(step, summary=self._summary.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


def _as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        texts = (str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(rows[0]), line("-" * len(rows[0])), *(line(row.values()) for row in rows)])
