"""What trackers get besides metrics: tables, values of histograms, the config.

A row of a table has texts and numbers, and under `images` PNG files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from stretto.base.paths import RunDir
from stretto.config.load import masked

IMAGES = "images"

TableRow = Mapping[str, str | int | float | tuple[bytes, ...]]
Values = np.ndarray
"""float [values], such as one per rollout of a step; finite."""


def images_of(row: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The PNG files of a row."""
    return tuple(row.get(IMAGES, ()))


def without_images(row: Mapping[str, Any]) -> dict[str, Any]:
    """The texts and numbers of a row."""
    return {key: value for key, value in row.items() if key != IMAGES}


def config_of(run_dir: RunDir) -> dict[str, Any] | None:
    """The run's resolved config without its secrets; None where there is none."""
    try:
        return masked(json.loads(run_dir.config("run").read_text()))
    except (OSError, ValueError):
        return None
