"""MLflow: one run of an experiment per training run, continued after a resume.

Without a server the run is in RUN/mlflow, a SQLite database and artifacts, which `mlflow ui` shows. MLflow knows no
tables and no histograms: rows are JSON artifacts, images are logged beside them, and of distributed values there are
quantiles.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stretto.base.files import write_atomic
from stretto.config.sections.monitors import MlflowSection
from stretto.monitors.monitor import Source, TableRow, Tracker, Values, images_of, without_images

URI_VAR = "MLFLOW_TRACKING_URI"
MAX_PARAMS, MAX_METRICS = 100, 1000  # of one request
MAX_VALUE = 500  # characters of a parameter, which older servers accept
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


class MlflowMonitor(Tracker):
    def __init__(self, section: MlflowSection, source: Source) -> None:
        from mlflow.tracking import MlflowClient

        folder = source.run_dir.path / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        uri = section.uri or os.environ.get(URI_VAR)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        artifacts = None if uri else (folder.resolve() / "artifacts").as_uri()
        experiment = self._experiment(section.experiment, artifacts)
        path = folder / f"{source.role}.id"
        known = path.read_text().strip() if path.exists() else ""
        if known:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
        else:
            name = section.name or source.run_name
            self._run_id = self._client.create_run(experiment, run_name=source.label(name)).info.run_id
            write_atomic(path, self._run_id.encode(), is_durable=True)
        if config := source.config():
            self._log_config(config, is_new=not known)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """The id of the experiment, which is made if there is none."""
        found = self._client.get_experiment_by_name(name)
        return (
            self._client.create_experiment(name, artifact_location=artifacts) if found is None else found.experiment_id
        )

    def _log_config(self, config: dict[str, Any], *, is_new: bool) -> None:
        """The config as a file, and of a new run as parameters, which cannot change later."""
        from mlflow.entities import Param

        self._client.log_dict(self._run_id, config, "config.json")
        params = [Param(_name(key), str(value)[:MAX_VALUE]) for key, value in _flat(config)] if is_new else []
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(_name(key), float(value), now, step) for key, value in metrics.items() if not isinstance(value, str)
        ]
        for first in range(0, len(rows), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=rows[first : first + MAX_METRICS])

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Rows as the artifact `name/step_N.json`, in the form of MLflow's tables, and their images."""
        from PIL import Image

        plain = [without_images(row) for row in rows]
        table = {"columns": list(plain[0]), "data": [list(row.values()) for row in plain]}
        self._client.log_dict(self._run_id, table, f"{_name(name)}/step_{step}.json")
        for i, row in enumerate(rows):
            for j, png in enumerate(images_of(row)):
                image = Image.open(io.BytesIO(png))
                self._client.log_image(self._run_id, image, key=f"{_name(name)}/{i}-{j}", step=step)

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        self.log(
            step,
            {
                f"{name}/{label}": float(np.quantile(each, share))
                for name, each in values.items()
                for label, share in QUANTILES.items()
            },
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _name(text: str) -> str:
    """A name that MLflow accepts: `avg@4` is `avg-4`."""
    return _NOT_ALLOWED.sub("-", text)


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of a config, and their values; lists are one value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        elif value is not None:
            yield f"{path}{key}", value
