"""Wrong sections of [inference], and what is said of them; tests of engines and routers have their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig


def check_one_line(toml: str, expected: str, directory: Path) -> None:
    """Check that a wrong file is one line of a message, with its place."""
    path = directory / "infer.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(InferenceConfig, ["@", str(path)], verb="inference")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 1, lines
    assert expected in lines[0], lines[0]
    assert "infer.toml:" in lines[0]
