"""docs/security.md names every port that a key of the config sets, with its default, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pages.blocks import ROOT

from stretto.config.root import RLConfig
from stretto.config.section import Section

ENGINES = ("teacher_inference.", "models.")
"""Sections with the ports of [inference]."""


def sections_in(kind: Any) -> Iterator[type[Section]]:
    """The sections in the type of a field: itself, or the members of a union."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from sections_in(part)


def port_keys(section: type[Section], path: str = "") -> dict[str, Any]:
    """Keys of ports below a section, with their defaults."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if name == "port" or name.endswith("_port"):
            found[path + name] = field.default
        for part in sections_in(field.annotation):
            found |= port_keys(part, f"{path}{name}.")
    return found


def test_every_port_of_the_config_is_in_the_table_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (\S+) \|", (ROOT / "docs" / "security.md").read_text(), re.M)
    keys = {k: v for k, v in port_keys(RLConfig).items() if not k.startswith(ENGINES)}
    assert dict(rows) == {key: str(default) for key, default in keys.items()}
    assert len(rows) == len(keys) > 12
