"""Weights & Biases: one W&B run per process, grouped by run name, continued after a resume."""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.base.files import write_atomic
from stretto.config.sections.monitors import WandbSection
from stretto.monitors.monitor import Monitor, Source, TableRow, Values


class WandbMonitor(Monitor):
    def __init__(self, section: WandbSection, source: Source) -> None:
        import wandb

        run_name, role, directory = source.run_name, source.role, source.run_dir.path / "wandb"
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=f"{section.name or run_name}-{role}",
            group=section.group or section.name or run_name,
            job_type=role,
            tags=section.tags,
            config=source.config(),
            dir=str(source.run_dir.path),
            mode="offline" if section.offline else "online",
            id=_run_id(directory / f"{role}.id"),
            resume=None if section.offline else "allow",
            settings=wandb.Settings(silent=True, init_timeout=120, console="off", disable_git=True),
        )
        # Rows are keyed by our step, not by W&B's counter, which cannot go back after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        import wandb
        from PIL import Image

        def cell(value: Any) -> Any:
            is_images = isinstance(value, tuple)
            return [wandb.Image(Image.open(io.BytesIO(png))) for png in value] if is_images else value

        table = wandb.Table(columns=list(rows[0]), data=[list(map(cell, row.values())) for row in rows])
        self._run.log({"step": step, name: table})

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        import wandb

        self._run.log({"step": step} | {name: wandb.Histogram(each) for name, each in values.items()})

    def close(self) -> None:
        """Finish the W&B run and end W&B's own process, which would otherwise outlive this one."""
        import wandb

        self._run.finish()
        wandb.teardown()


def _run_id(path: Path) -> str:
    """The W&B id of this process, kept in a file of the run directory across resumes."""
    if not path.exists() or not path.read_text().strip():  # empty after a power cut
        write_atomic(path, secrets.token_hex(6).encode(), is_durable=True)
    return path.read_text().strip()
