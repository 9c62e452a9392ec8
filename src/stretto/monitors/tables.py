"""Rows of tables: texts and numbers, and under `images` PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IMAGES = "images"

TableRow = Mapping[str, str | int | float | tuple[bytes, ...]]


def images_of(row: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The PNG files of a row."""
    return tuple(row.get(IMAGES, ()))


def without_images(row: Mapping[str, Any]) -> dict[str, Any]:
    """The texts and numbers of a row."""
    return {key: value for key, value in row.items() if key != IMAGES}
