"""--custom-config-path: a table of values. Those of flags are taken as typed ones are; all others reach functions."""

from __future__ import annotations

from typing import Any

from stretto.vime.files.read import read_yaml


def read_own(path: str, where: str) -> dict[str, Any]:
    """Values by attribute.

    Raises: ConfigError if the file cannot be read or holds no table.
    """
    return {key.replace("-", "_"): value for key, value in read_yaml(path, where).items()}
