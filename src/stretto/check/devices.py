"""Checks what a section asks of devices, after a plan has changed it."""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.config.rules.engine import engine_nodes
from stretto.config.rules.rule import below
from stretto.config.sections.inference import InferenceSection


def check_nodes(section: InferenceSection, path: str) -> None:
    """Check that engines fit into the nodes of a section that has changed since it was loaded.

    Raises: ConfigError if they do not; path: of the section.
    """
    if problems := [*engine_nodes(section, below(section, path))]:
        raise ConfigError("\n".join(problem.sentence for problem in problems))
