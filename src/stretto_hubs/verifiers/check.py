"""Check the settings of a verifiers environment without playing it: `python -m ... JSON` prints a list of sentences.

It is a process of its own, because verifiers takes seconds to import and loads a hundred packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from verifiers.v1.configs.agent import agent_config_fields

from stretto.base.errors import ConfigError
from stretto.base.foreign import describe_error
from stretto_hubs.verifiers.env import VerifiersEnv
from stretto_hubs.verifiers.packages import OWN_HARNESS

_ENGINES = ("docker", "podman", "apptainer")
"""Runtimes that are programs of this machine."""
_UV_HARNESSES = ("null", "bash")
_RUN_S = 10.0


def problems_of(settings: dict[str, Any]) -> list[str]:
    """What is wrong with the settings, or missing on this machine."""
    env = VerifiersEnv.__new__(VerifiersEnv)
    try:
        built = env.configure(**{name: each for name, each in settings.items() if name not in _LOADING})
    except ConfigError as error:
        return [str(error)]
    except (Exception, SystemExit) as error:  # the boundary of a taskset's module
        return [f"its taskset or environment cannot be built: {describe_error(error)}"]
    found = []
    for role, spec in agent_config_fields(built.config).items():
        harness, runtime = built._harnesses[role], spec.runtime.type
        name = f"{role}.harness = {harness.config.id}"
        if runtime == "subprocess" and harness.NEEDS_CONTAINER and harness.config.id != OWN_HARNESS:
            found.append(f'{name} installs programs, so it needs {role}.runtime = {{ type = "docker" }} or another')
        if runtime in _ENGINES and (reason := _engine_fault(runtime)):
            found.append(f"{role}.runtime = {runtime}: {reason}")
        if runtime == "subprocess" and harness.config.id in _UV_HARNESSES and shutil.which("uv") is None:
            found.append(f"{name} starts its program with uv, which is not here: pip install uv")
    return found


_LOADING = ("num_eval", "num_tasks", "select")


def _engine_fault(engine: str) -> str | None:
    if shutil.which(engine) is None:
        return f"there is no program {engine} here"
    if engine == "apptainer":
        return None
    try:
        subprocess.run([engine, "info"], capture_output=True, timeout=_RUN_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return f"`{engine} info` fails, so its daemon is not running or not yours"
    return None


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not the answer
    os.write(out, json.dumps(problems_of(json.loads(sys.argv[1]))).encode())
