"""Programs that show metrics: W&B, TensorBoard, trackio, MLflow, SwanLab."""

from __future__ import annotations

import secrets
from pathlib import Path

from stretto.base.files import write_atomic


def run_id(path: Path) -> str:
    """The id of a run at a service, kept in a file of the run directory across resumes."""
    if not path.exists() or not path.read_text().strip():  # empty after a power cut
        write_atomic(path, secrets.token_hex(10).encode(), is_durable=True)
    return path.read_text().strip()
