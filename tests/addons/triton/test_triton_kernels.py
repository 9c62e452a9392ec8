"""Kernels of triton give the numbers of their references, in triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BESIDE = Path(sys.prefix, "opt", "triton")
"""Where `make triton` puts it."""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        find_spec("triton") is None and not (BESIDE / "triton").is_dir(),
        reason="triton is not installed; `make triton` does it",
    ),
]


def run_interpreted(code: str) -> None:
    """In a process of its own: triton reads TRITON_INTERPRET when it is imported."""
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(BESIDE)))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parents[2], check=True, timeout=120)


def test_8_bit_kernels_give_the_reference() -> None:
    check = "c.assert_kernels_agree(k.Triton(), 'cpu', is_interpreted=True)"
    run_interpreted(f"import cases.kernels.fp8 as c, stretto_triton.fp8 as k; {check}")


def test_row_kernels_give_torchs_numbers() -> None:
    check = "[c.assert_row_kernels_agree(g.GpuKernels(), 'cpu', d) for d in (torch.float32, torch.bfloat16)]"
    run_interpreted(f"import torch, cases.kernels.gpu_rows as c, stretto_triton.rows as g; {check}")
