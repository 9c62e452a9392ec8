"""Checks of `trainer.backend`, what trains instead of our own modules, and of the Python of the trainer's ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from stretto import __version__, addons
from stretto.base.errors import ConfigError
from stretto.base.process import output_of
from stretto.check.degrees import Degrees
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import TrainerKeys

GROUP = "stretto.networks"
OWN = "fsdp"
"""The backend of our own modules."""
PROBE_S = 180.0
"""Longest wait for a Python that imports torch, on a busy machine too."""
_PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": list(sys.version_info[:2])}
try:
    import stretto
    found["stretto"] = stretto.__version__
except ImportError:
    found["stretto"] = None
for name in ("torch", *sys.argv[2:]):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
if sys.argv[1] == "device":
    import torch
    try:
        torch.cuda.current_device()
        found["device"] = ""
    except (RuntimeError, AssertionError) as error:
        found["device"] = str(error).splitlines()[0].split(". ")[0]
print(json.dumps(found))
"""


class Backend(Protocol):
    """A backend of an add-on, with its section."""

    package: str
    """The distribution that has it."""

    def check(self, family: str, found: Mapping[str, Any], model: ModelSection) -> None:
        """Check a model; found: its config.json, empty for a scratch model.

        Raises: ConfigError with what it does not compute.
        """
        ...

    def degrees(self, model: ModelSection, num_ranks: int, shape: Any) -> Degrees:
        """The degrees of its mesh; shape: a `degrees.Shape`, or a model's own config, which has the same fields.

        Raises: ConfigError naming the key, and the values it may have.
        """
        ...

    def find_python(self) -> str | None:
        """The Python that has it, if `trainer.interpreter` names none; None if none is there."""
        ...

    def check_python(self, found: Mapping[str, Any], python: str, where: str) -> str:
        """What a Python has, in words; found: versions of Python, torch and `package`, and what no device says.

        Raises: ConfigError if it lacks something; where: the keys that chose it.
        """
        ...

    @property
    def build(self) -> Callable[..., Any]:
        """The trainer's NetworkBuilder."""
        ...


def find_backend(trainer: TrainerKeys) -> Backend | None:
    """The backend that trains; None: our own modules do.

    Raises: ConfigError if its add-on is not installed.
    """
    name = trainer.backend
    if name == OWN:
        return None
    found: Backend = addons.load(GROUP, name, f'trainer.backend = "{name}"')(getattr(trainer, name))
    return found


def trainer_python(trainer: TrainerKeys) -> str:
    """The Python that runs the ranks of the trainer."""
    if trainer.interpreter is not None:
        return str(Path(trainer.interpreter).expanduser().absolute())
    backend = find_backend(trainer)
    return (backend and backend.find_python()) or sys.executable


def check_trainer_python(trainer: TrainerKeys, *, needs_gpu: bool = False) -> str:
    """What the trainer's Python has, in words; "" for this one with our own modules.

    needs_gpu: another backend is to find a GPU on this machine.

    Raises: ConfigError if it lacks stretto of this version, or what the backend needs.
    """
    python, backend = trainer_python(trainer), find_backend(trainer)
    if backend is None and trainer.interpreter is None:
        return ""
    key = f'trainer.interpreter = "{trainer.interpreter}"'
    where = key if trainer.interpreter else f'trainer.backend = "{trainer.backend}"'
    packages = [] if backend is None else [backend.package]
    found = _ask(python, where, "device" if needs_gpu and backend is not None else "", *packages)
    if found["stretto"] != __version__:
        got = "no stretto" if found["stretto"] is None else f"stretto {found['stretto']}"
        raise ConfigError(f"{where}: {python} has {got}; install stretto {__version__} there, as it is here")
    if backend is not None:
        return backend.check_python(found, python, where)
    return f"Python {'.'.join(map(str, found['python']))} with torch {found['torch']}, {python}"


def _ask(python: str, where: str, *words: str) -> dict[str, Any]:
    """What a Python says it has. Raises: ConfigError if it does not answer."""
    began = time.monotonic()
    printed = output_of([python, "-c", _PROBE, *words], PROBE_S)
    if printed is None and time.monotonic() - began >= PROBE_S:
        raise ConfigError(
            f"{where}: {python} did not answer within {PROBE_S:g} s; try again when the machine is less busy"
        )
    try:
        found: dict[str, Any] = json.loads(printed or "")
    except ValueError:
        raise ConfigError(f"{where}: {python} is no Python that runs; give the path of one") from None
    return found
