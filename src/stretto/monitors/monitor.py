"""The class of all monitors, and what they get: metrics, tables, values of histograms, the run's config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.base.paths import RunDir
from stretto.config.masks import masked

IMAGES = "images"

TableRow = Mapping[str, str | int | float | tuple[bytes, ...]]
"""Texts and numbers by column; PNG files in the column `images`."""
Values = np.ndarray
"""float [values], such as one per rollout of a step; finite."""


class Monitor:
    """One place where metrics are written; a subclass overrides what it can show."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Show a table of at least one row."""

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        """Show how the values of each name are distributed."""

    def close(self) -> None:
        """Write what is pending and free resources."""


class Tracker(Monitor):
    """A monitor of a package of its own, which is fed in a thread."""

    service = ""
    """The name of the server that asks for a key, unless a variable NAME_MODE says "offline"; "" if none does."""

    @staticmethod
    def check_login(section: Any) -> str:
        """How it will run, in words, after a look for what that needs; asks no server.

        Raises: ConfigError if it needs a key, and there is none.
        """
        return ""


@dataclass(frozen=True)
class Source:
    """The process whose metrics a monitor gets."""

    run_dir: RunDir
    role: str
    run_name: str
    resumed_step: int | None
    """The step after which a resumed run continues; None for a new run."""

    def label(self, name: str) -> str:
        """The name of the run in a tracker; evals that are made beside a training run have one of their own."""
        return name if self.role in ("orchestrator", "trainer") else f"{name}-{self.role}"

    def config(self) -> dict[str, Any] | None:
        """The run's resolved config without its secrets; None if there is none."""
        try:
            return masked(json.loads(self.run_dir.config("run").read_text()))
        except (OSError, ValueError):
            return None


def images_of(row: TableRow) -> tuple[bytes, ...]:
    """The PNG files of a row."""
    images = row.get(IMAGES, ())
    assert isinstance(images, tuple), "the column `images` holds PNG files"
    return images


def without_images(row: TableRow) -> dict[str, Any]:
    """The texts and numbers of a row."""
    return {key: value for key, value in row.items() if key != IMAGES}
