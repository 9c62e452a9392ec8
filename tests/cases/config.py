"""A config that is right, and what the loader says about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.add_ons import skip_without_verb

from stretto.base.errors import ConfigError
from stretto.config.describe import ROOTS
from stretto.config.load import load

ENV = '[[orchestrator.env]]\nid = "sort-letters"\n'


def complaints(folder: Path, toml: str, flags: str, verb: str = "rl") -> list[str]:
    """The problems of a file, `c.toml`, and flags, one string each; the file's folder is left out."""
    file = folder / "c.toml"
    file.write_text(toml)
    skip_without_verb(verb)
    with pytest.raises(ConfigError) as caught:
        load(ROOTS[verb], ["@", str(file), *flags.split()], verb=verb)
    head, *lines = str(caught.value).replace(f"{folder}/", "").split("\n")
    assert head == f"{len(lines)} problem{'s' if len(lines) > 1 else ''} in the configuration of `{verb}`"
    return [line.strip() for line in lines]
