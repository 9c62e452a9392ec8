"""trainer.backend = "megatron", as the core asks for it. A network that is built imports torch and Megatron-Core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.check.degrees import Degrees
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import MegatronSection
from stretto_megatron.checks import degrees, limits

MADE = Path("opt/megatron/bin/python")
"""Where `make megatron` makes an environment, from that of this command."""
RELEASE = "0.19"
"""The release of Megatron-Core whose optimizer, schedules and checkpoints are known; others may keep them otherwise."""
HOW = "`make megatron` makes an environment that has it, where Python 3.12 is there"


class Megatron:
    """Megatron-Core as a backend; section: [trainer.megatron]."""

    package = "megatron-core"

    def __init__(self, section: MegatronSection | None) -> None:
        self.section = section or MegatronSection()

    def check(self, family: str, found: Mapping[str, Any], model: ModelSection) -> None:
        """Raises: ConfigError naming what Megatron does not compute; found: the config.json, empty if from scratch."""
        limits.check(family, found, model, self.section)

    def degrees(self, model: ModelSection, num_ranks: int, shape: Any) -> Degrees:
        """The degrees of its mesh. Raises: ConfigError naming the key, and the values it may have."""
        return degrees.find_degrees(model, self.section, num_ranks, shape)

    @property
    def build(self) -> Callable[..., Any]:
        """The trainer's NetworkBuilder."""
        return partial(limits.build_network, section=self.section)

    def find_python(self) -> str | None:
        """This Python if it has Megatron-Core, else that of `make megatron`; None if neither is there."""
        return find_python()

    def check_python(self, found: Mapping[str, Any], python: str, where: str) -> str:
        """What a Python has, in words. Raises: ConfigError if it lacks Megatron-Core of this release, or a GPU."""
        version, core = ".".join(map(str, found["python"])), found[self.package]
        if core is None or ".".join(core.split(".")[:2]) != RELEASE:
            got = "no Megatron-Core" if core is None else f"megatron-core {core}"
            raise ConfigError(
                f"{where}: {python} (Python {version}) has {got}, and {RELEASE} is needed, which is for Python 3.12 "
                f"and newer: what is read of its optimizer may change with every release; {HOW}, or give the Python "
                "that has it as trainer.interpreter"
            )
        if found.get("device"):
            raise ConfigError(
                f"{where}: Megatron computes on GPUs, and there is none ({found['device']}); leave trainer.backend out"
            )
        return f"Megatron-Core {core} with torch {found['torch']}, Python {version}, {python}"


def find_python() -> str | None:
    """This Python if it has Megatron-Core, else that of `make megatron`; None if neither is there."""
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        return sys.executable
    made = Path(sys.prefix) / MADE
    return str(made) if made.is_file() else None
