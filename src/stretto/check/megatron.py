"""Checks that Megatron-Core can train a model here: the Python of the trainer's ranks, and what the add-on refuses."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stretto import __version__, addons
from stretto.base.errors import ConfigError
from stretto.base.process import output_of
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import MegatronSection, TrainerKeys

MADE = Path("opt/megatron/bin/python")
"""Where `make megatron` makes an environment, from that of this command."""
RELEASE = (0, 19)
"""The release of Megatron-Core whose optimizer, schedules and checkpoints are known; others may keep them otherwise."""
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
for name in ("torch", "megatron-core"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
if "device" in sys.argv:
    import torch
    try:
        torch.cuda.current_device()
        found["device"] = ""
    except (RuntimeError, AssertionError) as error:
        found["device"] = str(error).splitlines()[0].split(". ")[0]
print(json.dumps(found))
"""
HOW = "`make megatron` makes an environment that has it, where Python 3.12 is there"


def trainer_python(trainer: TrainerKeys) -> str:
    """The Python that runs the ranks of the trainer."""
    if trainer.interpreter is not None:
        return str(Path(trainer.interpreter).expanduser().absolute())
    if trainer.backend == "megatron":
        return find_python() or sys.executable
    return sys.executable


def find_python() -> str | None:
    """This Python if it has Megatron-Core, else that of `make megatron`; None if neither is there."""
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        return sys.executable
    made = Path(sys.prefix) / MADE
    return str(made) if made.is_file() else None


def find_megatron(trainer: TrainerKeys) -> MegatronSection | None:
    """The section of Megatron; None if it does not train."""
    return None if trainer.backend == "fsdp" else trainer.megatron or MegatronSection()


def check_refused(family: str, found: Mapping[str, Any], model: ModelSection, megatron: MegatronSection) -> None:
    """Check that the add-on computes this model; found: its config.json, empty for a scratch model.

    Raises: ConfigError with what it does not compute.
    """
    check = addons.load("stretto.networks", "megatron.check", 'trainer.backend = "megatron"')
    check(family, found, model, megatron)


def check_trainer_python(trainer: TrainerKeys, *, needs_gpu: bool = False) -> str:
    """What the trainer's Python has, in words; "" for this one with our own modules.

    needs_gpu: Megatron is to find a GPU on this machine.

    Raises: ConfigError if it lacks stretto of this version, or Megatron-Core or a GPU where Megatron trains.
    """
    python, key = trainer_python(trainer), "trainer.interpreter"
    if trainer.backend == "fsdp" and trainer.interpreter is None:
        return ""
    where = f'{key} = "{trainer.interpreter}"' if trainer.interpreter else f'trainer.backend = "{trainer.backend}"'
    words = ["device"] if needs_gpu and trainer.backend == "megatron" else []
    began = time.monotonic()
    printed = output_of([python, "-c", _PROBE, *words], PROBE_S)
    if printed is None and time.monotonic() - began >= PROBE_S:
        raise ConfigError(
            f"{where}: {python} did not answer within {PROBE_S:g} s; try again when the machine is less busy"
        )
    try:
        found = json.loads(printed or "")
    except ValueError:
        raise ConfigError(f"{where}: {python} is no Python that runs; give the path of one") from None
    version = ".".join(map(str, found["python"]))
    if found["stretto"] != __version__:
        got = "no stretto" if found["stretto"] is None else f"stretto {found['stretto']}"
        raise ConfigError(f"{where}: {python} has {got}; install stretto {__version__} there, as it is here")
    if trainer.backend == "fsdp":
        return f"Python {version} with torch {found['torch']}, {python}"
    core = found["megatron-core"]
    release = ".".join(map(str, RELEASE))
    if core is None or core.split(".")[:2] != release.split("."):
        got = "no Megatron-Core" if core is None else f"megatron-core {core}"
        raise ConfigError(
            f"{where}: {python} (Python {version}) has {got}, and {release} is needed, which is for Python 3.12 and "
            f"newer: what is read of its optimizer may change with every release; {HOW}, or give the Python that has "
            f"it as {key}"
        )
    if found.get("device"):
        raise ConfigError(
            f"{where}: Megatron computes on GPUs, and there is none ({found['device']}); leave trainer.backend out"
        )
    return f"Megatron-Core {core} with torch {found['torch']}, Python {version}, {python}"
