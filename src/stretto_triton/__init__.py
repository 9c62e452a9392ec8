"""Kernels for GPUs, written in triton: rows of a training step, and 8-bit products. Triton is imported when asked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stretto.models.fp8.reference import Kernels
    from stretto_triton.rows import GpuKernels


def row_kernels() -> GpuKernels | None:
    """The operations between the matrix products of a training step; None without triton."""
    if find_spec("triton") is None:
        return None
    from stretto_triton.rows import GpuKernels

    return GpuKernels()


def fp8_kernels(device: torch.device) -> Kernels:
    """8-bit products on a device."""
    from stretto_triton.fp8 import find_kernels

    return find_kernels(device)
