"""Kernels of triton give the numbers of their references, in triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_give_the_reference_in_the_interpreter():
    """In a process of its own: triton reads TRITON_INTERPRET when it is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    here = Path(__file__).parents[2]
    check = "c.assert_kernels_agree(k.Triton(), 'cpu', is_interpreted=True)"
    code = f"import cases.fp8 as c, stretto_triton.fp8 as k; {check}"
    subprocess.run([sys.executable, "-c", code], env=env, cwd=here, check=True, timeout=120)


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_for_gpus_give_torchs_numbers_in_the_interpreter():
    """In a process of its own: triton reads TRITON_INTERPRET when it is imported."""
    code = "import torch, cases.gpu_kernels as c, stretto_triton.rows as g"
    code += "; [c.assert_row_kernels_agree(g.GpuKernels(), 'cpu', d) for d in (torch.float32, torch.bfloat16)]"
    env = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parents[2], check=True, timeout=120)
